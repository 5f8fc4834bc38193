"""Chat with an agent, and see its thoughts, calls, results and answer: `agent-r1 chat`.

In: an `Agent` (agent.py) and questions that a person types, pipes or passes. Out: a conversation on
the screen, or lines of JSON.

    terminal           a prompt and commands (/help)
    standard input     each line as if it were typed
    --question "..."   one question; the exit code tells whether there was an answer

`conversation.py` asks and `screen.py` shows. Every failure while the agent acts becomes one
sentence and the next prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from agent_r1.config import Config, tables
from agent_r1.core import Row, Step
from agent_r1.data.names import NAME, names_in
from agent_r1.data.source import SPLITS
from agent_r1.data.storage import read_corpus
from agent_r1.evaluation.records import evaluation_records, question_of
from agent_r1.evaluation.reliability import reliability_line
from agent_r1.ground.clean_console import CleanConsole
from agent_r1.ground.errors import AgentR1Error, ConfigError, nearest
from agent_r1.ground.ui import say
from agent_r1.inference.agent import describe, find_card, open_agent, user_tools
from agent_r1.inference.conversation import (
    Conversation,
    Exchange,
    exchange_record,
    no_answer,
    same_context,
)
from agent_r1.inference.screen import Screen, footer
from agent_r1.rollout.agent import Agent
from agent_r1.watch.tokens import token_table
from agent_r1.workspace import Workspace

SUGGESTIONS = 5
OUTSIDE = (
    "this agent knows one small world, and your question names nothing in it: do not trust the "
    "answer (a chat lists questions that it can answer)"
)
UNKNOWN_WORDS = (
    "this agent has only seen the words of its training questions, and not: {words}; do not trust "
    "the answer"
)
WORD = re.compile(r"\b[^\W\d_A-Z]{2,}")
"""A word in small letters. `names_in` finds the names; numbers are new in most tasks."""


# ------------------------------------------------------------------------------------- the commands


class Repl:
    """Handle the lines of a chat, one by one, from any source."""

    def __init__(
        self,
        agent: Agent,
        screen: Screen,
        resources: ExitStack,
        seed: int = 0,
        as_json: bool = False,
        is_interactive: bool = True,
    ):
        self.agent = agent
        self.screen = screen
        self.as_json = as_json
        self.is_interactive = is_interactive
        """Whether a person types.

        In a script Ctrl-C ends the script, and empty lines are ignored.
        """
        self.test_rows = load_test_questions(agent.config)
        self.world = only_world(agent)
        learned = Workspace(agent.config).learned_question(agent.model)
        self.suggestions = suggest(self.test_rows, learned)
        self.conversation = Conversation(agent, self.test_rows, seed, None if as_json else screen)
        self.failure: str | None = None
        """The last failure, if any; a script exits with it."""
        # One event loop for all questions. Its `run` turns Ctrl-C into a cancelled episode, and
        # only that.
        self._runner = resources.enter_context(asyncio.Runner())
        self.commands: dict[str, tuple[str, Callable[[], None]]] = {
            "/help": ("list commands, and questions to ask", self.help),
            "/tools": ("list the agent's tools", self.tools),
            "/trace": ("show the last exchange token by token: mask, log-prob, reward", self.trace),
            "/why": ("explain the reward of the last answer, and how reliable it is", self.why),
            "/clear": ("forget the conversation", self.clear),
            "/quit": ("leave (or Ctrl-D)", lambda: None),
        }

    @functools.cached_property
    def known_words(self) -> set[str]:
        """All words of the run's questions, read when the first question is asked."""
        return known_words(self.agent)

    def handle(self, line: str) -> bool:
        """Handle a command, a suggestion's number or a question. Return False to quit."""
        line = line.strip()
        name = line.partition(" ")[0]
        if name.startswith("/"):
            self.attempt(line, lambda: self.command(name))
        elif self.suggestions and line.isdecimal() and len(line) < 3:
            self.attempt(line, lambda: self.ask_suggested(int(line)))
        elif line:
            self.attempt(line, lambda: self.ask(line))
        elif self.is_interactive:
            self.screen.note("type a question, or /help")
        return name != "/quit"

    def attempt(self, line: str, action: Callable[[], None]) -> None:
        """Run `action` and turn any failure into one sentence."""
        try:
            return action()
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            self.failure = "interrupted; the conversation is as it was before"
        except AgentR1Error as error:
            self.failure = str(error)
        # A bug of ours, of a library or of a tool must not end the conversation.
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self.as_json:
            print(
                json.dumps({"question": line[:1000], "answer": None, "error": self.failure}),
                flush=True,
            )
        else:
            self.screen.note(self.failure)

    def command(self, name: str) -> None:
        if name not in self.commands:
            # Without the slash, which makes all of them similar.
            hint = nearest(name[1:40], [command[1:] for command in self.commands])
            raise AgentR1Error(
                f"unknown command {name[:40]}{hint}; /help lists them", code="unknown_command"
            )
        self.commands[name][1]()

    def ask_suggested(self, number: int) -> None:
        if not 1 <= number <= len(self.suggestions):
            raise AgentR1Error(
                f"there is no question {number}; choose 1 to {len(self.suggestions)}",
                code="index_out_of_range",
            )
        self.screen.say(self.suggestions[number - 1], "bold")
        self.ask(self.suggestions[number - 1])

    def ask(self, question: str) -> None:
        """Put a question to the agent and show everything that happens."""
        # A follow-up may refer to an earlier question.
        follows = self.conversation.memory and self.conversation.exchanges
        if self.world and not follows and not any(name in question for name in self.world):
            self.screen.note(OUTSIDE)
        elif self.known_words:
            words = WORD.findall(question) + sorted(names_in(question) - set(self.world))
            unknown_words = [word for word in words if word not in self.known_words]
            if unknown_words:
                self.screen.note(UNKNOWN_WORDS.format(words=", ".join(unknown_words[:5])))
        exchange = self._runner.run(self.conversation.ask(question))
        reason = no_answer(exchange, self.agent)
        self.failure = reason or self.failure
        if self.as_json:
            print(json.dumps(exchange_record(exchange, self.agent)), flush=True)
            return
        if reason is not None:
            self.screen.note(
                f"{reason}; ask again for a new sample, or forget the conversation with /clear"
            )
        self.screen.say(footer(exchange), "dim")

    def last(self) -> Exchange:
        if not self.conversation.exchanges:
            raise AgentR1Error(
                "no question was asked yet, or it was forgotten; ask one, or type 1",
                code="nothing_asked",
            )
        return self.conversation.exchanges[-1]

    def help(self) -> None:
        for name, (text, _) in self.commands.items():
            self.screen.say(f"  {name:<10} {text}")
        self.suggest()

    def suggest(self) -> None:
        if self.suggestions:
            self.screen.say("questions from the run's test set; type a number to ask one:")
            for number, question in enumerate(self.suggestions, 1):
                self.screen.say(f"  {number}  {question}")

    def tools(self) -> None:
        for tool in self.agent.tools.values():
            self.screen.say(
                f"  {tool.name}({', '.join(tool.parameters.get('properties', {}))})  "
                f"{tool.description}"
            )
        if not self.agent.tools:
            self.screen.say("  none; add one with --tools FILE.py:NAME")

    def trace(self) -> None:
        """Show the training row of the last exchange: tokens, mask, log-probs."""
        last = self.last()
        steps: list[Step] = []
        for exchange in same_context(self.conversation.exchanges):
            steps += exchange.trajectory.steps
        (record,) = evaluation_records([replace(last.trajectory, steps=steps)], self.agent.chat)
        for number, row in enumerate(record["rows"]):
            self.screen.console.print(token_table(row, start=last.start if number == 0 else 0))

    def why(self) -> None:
        """Show the episode's reward, if the right answer is known."""
        t = self.last().trajectory
        say = self.screen.say
        say(f"the episode ended with: {t.stop_reason.value}")
        if not self.last().known:
            say(
                "no reward: the right answer is not known; /help lists questions with known answers"
            )
            self.how_reliable()
            return
        right = t.row["reward_model"]["ground_truth"]
        if len(right):
            say(f"expected: {' | '.join(right)}")
        others = {
            "calls": t.process,
            "outcome": t.reward - t.process - sum(t.reward_parts.values()),
        }  # without its own names
        parts = t.reward_parts | {
            name: value for name, value in others.items() if abs(value) > 1e-9
        }
        say(
            f"reward {t.reward:+.2f}:  "
            + "  ".join(f"{name} {value:+.2f}" for name, value in parts.items())
        )
        say(
            "measured, not rewarded: " + ", ".join(f"{k} {v:g}" for k, v in t.metrics.items()),
            "dim",
        )
        self.how_reliable()

    def how_reliable(self) -> None:
        """Show what the evaluation measured with several samples, of this question if it can."""
        card = find_card(self.agent.model) or {}
        part = card.get("reliability")
        if not part:
            return
        self.screen.say(f"in the evaluation, {reliability_line(part)}", "dim")
        questions = [question_of(row) for row in self.test_rows]
        question = self.last().question
        same_data = card.get("data") == Workspace(self.agent.config).data.name
        if same_data and question in questions[: part["questions"]]:
            right = part["right"][questions.index(question)]
            self.screen.say(f"of this question, {right} of {part['samples']} were right", "dim")

    def clear(self) -> None:
        self.conversation.exchanges = []
        self.screen.note("conversation forgotten")


