"""`agent-r1 chat`: put a question to the agent, and see it think, call, read and answer.

In: an `Agent` and what a person types, pipes or passes. Out: a conversation on the screen, or lines of JSON. This is
the end of the path that began with `agent-r1 data`.

    terminal           a prompt with history, completion and commands (/help)
    standard input     each line as if it were typed
    --question "..."   one question, then the exit code says whether there was an answer

The one rule of this file: whatever goes wrong while the agent acts ends in a sentence and the next prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from agent_r1.config import Config
from agent_r1.data.rows import read_corpus
from agent_r1.errors import AgentR1Error, ConfigError, nearest
from agent_r1.inference.agent import Agent, describe, made_from_nothing, open_agent, own_settings, short_name
from agent_r1.inference.conversation import Conversation, Exchange, same_context, user_tools
from agent_r1.inference.render import Screen, exchange_record, no_answer
from agent_r1.training.run import start_model
from agent_r1.types import Row
from agent_r1.ui import status
from agent_r1.workspace import Workspace, load_rows

SUGGESTIONS = 5
OUTSIDE = (
    "this agent knows one small world, and your question names nothing of it: do not believe the answer (a chat offers "
    "questions that it can answer)"
)


class Repl:
    """Lines in, effects out. `handle` does one line, whoever it came from."""

    def __init__(
        self,
        agent: Agent,
        screen: Screen,
        resources: ExitStack,
        seed: int = 0,
        as_json: bool = False,
        typed: bool = True,
    ):
        self.agent, self.screen, self.as_json = agent, screen, as_json
        self.typed = typed
        """Whether a person types. A script's Ctrl-C ends the script, and its empty lines mean nothing."""
        self.known = known_questions(agent.config)
        self.world = only_world(agent)
        self.suggestions = suggest(self.known)
        self.conversation = Conversation(agent, self.known, seed, None if as_json else screen)
        self.failed: str | None = None
        """What went wrong last, if anything did: the end of a script that is not typed."""
        self.leaving = False
        self._resources, self._seed = resources, seed
        self._others: dict[Path, Agent] = {}
        # One event loop for all questions. Its `run` turns Ctrl-C into a cancelled episode, and only that.
        self._runner = resources.enter_context(asyncio.Runner())
        self.commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list, and questions to ask", self.help),
            "/tools": ("", "what the agent can call", self.tools),
            "/trace": ("", "the last question token by token: mask, log-prob, reward", self.trace),
            "/why": ("", "the reward of the last answer, where the right one is known", self.why),
            "/retry": ("", "ask the last question again, with new random numbers", self.retry),
            "/temperature": ("[T]", "show or set the sampling temperature (0: always the likeliest)", self.temperature),
            "/memory": ("[on|off]", "whether a question goes on with the conversation", self.memory),
            "/compare": ("[MODEL]", "the last question to another model (default: before RL)", self.compare),
            "/save": ("FILE", "write the conversation with its token ids", self.save),
            "/load": ("FILE", "go on with a saved conversation", self.load),
            "/clear": ("", "forget the conversation", self.clear),
            "/quit": ("", "leave (Ctrl-D does too)", self.quit),
        }

    def handle(self, line: str) -> bool:
        """One line: a command, the number of a suggestion, or a question. False when the person wants to leave."""
        line = line.strip()
        name, _, argument = line.partition(" ")
        if name in self.commands:
            self.attempt(line, lambda: self.commands[name][2](argument.strip()))
        elif name.startswith("/"):
            hint = nearest(name[1:40], [known[1:] for known in self.commands])  # the slash makes all of them alike
            self._complain(line, f"unknown command {name[:40]}{hint}; /help lists them")
        elif self.suggestions and line.isdecimal() and len(line) < 3:
            if 1 <= int(line) <= len(self.suggestions):
                self.attempt(line, lambda: self.ask(self.suggestions[int(line) - 1], echo=True))
            else:
                self._complain(line, f"there is no question {line}; 1 to {len(self.suggestions)} are offered")
        elif line:
            self.attempt(line, lambda: self.ask(line))
        elif self.typed:
            self.screen.note("type a question, or /help")
        return not self.leaving

    def attempt(self, line: str, action: Callable[[], None]) -> None:
        """Do what a line asks for; whatever goes wrong becomes one sentence."""
        try:
            action()
        except KeyboardInterrupt:
            if not self.typed:
                raise
            self._complain(line, "interrupted; the conversation is as it was before")
        except AgentR1Error as error:
            self._complain(line, str(error))
        except Exception as error:  # a bug of ours, of a library, of a tool: a conversation is too dear to die of it
            self._complain(line, f"{type(error).__name__}: {error}")

    def ask(self, question: str, again: bool = False, echo: bool = False) -> None:
        """Put a question to the agent and show all that happens."""
        follows = self.conversation.memory and self.conversation.exchanges  # it may well mean what was said before
        if self.world and not follows and not any(name in question for name in self.world):
            self.screen.note(OUTSIDE)
        if self.as_json:
            exchange = self._runner.run(self.conversation.ask(question, again))
            print(json.dumps(exchange_record(exchange, self.agent.chat)), flush=True)
        else:
            if echo:
                self.screen.say(question, "bold")
            with self.screen.watching():
                exchange = self._runner.run(self.conversation.ask(question, again))
            self.screen.finish(exchange, self.agent)
        self.failed = no_answer(exchange, self.agent) or self.failed

    def _complain(self, line: str, why: str) -> None:
        self.failed = why
        if self.as_json:
            print(json.dumps({"question": line[:1000], "answer": None, "error": why}), flush=True)
        else:
            self.screen.note(why)

    def last(self) -> Exchange:
        if not self.conversation.exchanges:
            raise AgentR1Error("nothing was asked yet; ask something first, or type 1")
        return self.conversation.exchanges[-1]

    # --------------------------------------------------------------------------------------------------- commands

    def help(self, argument: str = "") -> None:
        for name, (usage, text, _) in self.commands.items():
            self.screen.say(f"  {f'{name} {usage}':<18} {text}")
        self.suggest()

    def suggest(self) -> None:
        if self.suggestions:
            self.screen.say("questions from the run's test set; type a number to ask one:")
            for number, question in enumerate(self.suggestions, 1):
                self.screen.say(f"  {number}  {question}")

    def tools(self, argument: str) -> None:
        for tool in self.agent.tools.values():
            self.screen.say(f"  {tool.name}({', '.join(tool.parameters.get('properties', {}))})  {tool.description}")
        if not self.agent.tools:
            self.screen.say("  none; --tools module:function adds one")

    def trace(self, argument: str) -> None:
        self.last()
        self.screen.trace(same_context(self.conversation.exchanges), self.agent.chat)

    def why(self, argument: str) -> None:
        self.screen.why(self.last())

    def clear(self, argument: str) -> None:
        self.conversation.exchanges = []

    def memory(self, argument: str) -> None:
        if argument not in ("", "on", "off"):
            raise AgentR1Error(f"/memory {argument[:40]}: say on or off")
        if argument:
            self.conversation.memory = argument == "on"
        on = self.conversation.memory
        self.screen.say("memory on: a question goes on with the conversation" if on else "memory off: each begins anew")

    def quit(self, argument: str) -> None:
        self.leaving = True

    def retry(self, argument: str) -> None:
        self.ask(self.last().question, again=True, echo=True)

    def temperature(self, argument: str) -> None:
        if argument:
            self.conversation.temperature = check_temperature(argument)
        trained = self.agent.config.rollout.temperature
        self.screen.say(f"temperature {self.conversation.temperature:g} (training: {trained:g})")

    def compare(self, argument: str) -> None:
        mine, other = self.last(), self._other(argument)
        conversation = Conversation(other, self.known, self._seed)
        conversation.temperature = self.conversation.temperature
        theirs = self._runner.run(conversation.ask(mine.question))
        if mine.start:
            self.screen.note("this was a follow-up; the other model is asked without the conversation before it")
        columns = [
            (short_name(agent), self.screen.exchange(exchange, agent.chat))
            for agent, exchange in ((self.agent, mine), (other, theirs))
        ]
        self.screen.compare(mine.question, columns)

    def _other(self, argument: str) -> Agent:
        """The agent of another model, opened once, in this process; in the same world and with the same tools."""
        from agent_r1.inference.agent import find_model

        config = self.agent.config
        model, config = find_model(hf_path=argument) if argument else (start_model(config), config)
        if model not in self._others:
            with _opening(self.typed):
                agent = self._resources.enter_context(open_agent(model, config, "transformers", self.agent.tools))
            if not argument:  # the model that the run started from is asked in the words of the run
                agent.lead = self.agent.lead
            self._others[model] = agent
        return self._others[model]

    def save(self, argument: str) -> None:
        path = _file(argument, "/save")
        self.conversation.save(path)
        self.screen.say(f"{len(self.conversation.exchanges)} questions and answers in {path}")

    def load(self, argument: str) -> None:
        self.conversation.load(_file(argument, "/load"))
        for exchange in self.conversation.exchanges:
            self.screen.say(exchange.question, "bold")
            self.screen.console.print(self.screen.exchange(exchange, self.agent.chat), soft_wrap=self.screen.plain)


