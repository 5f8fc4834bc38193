"""Clone an imperfect demonstrator (cold start), so that RL has something to reinforce.

In: training sequences, the search index. Out: a model folder that knows the format, can copy names,
and plays the task badly. Next: `loop.py`. Questions of published data sets are played with other
names (`entity_renaming.py`).

RL cannot start from scratch: a model that never searches and answers correctly never gets a reward.
A pretrained model has that knowledge; ours gets it in a minute from demonstrations, in two phases:

    (a) copying   clean one-hop episodes, because learning to copy a name from a passage takes longest.
    (b) mixture   all kinds of questions, by a demonstrator that mostly plays badly (see BEHAVIOURS). Cloning a mixture
                  gives a policy that *samples* the mixture: sometimes right, which RL can
                  reinforce.

The demonstrator is a `Policy`: the same episode loop asks it for turns, the same tools answer it,
and the same rows and masks result. The loss is on its own tokens; tool results are only read.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agent_r1 import (
    AgentEnvLoop,
    BaseTool,
    ChatFormat,
    ConfigError,
    Dialect,
    Generation,
    Hermes,
    HermesToolEnv,
    Policy,
    Row,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    TrainingRow,
    Workspace,
    derive_seed,
    make_loop,
    run_episodes,
    title_key,
    train_tokenizer,
    trajectory_rows,
)
from agent_r1_recipes.laptop.tinyhop import HEADS, RELATIONS, TAILS, make_questions, make_world
from agent_r1_recipes.long_context.context import ASK, NOTES_PREFIX

ENTITY_NAME = re.compile(r"[A-Z]\w*(?:[ '-][A-Z]\w*)*")
"""What a name looks like: words with capitals, side by side."""
BEHAVIOURS = {
    "good": "looks up every hop, then answers",
    "stop_early": "searches once and answers with what it has found, however many hops there are",
    "guess": "answers at once with a name from the question, or yes or no",
    "bad_query": "searches for what it wants to know without saying of what, and answers from what "
    "comes back",
    "wrong_entity": "follows a wrong name from a passage",
}
"""What the demonstrator of phase (b) can do. One is drawn for each episode."""


@dataclass
class _Script:
    """Hold one episode of the demonstrator."""

    row: Row
    behaviour: str
    rng: random.Random
    turn: int = 0
    """Searches so far."""
    before: list[int] = field(default_factory=list)
    """The ids of its conversation, up to the end of its last turn."""


class Demonstrator(Policy):
    """Read the solution from the row and play it, well or badly."""

    def __init__(self, chat: ChatFormat, spoken: Dialect = HermesToolEnv.dialect):
        self.chat, self.spoken = chat, spoken
        self._scripts: dict[str, _Script] = {}

    def begin(self, session: str, row: Row, behaviour: str, seed: int) -> None:
        """Announce an episode; the loop's calls of `generate` with this session then follow the
        script."""
        self._scripts[session] = _Script(row, behaviour, random.Random(seed))

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        script, start = self._scripts[session], 0
        if prompt_ids[: len(script.before)] == script.before:  # else the context was rewritten
            start = len(script.before)
        shown, asked, _ = self.chat.decode(prompt_ids[start:]).partition(ASK)
        read = ENTITY_NAME.findall(
            shown.rpartition("<tool_response>")[2].rpartition(NOTES_PREFIX)[2]
        )
        if asked:
            text = _notes(script, read)
        else:
            text = self.spoken.write_turn(*self._turn(script, read)) or ""
            script.turn += 1
        ids = self.chat.turn_ids(text, self.spoken.end_token(text))
        script.before = prompt_ids + ids
        return Generation(ids, [0.0] * len(ids), "stop")

    def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    def _turn(self, script: _Script, read: list[str]) -> tuple[ToolCall | str, str]:
        """Return a search or an answer, with its thought; `read` are the last result's names."""
        row, rng, turn = script.row, script.rng, script.turn
        lookups, answer = lookups_of(row), row["reward_model"]["ground_truth"][0]
        names = ENTITY_NAME.findall(row["prompt"][-1]["content"])
        behaviour = script.behaviour
        if behaviour == "guess":
            return _guess(row, names, rng), "guess"
        if behaviour == "bad_query" and turn == 0:
            return search(lookups[0], query=lookups[0]["relation"])
        if turn == 0:
            return search(lookups[0])
        if behaviour in ("bad_query", "wrong_entity"):
            # Whatever it read, it takes some name from it and stops, or follows it for one more
            # hop.
            name = rng.choice(read) if read else names[0]
            if behaviour == "wrong_entity" and turn < len(lookups):
                return search(lookups[turn], query=name)
            return name if answer not in ("yes", "no") else rng.choice(["yes", "no"]), "answer"
        if turn == len(lookups):
            return answer, "answer"
        if behaviour == "stop_early":
            return _premature(row, lookups[turn - 1 : turn + 1], names, rng), "answer"
        return search(lookups[turn])


