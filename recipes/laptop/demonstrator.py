"""Play an imperfect demonstrator, so that RL has something to reinforce.

In: cold-start questions, the search tool. Out: a chat format, and training rows. Next:
`cold_start/stage.py` clones them into a model that knows the format and plays badly. Questions of
published data sets are played with other names (`entity_renaming.py`).

RL cannot start from scratch: a model that never searches and answers correctly never gets a reward.
A pretrained model has that knowledge; ours gets it in a minute from demonstrations.

The explorer of `discover` and `smoke` (`explore`) has one phase: plays of all kinds, with their
names exchanged. None of them shows a solution of several hops. The demonstrator of `small` reads
the solutions, and has two:

    (a) copying   clean one-hop episodes, because learning to copy a name from a passage takes
                  longest.
    (b) mixture   all kinds of questions, by a demonstrator that mostly plays badly (see
                  BEHAVIOURS). Cloning a mixture gives a policy that *samples* the mixture:
                  sometimes right, which RL can reinforce.

The demonstrator is a `Policy`: the same episode loop asks it for turns, the same tools answer it,
and the same rows and masks result. The loss is on its own tokens; tool results are only read.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from agent_r1_recipes.laptop.explorer import DONE, Explorer, SentenceExplorer, item_text
from agent_r1_recipes.laptop.reading import ENTITY_NAME
from agent_r1_recipes.laptop.shown import read_play, shows_solution
from agent_r1_recipes.laptop.tinyhop import HEADS, RELATIONS, TAILS, make_questions, make_world
from agent_r1_recipes.long_context.context import ASK, NOTES_PREFIX

BEHAVIOURS = {
    "good": "looks up every hop, then answers",
    "stop_early": "searches once and answers with what it has found, however many hops there are",
    "guess": "answers at once with a name from the question, or yes or no",
    "bad_query": "searches for what it wants to know without saying of what, and answers from what "
    "comes back",
    "wrong_entity": "follows a wrong name from a passage",
    "explore": "plans and quotes, and takes the items of its plan in random order; plays that show "
    "a solution are dropped (explorer.py)",
    "explore_sentences": "the same, and quotes each sentence from its name on",
}
"""What the demonstrator of phase (b) can do. One is drawn for each episode."""
EXPLORERS = {"explore": Explorer, "explore_sentences": SentenceExplorer}
"""Behaviour -> who plays it, without a solution.