def check_temperature(text: str) -> float:
    """A temperature in the words of a person. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise ConfigError(f"temperature {text[:40]}: give a number from 0 (always the likeliest token) to 10")
    return value


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise AgentR1Error(f"{command} needs a file name, for example {command} chat.json")
    return Path(argument).expanduser()


# ------------------------------------------------------------------------------------------------ questions to offer


def known_questions(config: Config) -> list[Row]:
    """The questions of the run's test set; none where the run's data is not on this machine."""
    try:
        return load_rows(config, "test")
    except AgentR1Error:
        return []


def only_world(agent: Agent) -> set[str]:
    """What the passages are about, where the agent knows nothing else. Empty for a pretrained model."""
    corpus = Workspace.of(agent.config).data / "corpus.jsonl"
    if "search" not in agent.tools or not made_from_nothing(agent.chat, agent.config) or not corpus.exists():
        return set()
    return {passage.title.partition(" (")[0] for passage in read_corpus(corpus)}  # Faust (opera) is asked for as Faust


def suggest(rows: list[Row]) -> list[str]:
    """A few of them, of every kind, so that a newcomer has something to ask."""
    by_kind: dict[str, list[str]] = {}
    for row in rows:
        by_kind.setdefault(row["extra_info"].get("kind", ""), []).append(row["prompt"][-1]["content"])
    rounds = [questions[n] for n in range(SUGGESTIONS) for questions in by_kind.values() if n < len(questions)]
    return rounds[:SUGGESTIONS]


# -------------------------------------------------------------------------------------------------- where lines come from


@contextmanager
def _line_editor(repl: Repl, history: Path) -> Iterator[None]:
    """Editing, history over sessions, and completion with Tab, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    found: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            commands = [f"{name} " if usage else name for name, (usage, _, _) in repl.commands.items()]
            words = glob.glob(glob.escape(text) + "*") if readline.get_begidx() else commands
            found[:] = sorted(word for word in words if word.startswith(text))
        return found[state] if state < len(found) else None

    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    try:
        yield
    finally:
        # The file has a line an entry: a pasted page would come back in pieces, and push out all else.
        for number in range(readline.get_current_history_length(), 0, -1):
            if "\n" in readline.get_history_item(number):
                readline.remove_history_item(number - 1)  # counts from 0, where the other counts from 1
        with contextlib.suppress(OSError):  # a read-only folder costs the history and nothing else
            readline.write_history_file(history)