def lookups_of(row: Row) -> list[dict[str, Any]]:
    """List an ideal agent's searches in order: the entity, what is asked, and the value.

    TinyHop's rows have them. Rows of published data sets name the passages with the answer: first
    those that the question names, then those that an earlier passage names.
    """
    if "lookups" in row["extra_info"]:
        return row["extra_info"]["lookups"]
    question = title_key(row["prompt"][-1]["content"])

    def place(title: str) -> int:
        name = title_key(title).partition(" (")[
            0
        ]  # "Faust (opera)" is the title, and the question says Faust
        found = [question.find(one) for one in (name, name[:1].lower() + name[1:])]
        return min((start for start in found if start >= 0), default=len(question))

    titles = sorted(row["extra_info"]["supporting"], key=place)
    values = [*titles[1:], row["reward_model"]["ground_truth"][0]]
    aims = ["first passage"] + ["next passage"] * (len(titles) - 1)
    return [
        {"entity": t, "relation": aim, "value": v}
        for t, aim, v in zip(titles, aims, values, strict=True)
    ]


def search(lookup: dict[str, Any], query: str | None = None) -> tuple[ToolCall, str]:
    """Search for the entity; the thought before names the relation."""
    return ToolCall(
        "search", {"query": query or lookup["entity"]}
    ), f"find the {lookup['relation']}"


def search_turn(lookup: dict[str, Any]) -> str:
    """Write the same as the tiny model does."""
    said, thought = search(lookup)
    return Hermes.call(said.name, thought, **said.arguments)


def _notes(script: _Script, read: list[str]) -> str:
    """Answer a request for notes with the findings, or in bad behaviours any name read."""
    if script.behaviour in ("bad_query", "wrong_entity"):
        return script.rng.choice(read or ["nothing"])
    return "; ".join(
        f"{lookup['relation']} {lookup['value']}"
        for lookup in lookups_of(script.row)[: script.turn]
    )


def _guess(row: Row, names: list[str], rng: random.Random) -> str:
    yes_no = row["reward_model"]["ground_truth"][0] in ("yes", "no")
    return rng.choice(["yes", "no"]) if yes_no else rng.choice(names)


def _premature(
    row: Row, lookups: list[dict[str, Any]], names: list[str], rng: random.Random
) -> str:
    """Return the answer of a play that stops between two lookups.

    For a chain it is the value found so far, otherwise a guess.
    """
    done, missed = lookups
    return (
        _guess(row, names, rng)
        if missed["entity"] in row["prompt"][-1]["content"]
        else done["value"]
    )


# ----------------------------------------------------------------------------------- demonstrations


def demonstrate_rows(
    rows: list[Row], behaviours: dict[str, float], loop: AgentEnvLoop, seed: int, label: str
) -> list[TrainingRow]:
    """Run the demonstrator once over each of `rows`, through the real environment and its tools."""
    demonstrator: Demonstrator = loop.policy
    for name in behaviours:
        if name not in BEHAVIOURS:
            raise ConfigError.unknown("cold_start.behaviours", name, BEHAVIOURS)
    names, weights = list(behaviours), list(behaviours.values())
    tasks = []
    for i, row in enumerate(rows):
        session = f"{label}-{i}"
        episode_seed = derive_seed(seed, label, i)
        demonstrator.begin(
            session, row, random.Random(episode_seed).choices(names, weights)[0], episode_seed
        )
        tasks.append(Task(row, session, session))
    trajectories = asyncio.run(
        run_episodes(loop, tasks, Sampling(max_tokens=loop.limits.max_tokens_per_turn))
    )
    unfinished = [t.stop_reason for t in trajectories if t.stop_reason is not StopReason.ANSWERED]
    if 2 * len(unfinished) > len(trajectories):
        raise ConfigError(
            f"{len(unfinished)} of {len(trajectories)} demonstrations ended without an answer "
            f"({unfinished[0]}): passages too "
            "long for this tiny model; raise rollout.max_context, or set model.path to a "
            "pretrained model",
            code="unfinished_demonstration",
        )
    return [row for i, t in enumerate(trajectories) for row in trajectory_rows(t, i)]