Their thoughts do the work. A thought that names the next hop turns a choice into a copy:
` from Bumvel/publisher/headquarters` quotes the passage, then the question. A model of two layers
learns these copies in 450 steps with three passages in a result, and in 1,000 with two to six.
Without them it has to find relation, sentence and name at once, for which lab/laptop.yaml takes
2,200 (docs/laptop.md, "Thoughts that do the work")."""


@dataclass
class _Script:
    """Hold one episode of the demonstrator."""

    row: Row
    behaviour: str
    rng: random.Random
    turn: int = 0
    """Searches so far."""
    explorer: Explorer | None = None
    history_ids: list[int] = field(default_factory=list)
    """The ids of its conversation, up to the end of its last turn."""


class Demonstrator(Policy):
    """Read the solution from the row and play it, well or badly."""

    def __init__(self, chat: ChatFormat, dialect: Dialect = HermesToolEnv.dialect):
        self.chat = chat
        self.dialect = dialect
        self._scripts: dict[str, _Script] = {}

    def begin(self, session: str, row: Row, behaviour: str, seed: int) -> None:
        """Announce an episode: the calls of `generate` with this session follow its script."""
        script = _Script(row, behaviour, random.Random(seed))
        if behaviour in EXPLORERS:
            # It gets the question, and not the row, which has the solution.
            explorer = EXPLORERS[behaviour]
            script.explorer = explorer(row["prompt"][-1]["content"], script.rng)
        self._scripts[session] = script

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        script = self._scripts[session or ""]
        start = 0
        if prompt_ids[: len(script.history_ids)] == script.history_ids:
            # Decode only what is new. If the context was rewritten (env.context), all of it is.
            start = len(script.history_ids)
        text, request_for_notes, _ = self.chat.decode(prompt_ids[start:]).partition(ASK)
        # Names of the last result, or of the agent's own notes where these took its place.
        result = text.rpartition("<tool_response>")[2].rpartition(NOTES_PREFIX)[2]
        result_names = ENTITY_NAME.findall(result)
        if request_for_notes:
            turn = _notes(script, result_names)
        else:
            act, thought = self._turn(script, result_names, result)
            turn = self.dialect.write_turn(act, thought) or ""
            script.turn += 1
        ids = self.chat.turn_ids(turn, self.dialect)
        script.history_ids = prompt_ids + ids
        # Log-probabilities of 0 do no harm: cloning is supervised, and no ratio is computed.
        return Generation(ids, [0.0] * len(ids), "stop")

    def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    def _turn(
        self, script: _Script, result_names: list[str], result: str
    ) -> tuple[ToolCall | str, str]:
        """Return a search or an answer, with its thought."""
        if script.explorer:
            return script.explorer.turn(result)
        row = script.row
        rng = script.rng
        turn = script.turn
        behaviour = script.behaviour
        lookups = lookups_of(row)
        answer = row["reward_model"]["ground_truth"][0]
        question_names = ENTITY_NAME.findall(row["prompt"][-1]["content"])
        if behaviour == "guess":
            return _guess(row, question_names, rng), "guess"
        if turn == 0:
            if behaviour == "bad_query":
                return search(lookups[0], query=lookups[0]["relation"])
            return search(lookups[0])
        if behaviour in ("bad_query", "wrong_entity"):
            # Whatever it read, it takes some name from it and stops, or follows it for one more
            # hop.
            name = rng.choice(result_names) if result_names else question_names[0]
            if behaviour == "wrong_entity" and turn < len(lookups):
                return search(lookups[turn], query=name)
            if answer in ("yes", "no"):
                return rng.choice(["yes", "no"]), DONE
            return name, DONE
        if turn == len(lookups):
            return answer, DONE
        if behaviour == "stop_early":
            last, missing = lookups[turn - 1 : turn + 1]
            return _answer_too_early(row, last, missing, question_names, rng), DONE
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
        # "Faust (opera)" is the title, and the question says Faust.
        name = title_key(title).partition(" (")[0]
        starts = [question.find(name), question.find(name[:1].lower() + name[1:])]
        return min((start for start in starts if start >= 0), default=len(question))

    titles = sorted(row["extra_info"]["supporting"], key=place)
    # Each passage leads to the title of the next, and the last one to the answer.
    values = [*titles[1:], row["reward_model"]["ground_truth"][0]]
    lookups = []
    for title, value in zip(titles, values, strict=True):
        lookups.append({"entity": title, "relation": "next passage", "value": value})
    if lookups:
        lookups[0]["relation"] = "first passage"
    return lookups


def search(lookup: dict[str, Any], query: str | None = None) -> tuple[ToolCall, str]:
    """Search for the entity; the thought before names the relation."""
    call = ToolCall("search", {"query": query or lookup["entity"]})
    return call, _aim(lookup["relation"])


def _aim(relation: str) -> str:
    return f"find the {relation}"


def search_turn(lookup: dict[str, Any]) -> str:
    """Write the same as the tiny model does."""
    call, thought = search(lookup)
    return Hermes.call(call.name, thought, **call.arguments)


def _notes(script: _Script, result_names: list[str]) -> str:
    """Answer a request for notes with the findings, or in bad behaviours any name read."""
    if script.behaviour in ("bad_query", "wrong_entity", *EXPLORERS):
        return script.rng.choice(result_names or ["nothing"])
    lookups = lookups_of(script.row)[: script.turn]
    return "; ".join(f"{lookup['relation']} {lookup['value']}" for lookup in lookups)


def _guess(row: Row, names: list[str], rng: random.Random) -> str:
    if row["reward_model"]["ground_truth"][0] in ("yes", "no"):
        return rng.choice(["yes", "no"])
    return rng.choice(names)


def _answer_too_early(
    row: Row,
    last: dict[str, Any],
    missing: dict[str, Any],
    names: list[str],
    rng: random.Random,
) -> str:
    """Return the answer of a play that stops after the lookup `last`, before `missing`.

    For a chain it is the value found so far, otherwise a guess.
    """
    # A comparison names both of its entities in the question; a chain only the first.
    if missing["entity"] in row["prompt"][-1]["content"]:
        return _guess(row, names, rng)
    return last["value"]


# ----------------------------------------------------------------------------------- demonstrations


def demonstrate_rows(
    rows: list[Row], behaviours: dict[str, float], loop: AgentEnvLoop, seed: int, label: str
) -> list[TrainingRow]:
    """Run the demonstrator once over each of `rows`, through the real environment and its tools."""
    demonstrator: Demonstrator = loop.policy
    check_behaviours(behaviours, rows)
    names = list(behaviours)
    weights = list(behaviours.values())
    tasks = []
    for i, row in enumerate(rows):
        session = f"{label}-{i}"
        # A seed for each episode: episodes run side by side and end in any order.
        episode_seed = derive_seed(seed, label, i)
        [behaviour] = random.Random(episode_seed).choices(names, weights)
        demonstrator.begin(session, row, behaviour, episode_seed)
        tasks.append(Task(row, session, session))
    # All trajectories are kept, so Python's collector of cycles would look through them again and
    # again: 30 % of the time of 10,000 episodes. It is off here only, and not in `run_episodes`,
    # since worlds and tools of users may leave cycles that have to go.
    gc.disable()
    try:
        trajectories = asyncio.run(
            run_episodes(loop, tasks, Sampling(max_tokens=loop.limits.max_tokens_per_turn))
        )
    finally:
        gc.enable()
    unusual_stops = [
        t.stop_reason for t in trajectories if t.stop_reason is not StopReason.ANSWERED
    ]
    if 2 * len(unusual_stops) > len(trajectories):
        raise ConfigError(
            f"{len(unusual_stops)} of {len(trajectories)} demonstrations ended without an answer "
            f"({unusual_stops[0]}): passages too long for this tiny model; raise "
            "rollout.max_context, or set model.path to a pretrained model",
            code="unfinished_demonstration",
        )
    training_rows: list[TrainingRow] = []
    for i, trajectory in enumerate(trajectories):
        rows_of_play = trajectory_rows(trajectory, i)
        if explorer_in(behaviours) and _shows_solution(rows_of_play, rows[i], loop.chat):
            continue
        training_rows += rows_of_play
    return training_rows


def _shows_solution(rows_of_play: list[TrainingRow], row: Row, chat: ChatFormat) -> bool:
    if len(rows_of_play) > 1:
        raise ConfigError(
            "cold_start.behaviours: an explorer's play is read as one conversation; leave "
            "env.context at append",
            code="explorer_in_pieces",
        )
    return shows_solution(read_play(chat.decode(rows_of_play[0].input_ids)), row)


def check_behaviours(behaviours: dict[str, float], rows: list[Row]) -> None:
    """Raise ConfigError for an unknown behaviour, or the explorer where a question is no chain."""
    for name in behaviours:
        if name not in BEHAVIOURS:
            raise ConfigError.unknown("cold_start.behaviours", name, BEHAVIOURS)
    explorer = explorer_in(behaviours)
    if explorer and sum(map(bool, behaviours.values())) > 1:
        raise ConfigError(
            f"cold_start.behaviours: {explorer} shows no solution, and the others do; give "
            f"{explorer} alone, or leave it out",
            code="explorer_among_others",
        )
    if explorer and not all(_is_chain(row) for row in rows):
        raise ConfigError(
            f"cold_start.behaviours: {explorer} needs chains of relations; set data.mix to kinds "
            'such as {"1-hop": 1, "2-hop": 1}, or use --preset small, whose '
            "demonstrator does not plan",
            code="explorer_without_chain",
        )


def explorer_in(behaviours: dict[str, float]) -> str | None:
    """Return the explorer that plays, by name, or None."""
    return next((name for name in EXPLORERS if behaviours.get(name)), None)


def _is_chain(row: Row) -> bool:
    lookups = row["extra_info"].get("lookups", [])
    # Each value is what the next search is for, and the last one is the answer.
    topics = [lookup["entity"] for lookup in lookups[1:]]
    topics.append(row["reward_model"]["ground_truth"][0])
    return bool(lookups) and [lookup["value"] for lookup in lookups] == topics


def demonstrations(
    rows: list[Row], loop: AgentEnvLoop, behaviours: dict[str, float], seed: int
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Play TinyHop's cold-start questions for phases (a) and (b)."""
    one_hop = [row for row in rows if row["extra_info"]["kind"] == "1-hop"]
    mix_questions = mixture_questions(rows)
    if explorer_in(behaviours):
        # One phase: there is no habit to show, and nothing after it that could show a solution.
        plays = demonstrate_rows(mix_questions, behaviours, loop, seed, "copy")
        explored_rows = rename(plays * RENAMES, loop.chat, seed)
        return explored_rows, explored_rows
    copy_rows = demonstrate_rows(one_hop, {"good": 1.0}, loop, seed, "copy")
    # Two plays of each question, with behaviours drawn anew: otherwise the model learns which
    # question was played how.
    mix_rows = demonstrate_rows(mix_questions, behaviours, loop, seed, "mix-1")
    mix_rows += demonstrate_rows(mix_questions, behaviours, loop, seed, "mix-2")
    return copy_rows, mix_rows