# ------------------------------------------------------------------------------ suggested questions


def load_test_questions(config: Config) -> list[Row]:
    """Load the run's test questions; none if its data is not on this machine."""
    try:
        return Workspace(config).load_rows("test")
    except AgentR1Error:
        return []


def only_world(agent: Agent) -> set[str]:
    """Return all titles of the passages, for a model that knows nothing else; else empty."""
    corpus = Workspace(agent.config).data / "corpus.jsonl"
    if (
        not tables.any_entry_has("tool", agent.tools, "index")
        or not agent.starts_from_nothing
        or not corpus.exists()
    ):
        return set()
    return {
        passage.title.partition(" (")[0] for passage in read_corpus(corpus)
    }  # questions name Faust (opera) as Faust


def known_words(agent: Agent) -> set[str]:
    """Return all words in small letters, and all names, of the run's questions.

    A model that starts from nothing knows no others. For another model, return none.
    """
    words: set[str] = set()
    if agent.starts_from_nothing:
        for split in SPLITS:
            with contextlib.suppress(AgentR1Error):
                for row in Workspace(agent.config).load_rows(split):
                    words.update(WORD.findall(question_of(row)))
                    words.update(NAME.findall(question_of(row)))
    return words


def suggest(rows: list[Row], first: int | None = None) -> list[str]:
    """Choose a few questions of every kind.

    `first`: the number of the question at the beginning, which RL has taught the agent.
    """
    by_kind: dict[str, list[str]] = {}
    for row in rows:
        by_kind.setdefault(row["extra_info"].get("kind", ""), []).append(question_of(row))
    suggestions: list[str] = []
    if first is not None and first < len(rows):
        suggestions.append(question_of(rows[first]))
    for n in range(SUGGESTIONS):  # one of each kind in turn
        suggestions += [questions[n] for questions in by_kind.values() if n < len(questions)]
    return list(dict.fromkeys(suggestions))[:SUGGESTIONS]