def _prompt_loop(repl: Repl, plain: bool) -> None:
    # Readline must know which characters of the prompt take no room.
    prompt = "> " if plain else "\001\033[1;36m\002> \001\033[0m\002"
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            continue
        if not repl.handle(line):
            return


# -------------------------------------------------------------------------------------------------------- the command


@contextmanager
def _opening(typed: bool) -> Iterator[Callable[[str], None]]:
    """While a model opens. What is said meanwhile (a server starts, an index is built) is not part of an answer, so a
    program does not find it on standard output."""
    with contextlib.redirect_stdout(sys.stdout if typed else sys.stderr), status() as on_status:
        on_status("opening the model")
        yield on_status


def run_chat(
    model: Path,
    config: Config,
    backend: str = "transformers",
    question: str | None = None,
    as_json: bool = False,
    tools: list[str] | None = None,
    temperature: float | None = None,
    seed: int = 0,
    prompt: str | None = None,
) -> None:
    """Chat with a model folder. Raises AgentR1Error when it cannot be opened, and where nobody types, for what failed."""
    if question is not None and not question.strip():
        raise ConfigError(
            '--question is empty; write one, for example --question "In which city is the publisher of Sosnum based?"'
        )
    extra = user_tools(tools or [])
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # broken UTF-8 in a pasted text or a narrow locale is no reason to die
    typed = sys.stdin.isatty() and sys.stdout.isatty() and question is None and not as_json
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    screen = Screen(Console(highlight=False, color_system=None if plain else "auto", stderr=as_json), plain)
    with ExitStack() as resources:
        with _opening(typed) as on_status:
            agent = resources.enter_context(open_agent(model, config, backend, on_status=on_status, prompt=prompt))
        agent.tools = agent.tools | extra
        repl = Repl(agent, screen, resources, seed, as_json, typed)
        trained = (own_settings(model) or config).env.tools
        if set(agent.tools) != set(trained) and made_from_nothing(agent.chat, agent.config):
            screen.note("this model has met its own tools only, and may lose its way among others")
        if temperature is not None:
            repl.conversation.temperature = temperature
        if not typed:
            print(describe(agent, backend), file=sys.stderr)
        if question is not None:
            repl.attempt(question, lambda: repl.ask(question.strip()))
        elif typed:
            memory = "" if repl.conversation.memory else "; each question begins anew (/memory)"
            screen.say(describe(agent, backend) + memory, "dim")
            repl.suggest()
            screen.say("type a question, or /help", "dim")
            with _line_editor(repl, Workspace.of(config).root / "runs" / ".chat_history"):
                _prompt_loop(repl, plain)
            return
        else:
            for line in sys.stdin:
                if not repl.handle(line):
                    break
    if repl.failed:
        raise AgentR1Error(repl.failed)
