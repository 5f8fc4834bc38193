"""Enumerate an agent's plays, the most likely first.

In: an agent, and a question. Out: a `Tree` with whole plays, each with its exact probability, and
what remains. Next: `truth.py` adds them up.

A *history* is everything that the agent has read and sampled. Its probability is the product of
the probabilities of its sampled tokens, because prompts and tool results are functions of the
history. All histories
above a threshold are followed, many at a time. Then the threshold falls, and waiting histories go
on, until the whole plays hold the wanted share of the probability. What leaves
the tree is sampled (`sample_rest`): exactly as the agent would, given that it leaves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from agent_r1 import (
    AgentEnv,
    BaseTool,
    ChatFormat,
    Config,
    ConfigError,
    Decoder,
    Generation,
    LocalPolicy,
    Row,
    Trajectory,
    derive_seed,
    load_any,
    load_chat,
    make_loop,
)
from agent_r1_recipes.exact.replay import Player, Prompt, Replay, Script, Turn, finish_reason
from agent_r1_recipes.exact.tree_cache import TreeCache

FIRST_THRESHOLD = 0.03
FALL = 0.4
"""Factor from one threshold to the next.

Smaller steps overshoot the wanted share less, larger ones make larger batches.
"""
ROUNDING = 1e-6
"""In float32, the probabilities of all plays add up to 1 within this."""
CHECKED_PLAYS = 2
"""Plays of each question whose outcome is computed twice."""


@dataclass
class Agent:
    """A policy with its world: what `agent-r1 eval` would play with."""

    model: Decoder
    chat: ChatFormat
    tools: dict[str, BaseTool]
    config: Config
    make_env: Callable[[Row], AgentEnv] | None = None
    """Instead of the environment that the row names."""

    @classmethod
    def load(cls, folder: Path, config: Config, tools: dict[str, BaseTool]) -> Agent:
        """Read a model folder. Raise ConfigError for one that cannot be enumerated."""
        if config.rollout.has_agent:
            raise ConfigError(
                "rollout.agent is a program of its own, whose next prompt need not be a function "
                "of the history; evaluate it by samples: agent-r1 eval",
                code="random_environment",
            )
        model = load_any(folder)
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"{folder} is not a Llama, Qwen2 or Qwen3 model, and only those can be enumerated; "
                "evaluate it by samples: agent-r1 eval",
                code="other_model",
            )
        return cls(model, load_chat(folder), tools, config)

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature

    def player(self, samples: bool = False) -> Player:
        """Return a player of known turns; with `samples`, it goes on after them."""
        rollout = self.config.rollout
        replay = Replay()
        if samples:
            replay.sampler = LocalPolicy(
                self.model, self.chat.stop_ids, slots=64, max_context=rollout.max_context
            )
        flow = make_loop(replay, self.chat, self.tools, rollout, self.config.env)
        if self.make_env is not None:
            flow.make_env = self.make_env
        return Player(flow, self.temperature, rollout.max_tokens_per_turn)


@dataclass(frozen=True)
class Play:
    """A whole episode, and the logarithm of its probability, in nats."""

    trajectory: Trajectory
    logprob: float


@dataclass(frozen=True)
class State:
    """The agent is about to begin a turn."""

    turns: tuple[Turn, ...]
    prompt: Prompt


@dataclass(eq=False)
class History:
    """A point at which the agent chooses a token."""

    state: State
    parent: History | None
    """The history one token ago; None at the beginning of a turn."""
    token: int
    length: int
    """Tokens of the turn so far."""
    logprob: float
    number: int
    """In the cache."""
    next_V: Tensor
    """Log-probabilities of the next token."""
    children: list[int] = field(default_factory=list)

    def turn(self) -> tuple[list[int], list[float]]:
        """Return the turn so far, and the log-probability of each of its tokens."""
        tokens: list[int] = []
        logprobs: list[float] = []
        history = self
        while history.parent is not None:
            tokens.append(history.token)
            logprobs.append(float(history.parent.next_V[history.token]))
            history = history.parent
        return tokens[::-1], logprobs[::-1]


@dataclass(frozen=True)
class Edge:
    """The choice of one token in a history."""

    history: History
    token: int
    logprob: float
    """Of the history after it."""

    def turn(self) -> Generation:
        """Return the turn with this token, as if it ended here."""
        tokens, logprobs = self.history.turn()
        logprob = float(self.history.next_V[self.token])
        return Generation([*tokens, self.token], [*logprobs, logprob], "stop")


@dataclass(eq=False)
class Tree:
    """The plays of one question that are known so far."""

    row: Row
    name: str
    plays: list[Play] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    rest_plays: list[Play] = field(default_factory=list)
    """Sampled plays that leave the tree; `logprob` is that of the agent, not of the sample."""
    tokens: int = 0
    """Tokens that the model has read for it."""

    @property
    def share(self) -> float:
        """The probability of the plays in the tree."""
        return math.fsum(math.exp(play.logprob) for play in self.plays)

    @property
    def rest(self) -> float:
        """The probability of all plays that are not in the tree. Rounding is no rest."""
        rest = 1.0 - self.share
        return rest if rest > ROUNDING else 0.0

    def exits(self) -> list[float]:
        """Return the probability of leaving the tree at each history."""
        leaving = []
        for history in self.histories:
            outside_V = history.next_V.double().exp()
            outside_V[history.children] = 0.0
            leaving.append(math.exp(history.logprob) * float(outside_V.sum()))
        return leaving


class Expansion:
    """Grows the trees of some questions together, so that one pass reads tokens of all."""

    def __init__(self, agent: Agent, rows: list[Row], names: list[str], floor: float = 0.0):
        """`floor`: no history below this probability is followed."""
        self.agent = agent
        self.floor = floor
        self.player = agent.player()
        self.stop_ids = frozenset(agent.chat.stop_ids)
        self.cache = TreeCache(agent.model, agent.config.rollout.max_context)
        self.trees = [Tree(row, name) for row, name in zip(rows, names, strict=True)]
        jobs = [(tree.row, tree.name, Script(())) for tree in self.trees]
        roots = []
        for tree, prompt in zip(self.trees, self.player.play(jobs), strict=True):
            if not isinstance(prompt, Prompt):
                raise ConfigError(
                    f"question {tree.name} ends before the first turn ({prompt.stop_reason}); "
                    "raise rollout.max_context",
                    code="no_turn",
                )
            roots.append((tree, State((), prompt), None, 0.0))
        self._begin_turns(roots)

    def cover(self, mass: float, max_tokens: int) -> list[Tree]:
        """Lower the threshold until each tree holds `mass`, or has read `max_tokens`."""
        threshold = FIRST_THRESHOLD
        growing = self.trees
        while growing and threshold > self.floor:
            self.follow(growing, threshold)
            growing = [t for t in growing if t.share < mass and t.tokens < max_tokens]
            threshold *= FALL
        return self.trees

    def follow(self, trees: list[Tree], threshold: float) -> None:
        """Follow every history of these trees that is at least as likely as `threshold`."""
        bar = math.log(threshold)
        edges: list[tuple[Tree, Edge]] = []
        for tree in trees:
            edges += self._edges(tree, tree.histories, bar)
        while edges:
            endings: list[tuple[Tree, Edge, Generation]] = []
            going: list[tuple[Tree, Edge]] = []
            for tree, edge in edges:
                edge.history.children.append(edge.token)
                generation = self._whole_turn(edge)
                if generation is None:
                    going.append((tree, edge))
                else:
                    endings.append((tree, edge, generation))
            entries = self._end_turns(endings) + self._go_on(going)
            edges = []
            for tree, history in entries:
                edges += self._edges(tree, [history], bar)

    def _edges(self, tree: Tree, histories: list[History], bar: float) -> list[tuple[Tree, Edge]]:
        """Return the choices in `histories` that reach the bar and were not followed yet."""
        edges = []
        for history in histories:
            if history.logprob < bar:
                continue
            next_V = history.next_V
            tokens = (next_V >= bar - history.logprob).nonzero()[:, 0].tolist()
            for token in tokens:
                if token not in history.children:
                    logprob = history.logprob + float(next_V[token])
                    edges.append((tree, Edge(history, token, logprob)))
        return edges

    def _whole_turn(self, edge: Edge) -> Generation | None:
        """Return the turn that ends with this choice, or None."""
        sampling = edge.history.state.prompt.sampling
        at_limit = edge.history.length + 1 == sampling.max_tokens
        # Only these need the whole turn, which is looked up token by token.
        if not at_limit and edge.token not in self.stop_ids and sampling.is_turn_end is None:
            return None
        turn = edge.turn()
        reason = finish_reason(turn.token_ids, sampling, self.stop_ids)
        if reason is None:
            return None
        return Generation(turn.token_ids, turn.logprobs, reason)

    def _end_turns(
        self, endings: list[tuple[Tree, Edge, Generation]]
    ) -> list[tuple[Tree, History]]:
        """Ask the environments for what follows: the end of the play, or the next prompt."""
        jobs = []
        for tree, edge, generation in endings:
            state = edge.history.state
            turns = (*state.turns, Turn(state.prompt.ids, generation))
            jobs.append((tree.row, tree.name, Script(turns)))
        openings = []
        results = self.player.play(jobs)
        for (tree, edge, _), job, result in zip(endings, jobs, results, strict=True):
            if isinstance(result, Prompt):
                openings.append((tree, State(job[2].turns, result), edge, edge.logprob))
                continue
            if len(tree.plays) < CHECKED_PLAYS:
                self._check(job, result)
            tree.plays.append(Play(result, edge.logprob))
        return self._begin_turns(openings)

    def _check(self, job: tuple[Row, str, Script], first: Trajectory) -> None:
        """Play an episode again. Raise ConfigError if it has another outcome."""
        row, name, script = job
        [second] = self.player.play([(row, name, Script(script.turns))])
        if isinstance(second, Prompt):
            raise ConfigError(
                f"question {name}: equal turns ended an episode, and then they did not: the "
                "environment's outcome is not a function of the history, so its plays cannot be "
                "enumerated; give it a fixed seed, or evaluate it by samples",
                code="random_environment",
            )
        if (first.reward, first.score, first.stop_reason) != (
            second.reward,
            second.score,
            second.stop_reason,
        ):
            raise ConfigError(
                f"question {name}: equal turns were paid {first.reward:g} and then "
                f"{second.reward:g}: the environment's outcome is not a function of the history, "
                "so its plays cannot be enumerated; give it a fixed seed, or evaluate it by "
                "samples",
                code="random_environment",
            )

    def _begin_turns(
        self, openings: list[tuple[Tree, State, Edge | None, float]]
    ) -> list[tuple[Tree, History]]:
        """Read prompts. Each usually continues a history; after a rewrite it may not."""
        parents: list[int] = []
        prefixes: list[int] = []
        new: list[list[int]] = []
        for _, state, edge, _ in openings:
            ids = state.prompt.ids
            parent, common = 0, 0
            if edge is not None:
                before = edge.history
                path = before.state.prompt.ids + before.turn()[0]
                parent = before.number
                common = _common(path, ids)
            # At least one token is read, because the cache has no log-probabilities.
            common = min(common, len(ids) - 1)
            parents.append(parent)
            prefixes.append(common)
            new.append(ids[common:])
        return self._add(
            [(tree, state, None, -1, 0, logprob) for tree, state, _, logprob in openings],
            parents, prefixes, new,
        )  # fmt: skip

    def _go_on(self, going: list[tuple[Tree, Edge]]) -> list[tuple[Tree, History]]:
        """Read one more token of each history."""
        entries = []
        prefixes = []
        for tree, edge in going:
            before = edge.history
            prefixes.append(len(before.state.prompt.ids) + before.length)
            entries.append(
                (tree, before.state, before, edge.token, before.length + 1, edge.logprob)
            )
        parents = [edge.history.number for _, edge in going]
        return self._add(entries, parents, prefixes, [[edge.token] for _, edge in going])

    def _add(
        self,
        entries: Sequence[tuple[Tree, State, History | None, int, int, float]],
        parents: list[int],
        prefixes: list[int],
        new: list[list[int]],
    ) -> list[tuple[Tree, History]]:
        if not entries:
            return []
        numbers, next_BV = self.cache.extend(parents, prefixes, new, self.agent.temperature)
        histories = []
        for place, (tree, state, parent, token, length, logprob) in enumerate(entries):
            history = History(state, parent, token, length, logprob, numbers[place], next_BV[place])
            tree.histories.append(history)
            tree.tokens += len(new[place])
            histories.append((tree, history))
        return histories


def _common(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that agree."""
    if b[: len(a)] == a:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def sample_rest(agent: Agent, trees: list[Tree], samples: int, seed: int) -> None:
    """Sample plays of the agent, given that they leave the tree: `samples` of each tree.

    The exit is drawn with its exact probability, and its token from those that the tree does not
    follow there. From then on the agent samples as in training.
    """
    jobs = []
    seeds = []
    for tree in trees:
        if not tree.rest or not samples:
            continue
        lot = random.Random(derive_seed(seed, "rest", tree.name))
        exits = tree.exits()
        for number, history in enumerate(lot.choices(tree.histories, exits, k=samples)):
            outside_V = history.next_V.double().exp()
            outside_V[history.children] = 0.0
            token = lot.choices(range(len(outside_V)), outside_V.tolist())[0]
            opening = Edge(history, token, 0.0).turn()
            jobs.append((tree, Script(history.state.turns, opening)))
            seeds.append(derive_seed(seed, "rest", tree.name, number))
    player = agent.player(samples=True)
    results = player.play_whole([(tree.row, tree.name, script) for tree, script in jobs], seeds)
    for (tree, _), trajectory in zip(jobs, results, strict=True):
        logprob = math.fsum(sum(step.action_logprobs) for step in trajectory.steps)
        tree.rest_plays.append(Play(trajectory, logprob))


def enumerate_plays(
    agent: Agent,
    rows: list[Row],
    mass: float,
    *,
    samples: int = 0,
    seed: int = 0,
    max_tokens: int = 30_000,
    together: int = 16,
    on_done: Callable[[int], None] | None = None,
) -> list[Tree]:
    """Enumerate the plays of each question up to the share `mass`, and sample the rest."""
    trees: list[Tree] = []
    for first in range(0, len(rows), together):
        part = rows[first : first + together]
        names = [str(first + i) for i in range(len(part))]
        new = Expansion(agent, part, names).cover(mass, max_tokens)
        sample_rest(agent, new, samples, seed)
        trees += new
        if on_done is not None:
            on_done(len(trees))
    return trees