# -------------------------------------------------------------------------------------- the command


@contextmanager
def _opening(is_terminal: bool) -> Iterator[None]:
    """Redirect messages while a model opens.

    They are not part of an answer, so standard output stays free of them for programs.
    """
    with contextlib.redirect_stdout(sys.stdout if is_terminal else sys.stderr):
        say("opening the model ...")
        yield


def run_chat(
    model: Path,
    config: Config,
    backend: str = "local",
    question: str | None = None,
    as_json: bool = False,
    tools: list[str] | None = None,
    temperature: float | None = None,
    seed: int = 0,
    prompt: str | None = None,
) -> None:
    """Chat with a model folder. Raises AgentR1Error if it cannot be opened.

    Without a person, the last failure is raised too.
    """
    if question is not None and not question.strip():
        raise ConfigError(
            "the question is empty; write for example "
            '--question "In which city is the publisher of Sosnum based?"',
            code="empty_question",
        )
    if temperature is not None:  # in a copy: the configuration belongs to the caller
        rollout = config.rollout.model_copy(update={"temperature": temperature})
        config = config.model_copy(update={"rollout": rollout})
    extra = user_tools(tools or [])
    for stream in (sys.stdin, sys.stdout):
        # Broken UTF-8 in a pasted text or a narrow locale must not end the chat. The streams of a
        # notebook are no TextIOWrapper.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and question is None and not as_json
    plain = (
        not sys.stdout.isatty()
        or bool(os.environ.get("NO_COLOR"))
        or os.environ.get("TERM") == "dumb"
    )
    console = _PipeConsole(highlight=False, color_system=None if plain else "auto", stderr=as_json)
    with ExitStack() as resources:
        with _opening(is_terminal):
            agent = resources.enter_context(open_agent(model, config, backend, prompt=prompt))
        agent.tools = agent.tools | extra
        screen = Screen(console, agent.config.env)
        repl = Repl(agent, screen, resources, seed, as_json, is_terminal)
        tools_in_training = (agent.own_config or config).env.tools
        if (extra or set(config.env.tools) != set(tools_in_training)) and agent.starts_from_nothing:
            screen.note("this model was trained with its own tools only, and may misuse others")
        if is_terminal:
            description = describe(agent, backend)
            if not repl.conversation.memory:
                description += "; each question starts a new conversation"
            screen.say(description, "dim")
            repl.suggest()
            screen.say("type a question, or /help", "dim")
            return _type(repl, plain)
        say(describe(agent, backend), sys.stderr)
        if question is not None:
            repl.attempt(question, lambda: repl.ask(question.strip()))
        else:
            for line in sys.stdin:
                # The console is quiet once its reader is gone, as in `agent-r1 chat | head`.
                if console.quiet or not repl.handle(line):
                    break
    if repl.failure:
        raise AgentR1Error(repl.failure, code="chat_failed")


class _PipeConsole(CleanConsole):
    """A console whose reader may leave, as in `agent-r1 chat | head`.

    rich raises SystemExit then. Inside the sampler's task, it ends the event loop with a traceback.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python flushes standard output at its end, and would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _type(repl: Repl, plain: bool) -> None:
    """Read the lines of a person at a terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  enables arrow keys and history for `input`
    # Readline must know which characters of the prompt have no width.
    prompt = "> " if plain else "\001\033[1;36m\002> \001\033[0m\002"
    while True:
        try:
            if not repl.handle(input(prompt)):
                return
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print("\n(leave with Ctrl-D or /quit)")
