"""Ask whether an agent reads the order of its plan, where only the order helps.

python -m lab.experiments.plan_order --run discover-grpo

In most questions of two hops the passages give the order away: a book has no headquarters. Both
relations of *Where was the spouse of Sosnum born?* are in a person's passage, so the wrong one can
be quoted first. This program asks such questions about the persons of a run's test questions:

* as they are: how many answers are right?
* with the plan's two items exchanged in the agent's first turn, before it goes on: which relation
  does it quote first? An agent that follows the plan in its context quotes the birthplace. One that
  reads the question again quotes the spouse.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Iterable

from agent_r1 import (
    ChatFormat,
    Generation,
    Policy,
    Row,
    Sampling,
    Task,
    Trajectory,
    Workspace,
    find_model,
    json_records,
    make_loop,
    run_episodes,
    trajectory_rows,
)
from agent_r1.evaluation.evaluate import wilson_interval
from agent_r1.inference.agent import open_agent
from agent_r1_recipes.laptop.explorer import DONE, item_text
from agent_r1_recipes.laptop.reading import read_facts
from agent_r1_recipes.laptop.tinyhop_words import RELATIONS

INNER = "spouse"
"""The only relation that leads from an entity to another of its type."""
OUTER = ("birthplace", "employer")
ITEM = re.compile(r"/(\w+)")
THOUGHT = re.compile(r"<think>([^<]*)</think>")


def order_questions(rows: list[Row], passages: dict[str, str]) -> list[Row]:
    """Make a question for each of OUTER about each person's spouse. `rows` name the persons."""
    template = next(row for row in rows if row["extra_info"]["kind"] == "2-hop")
    persons = set()
    for row in rows:
        for lookup in row["extra_info"]["lookups"]:
            persons |= {lookup[end] for end in ("entity", "value") if lookup[end] in passages}
    answers = []
    for person in sorted(persons):
        facts = read_facts(passages[person], person)
        if INNER not in facts:
            continue
        spouse = facts[INNER]
        for outer in OUTER:
            phrase = RELATIONS[INNER].phrases[0].format(x=person)
            text = RELATIONS[outer].asks[0].format(x=phrase)
            answer = read_facts(passages[spouse], spouse)[outer]
            lookups = [
                {"entity": person, "relation": INNER, "value": spouse},
                {"entity": spouse, "relation": outer, "value": answer},
            ]
            prompt = [*template["prompt"][:-1], template["prompt"][-1] | {"content": text}]
            answers.append(
                template
                | {"prompt": prompt}
                | {"reward_model": template["reward_model"] | {"ground_truth": [answer]}}
                | {"extra_info": template["extra_info"] | {"lookups": lookups}}
            )
    return answers


def exchange_plan(ids: list[int], chat: ChatFormat) -> list[int] | None:
    """Return a first turn up to its plan's end, with the plan's two items exchanged.

    None: the turn has no plan of two different items and DONE, each of them one token.
    """
    ids_of_item = {}
    for name in (*RELATIONS, DONE):
        tokens = chat.tokenizer.encode(item_text(name), add_special_tokens=False)
        if len(tokens) == 1:
            ids_of_item[tokens[0]] = name
    places = [place for place, token in enumerate(ids) if token in ids_of_item]
    plan_items = [ids_of_item[ids[place]] for place in places[:3]]
    if plan_items[2:] != [DONE] or len(set(plan_items)) < 3:
        return None
    first, second, done = places[:3]
    plan = ids[: done + 1]
    plan[first], plan[second] = plan[second], plan[first]
    return plan


class PlanExchanger(Policy):
    """Exchange the items of each episode's plan. All other tokens are the inner policy's."""

    def __init__(self, inner: Policy, chat: ChatFormat):
        self.inner = inner
        self.chat = chat
        self.begun: set[str | None] = set()

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        if session in self.begun:
            return await self.inner.generate(prompt_ids, sampling, session)
        self.begun.add(session)
        turn = await self.inner.generate(prompt_ids, sampling)
        plan = exchange_plan(turn.token_ids, self.chat)
        if plan is None:
            return turn
        rest = await self.inner.generate(prompt_ids + plan, sampling)
        # Nothing is trained, so the plan's log-probabilities are not needed.
        return Generation(
            plan + rest.token_ids, [0.0] * len(plan) + rest.logprobs, rest.finish_reason
        )

    def release(self, session: str) -> None:
        self.inner.release(session)


def first_quotes(trajectories: Iterable[Trajectory], chat: ChatFormat) -> Counter[str]:
    """Count what the agent quotes first: `plan` if the exchanged plan's first item.

    `question`: the relation that the question names first. `other`: anything else.
    """
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        thoughts = THOUGHT.findall(chat.decode(trajectory_rows(trajectory, 0)[0].input_ids))
        plan = ITEM.findall(thoughts[0])
        quotes = ITEM.findall(thoughts[1])[:-1] if len(thoughts) > 1 else []
        if plan[1:2] != [INNER] or not quotes:
            counts["other"] += 1
        elif quotes[-1] == plan[0]:
            counts["plan"] += 1
        else:
            counts["question" if quotes[-1] == INNER else "other"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", help="name of the run's folder (default: the newest)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the last)")
    arguments = parser.parse_args()
    model, config = find_model(run=arguments.run, step=arguments.step)
    workspace = Workspace(config)
    corpus = json_records(workspace.data / "corpus.jsonl")
    passages = {passage["title"]: passage["text"] for _, passage in corpus}
    rows = order_questions(workspace.load_rows("test"), passages)
    greedy = Sampling(temperature=0.0, max_tokens=config.rollout.max_tokens_per_turn)
    with open_agent(model, config, "local") as agent:
        for policy in (agent.policy, PlanExchanger(agent.policy, agent.chat)):
            loop = make_loop(policy, agent.chat, agent.tools, config.rollout, config.env)
            tasks = [Task(row, f"{number}", f"{number}") for number, row in enumerate(rows)]
            trajectories = asyncio.run(run_episodes(loop, tasks, greedy))
            if policy is agent.policy:
                right = sum(trajectory.reward >= 1 for trajectory in trajectories)
                print(f"right: {share(right, len(rows))}")
            else:
                counts = first_quotes(trajectories, agent.chat)
                for name in ("plan", "question", "other"):
                    print(f"with the plan exchanged, {name}: {share(counts[name], len(rows))}")


def share(count: int, of: int) -> str:
    """Write a share with Wilson's 95 % interval."""
    low, high = wilson_interval(count / of, of)
    return f"{count} of {of}, {count / of:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
