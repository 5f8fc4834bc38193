"""Evaluate an agent on longer chains than it was trained on.

In: a condition such as `hops 4`, and the test's rows. Out: as many questions about the test's
world, all of that number of hops. Next: `trainer.eval_conditions` names the condition, and the eval
card has the scores.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from agent_r1 import Asked, BaseTool, Config, ConfigError, Row
from agent_r1_recipes.laptop.tinyhop import make_questions
from agent_r1_recipes.laptop.tinyhop_source import to_asked, worlds
from agent_r1_recipes.robustness.conditions import Condition, LoadTools, count_of


@dataclass(frozen=True)
class Hops(Condition):
    """Questions of one number of hops."""

    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        if config.data.name != "tinyhop":
            raise ConfigError(
                f"hops: only TinyHop makes questions; data.name is {config.data.name}",
                code="unfit_condition",
            )
        seed = config.seed
        kind = f"{count_of('hops', self.argument)}-hop"
        [world] = [world for split, _, world in worlds(config.data, seed) if split == "test"]
        # The test's world, whose passages are in the index. Its own questions stay as they are.
        rng = random.Random(f"{seed}/test/{kind}")
        questions = make_questions(world, rng, len(rows), {kind: 1})
        rows = [as_row(to_asked(q), row) for q, row in zip(questions, rows, strict=True)]
        return rows, load_tools()


def as_row(question: Asked, other: Row) -> Row:
    """Put a question into the form of another one's row."""
    prompt = [*other["prompt"][:-1], {"role": "user", "content": question.question}]
    return other | {
        "prompt": prompt,
        "reward_model": other["reward_model"] | {"ground_truth": question.answers},
        "extra_info": other["extra_info"] | question.extra,
    }