def demonstrations(
    rows: list[Row], loop: AgentEnvLoop, behaviours: dict[str, float], seed: int
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Play TinyHop's cold-start questions for phases (a) and (b)."""
    one_hop = [row for row in rows if row["extra_info"]["kind"] == "1-hop"]
    copy_rows = demonstrate_rows(one_hop, {"good": 1.0}, loop, seed, "copy")
    # One-hop questions are over-represented in this split (phase a needs them): take every fifth
    # for the mixture.
    mixed = [row for row in rows if row["extra_info"]["kind"] != "1-hop"] + one_hop[::5]
    # Two plays of each question, with behaviours drawn anew: otherwise the model learns which
    # question was played how.
    return copy_rows, [
        row
        for play in "12"
        for row in demonstrate_rows(mixed, behaviours, loop, seed, f"mix-{play}")
    ]


def some_of_each(rows: list[Row], tokens: int) -> list[Row]:
    """Choose questions for demonstrations of `tokens` tokens or more, few of TinyHop's one-hop
    ones."""
    easy = [row for row in rows if row["extra_info"].get("kind") == "1-hop"]
    mixed = [row for row in rows if row["extra_info"].get("kind") != "1-hop"] + easy[::5]
    return random.Random(0).sample(mixed, min(len(mixed), tokens // SHORTEST + 1))


SHORTEST = 128
"""Tokens of a demonstration, at least: the tools' schemas and two turns."""


def tokenizer_texts(mix: dict[str, float], seed: int) -> Iterator[str]:
    """Yield pieces of conversations in a throw-away world, to train the tokenizer on.

    Names are shown one syllable at a time. BPE merges frequent neighbours. With whole names it
    would learn pieces across two syllables, and spell new names differently from known names.
    """
    rng = random.Random(f"{seed}/tokenizer")
    world = make_world(rng, 600, set())
    texts = [f"user\n{question.text}" for question in make_questions(world, rng, 1000, mix)]
    texts += [f"\n{passage.text}\n" for passage in world.passages()]
    texts += [search_turn({"relation": relation, "entity": "Name"}) for relation in RELATIONS] * 50
    texts += ["assistant\n", "system\ntools: search(query)", "answer", "guess", "yes", "no"] * 500
    names = "|".join(passage.title for passage in world.passages())
    for text in texts:
        yield from re.split(f"{names}|Name|<[a-z_/]+>", text)
    for _ in range(1000):
        yield from TAILS
        yield from (head.capitalize() for head in HEADS)


def teach(
    paths: Workspace, known: ChatFormat | None = None
) -> tuple[ChatFormat, list[TrainingRow], list[TrainingRow]]:
    """Return a chat format, and the training rows of the cold start's two phases.

    A pretrained model's format is `known`, and it needs no copying phase.
    """
    config, c = paths.config, paths.config.cold_start
    rows, tools = paths.load_rows("cold"), paths.load_tools()
    if known:
        return known, [], warm_rows(paths, rows, known, tools)
    chat = ChatFormat(
        train_tokenizer(tokenizer_texts(config.data.mix, config.seed), config.model.vocab_size)
    )
    loop = make_loop(Demonstrator(chat, paths.dialect), chat, tools, config.rollout, config.env)
    return chat, *demonstrations(rows, loop, c.behaviours, config.seed)


def warm_rows(
    paths: Workspace, rows: list[Row], chat: ChatFormat, tools: dict[str, BaseTool]
) -> list[TrainingRow]:
    """Make a pretrained model's rows: one play of the questions that fit its steps."""
    config, c = paths.config, paths.config.cold_start
    loop = make_loop(Demonstrator(chat, paths.dialect), chat, tools, config.rollout, config.env)
    return demonstrate_rows(
        some_of_each(rows, c.warm_steps * c.mix_tokens), c.behaviours, loop, config.seed, "warm"
    )
