"""Play 100 scripted episodes of each world here and in TRL, and compare them.

The turns are those of the world's own demonstrator, which is often wrong. In TRL the real
GRPOTrainer plays them, with a model of two narrow layers that is not asked: only its
`_generate_single_turn` is replaced.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from agent_r1 import (
    ChatFormat,
    Generation,
    Message,
    Policy,
    Row,
    Sampling,
    Task,
    Workspace,
    load_config,
    make_loop,
    run_episodes,
    train_tokenizer,
    trajectory_rows,
)
from agent_r1.config import plugins
from agent_r1.training.demonstrate import play_demonstrations, texts_of
from agent_r1_recipes.homes.trl import Home, reward, trl_home

EPISODES = 100
WORLDS = {
    "support": ["data.train=100", "data.val=4", "data.test=4"],
    "tinymath": ["data.train=100", "data.val=4", "data.test=4"],
    # TRL offers tools in alphabetical order; in this order the ids of the prompts are equal, too.
    "two-tools": ["data.train=100", "data.val=4", "data.test=4", "env.tools=[calculator,search]"],
}
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def conversation(text: str) -> list[Message]:
    """Read the messages of a decoded prompt in the tiny model's template."""
    messages: list[Message] = []
    for part in text.split("<|im_start|>")[1:]:
        role, _, content = part.partition("\n")
        content = content.removesuffix("\n").removesuffix("<|im_end|>")
        results = RESULT.findall(content) if role == "user" else []
        for result in results:
            messages.append({"role": "tool", "content": result})
        if not results:
            messages.append({"role": role, "content": content})
    return messages[:-1]  # the last one is the beginning of the next turn


class Script:
    """Write the turn that follows a prompt, the same in both homes."""

    def __init__(self, demonstrate: Callable[..., str], rows: list[Row], chat: ChatFormat):
        self.demonstrate = demonstrate
        self.chat = chat
        self.rows = {row["prompt"][-1]["content"]: row for row in rows}

    def turn(self, prompt_ids: list[int]) -> list[int]:
        history = conversation(self.chat.decode(prompt_ids))
        question = next(message["content"] for message in history if message["role"] == "user")
        row = next(row for text, row in self.rows.items() if question.startswith(text))
        turns = sum(message["role"] == "assistant" for message in history)
        rng = random.Random(f"{row['extra_info']['index']}/{turns}")
        return self.chat.turn_ids(self.demonstrate(row, history, rng))


class Scripted(Policy):
    def __init__(self, script: Script):
        self.script = script

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        ids = self.script.turn(prompt_ids)
        return Generation(ids, [0.0] * len(ids), "stop")


Episode = tuple[list[int], list[int], float]
"""Ids, mask and reward."""


def played_here(config: Any, rows: list[Row], script: Script) -> list[Episode]:
    tools = Workspace(config).load_tools()
    rollout = config.rollout.model_copy(update={"max_context": 2000, "max_tokens_per_turn": 500})
    loop = make_loop(Scripted(script), script.chat, tools, rollout, config.env)
    tasks = [Task(row, str(n), f"s{n}", n) for n, row in enumerate(rows)]
    trajectories = asyncio.run(run_episodes(loop, tasks, Sampling(500)))
    episodes: list[Episode] = []
    for trajectory in trajectories:
        [row] = trajectory_rows(trajectory, 0)
        episodes.append((row.input_ids, row.action_mask, trajectory.reward))
    return episodes


def played_in_trl(
    config: Any, home: type[Home], rows: list[Row], script: Script, folder: str
) -> list[Episode]:
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.chat_template_utils import qwen3_schema
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = script.chat.tokenizer
    # TRL chooses its parser by the template's text, and cannot know ours, which writes Qwen3's
    # format.
    tokenizer.response_schema = qwen3_schema
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4000,
    )
    rewards: list[float | None] = []
    taken: dict[str, Any] = {}

    def recorded_reward(**columns: Any) -> list[float | None]:
        rewards.extend(reward(**columns))
        return rewards[-len(columns["completions"]) :]

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
            turns = [script.turn(list(ids)) for ids in prompt_ids]
            return turns, None

        def play(self, inputs: Any) -> None:
            self._generate_and_score_completions(inputs)

        def _generate(self, prompts: Any) -> Any:
            result = super()._generate(prompts)
            taken["ids"], taken["completions"], taken["masks"] = result[:3]
            return result

    trainer = Trainer(
        model=Qwen2ForCausalLM(shape),
        processing_class=tokenizer,
        reward_funcs=recorded_reward,
        environment_factory=home,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            num_generations=2,
            max_completion_length=1900,
            max_tool_calling_iterations=config.env.max_turns - 1,
            report_to="none",
            use_cpu=True,
        ),
    )
    trainer.play(rows)
    episodes: list[Episode] = []
    for prompt, completion, mask, value in zip(
        taken["ids"], taken["completions"], taken["masks"], rewards, strict=True
    ):
        ids = [*prompt, *completion]
        bits = [0] * len(prompt) + [int(bit) for bit in mask]
        episodes.append((ids, bits, value or 0.0))
    return episodes


def compare(preset: str, settings: list[str], folder: str) -> dict[str, Any]:
    """Return how many episodes of a world are equal, and the mean reward."""
    config = load_config(preset, settings, algorithm="grpo")
    home = trl_home(preset, *settings)
    rows = home.rows("train", EPISODES)
    name = config.cold_start.demonstrator
    plays = play_demonstrations(
        name, rows, Workspace(config).load_tools(), config.rollout, config.env, 0
    )
    chat = ChatFormat(train_tokenizer(texts_of(plays), config.model.vocab_size))
    script = Script(plugins.load_trusted(name, "cold_start.demonstrator"), rows, chat)
    ours = played_here(config, rows, script)
    theirs = played_in_trl(config, home, rows, script, folder)
    equal = [0, 0, 0]
    for one, other in zip(ours, theirs, strict=True):
        for place in range(3):
            equal[place] += one[place] == other[place]
    return {
        f"{preset}_ids_masks_rewards": "{} {} {} of {}".format(*equal, len(rows)),
        f"{preset}_mean_reward": round(sum(one[2] for one in ours) / len(ours), 2),
    }


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENT_R1_HOME"] = folder
        for preset, settings in WORLDS.items():
            figures |= compare(preset, settings, folder)
            print(figures, flush=True)
    return figures