def mixture_questions(rows: list[Row]) -> list[Row]:
    """Return the questions with only every fifth of the one-hop questions.

    This split has many of them, because a copying phase needs them.
    """
    one_hop = [row for row in rows if row["extra_info"].get("kind") == "1-hop"]
    return [row for row in rows if row["extra_info"].get("kind") != "1-hop"] + one_hop[::5]


def rename(rows: list[TrainingRow], chat: ChatFormat, seed: int) -> list[TrainingRow]:
    """Give each demonstration names of its own: exchange its syllables for others, token by token.

    A name is arbitrary, so an episode with other names is an equally good episode. A model that
    never meets a name twice cannot learn names by heart. Copying is all that is left to learn.
    docs/lab/laptop.md ("Thoughts that do the work") has what this changes.
    """
    renamed_rows = []
    for row, new_id in zip(rows, new_names(chat, seed), strict=False):
        input_ids = [new_id.get(token, token) for token in row.input_ids]
        renamed_rows.append(replace(row, input_ids=input_ids))
    return renamed_rows


def new_names(chat: ChatFormat, seed: int) -> Iterator[dict[int, int]]:
    """Yield for each row of `rename` its other syllables: token -> token, one to one."""
    rng = random.Random(f"{seed}/names")
    syllable_ids = []
    for syllables in ([head.capitalize() for head in HEADS], TAILS):
        ids = chat.tokenizer.convert_tokens_to_ids(list(syllables))
        # In a small vocabulary some syllables are several tokens. They stay as they are.
        syllable_ids.append([token for token in ids if token is not None])
    while True:
        new_id: dict[int, int] = {}
        for ids in syllable_ids:
            new_id |= zip(ids, rng.sample(ids, len(ids)), strict=True)
        yield new_id


def some_of_each(rows: list[Row], tokens: int) -> list[Row]:
    """Choose questions for demonstrations of at least `tokens` tokens.

    Few of TinyHop's one-hop questions are among them.
    """
    mix_questions = mixture_questions(rows)
    return random.Random(0).sample(mix_questions, min(len(mix_questions), tokens // SHORTEST + 1))


RENAMES = 2
"""Times that an explorer's play is shown, each time with other names. To play a question takes
longer than to exchange its names."""
SHORTEST = 128
"""Tokens of a demonstration, at least: the tools' schemas and two turns."""


def tokenizer_texts(mix: dict[str, float], seed: int, with_plans: bool = False) -> Iterator[str]:
    """Yield pieces of conversations in a throw-away world, to train the tokenizer on.

    Names are shown one syllable at a time. BPE merges frequent neighbours. With whole names it
    would learn pieces across two syllables, and spell new names differently from known names.

    With plans, as the explorer writes them, questions are shown one relation at a time, and plans
    one item at a time. Otherwise ` is the mayor of the capital of ` would be one token, and its two
    relations would have to be learned once more.
    """
    rng = random.Random(f"{seed}/tokenizer")
    world = make_world(rng, 600, set())
    questions = [question.text for question in make_questions(world, rng, 1000, mix)]
    texts = [f"user\n{text}" for text in questions]
    if with_plans:
        texts = ["user\n"] * len(questions)
        texts += [piece for text in questions for piece in re.split(_relation_words(), text)]
    texts += [f"\n{passage.text}\n" for passage in world.passages()]
    texts += [search_turn({"relation": relation, "entity": "Name"}) for relation in RELATIONS] * 50
    if with_plans:
        texts += [item_text(relation) for relation in (*RELATIONS, DONE)] * 100
        # Of a demonstrator that is gone. Without them the tokenizer is another one, and so are all
        # bits of the presets whose figures are published.
        texts += [f": {_aim(relation)}" for relation in RELATIONS] * 100
        texts += ["plan", f": {DONE}"] * 300
    texts += ["assistant\n", "system\ntools: search(query)", "answer", "guess", "yes", "no"] * 500
    names = "|".join(passage.title for passage in world.passages())
    for text in texts:
        yield from re.split(f"{names}|Name|<[a-z_/]+>", text)
    for _ in range(1000):
        yield from TAILS
        yield from (head.capitalize() for head in HEADS)


def _relation_words() -> re.Pattern[str]:
    """Match the words of one relation in a question: `the spouse of `, ` born?`."""
    words = set()
    for relation in RELATIONS.values():
        for template in (*relation.phrases, *relation.asks):
            words |= {part for part in template.split("{x}") if len(part) > 1}
    # The longest first: an alternative that is found ends the search.
    longest_first = sorted(words, key=lambda part: (-len(part), part))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def teach(
    paths: Workspace, model_chat: ChatFormat | None = None
) -> tuple[ChatFormat, list[TrainingRow], list[TrainingRow]]:
    """Return a chat format, and the training rows of the cold start's two phases.

    A pretrained model's format is `model_chat`, and it needs no copying phase.
    """
    config = paths.config
    rows = paths.load_rows("cold")
    tools = paths.load_tools()
    if model_chat:
        return model_chat, [], warm_rows(paths, rows, model_chat, tools)
    behaviours = config.cold_start.behaviours
    texts = tokenizer_texts(config.data.mix, config.seed, bool(explorer_in(behaviours)))
    chat = ChatFormat(train_tokenizer(texts, config.model.vocab_size))
    loop = make_loop(Demonstrator(chat, paths.dialect), chat, tools, config.rollout, config.env)
    copy_rows, mix_rows = demonstrations(rows, loop, behaviours, config.seed)
    return chat, copy_rows, mix_rows


def warm_rows(
    paths: Workspace, rows: list[Row], chat: ChatFormat, tools: dict[str, BaseTool]
) -> list[TrainingRow]:
    """Make a pretrained model's rows: one play of the questions that fit its steps."""
    config = paths.config
    cold_start = config.cold_start
    loop = make_loop(Demonstrator(chat, paths.dialect), chat, tools, config.rollout, config.env)
    questions = some_of_each(rows, cold_start.warm_steps * cold_start.mix_tokens)
    return demonstrate_rows(questions, cold_start.behaviours, loop, config.seed, "warm")
