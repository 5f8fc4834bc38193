"""Play the agent by hand: see the model's input, the trained tokens and the rewards.

In: a configuration and a person. Out: one episode of the training loop, shown while it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from textwrap import indent
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_r1.chat.format import ChatFormat
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import Generation, Observation, Policy, Row, Sampling, Step, StepResult
from agent_r1.env import AgentEnv, Dialect, dialect_of
from agent_r1.ground.clean import clean
from agent_r1.ground.errors import AgentR1Error, ConfigError, nearest
from agent_r1.ground.ui import console
from agent_r1.rollout.episode import AgentEnvLoop, Limits, Task
from agent_r1.rollout.training_rows import trajectory_rows
from agent_r1.tool import BaseTool, ToolCall, call_tool
from agent_r1.watch.tokens import token_table, token_text

NO_LIMIT = 10**5
"""Tokens of a turn while there is no tokenizer. Then a token is a byte: no person types so many."""


def how_to(dialect: Dialect, tools: dict[str, BaseTool]) -> str:
    """Explain the short forms to the person, with the turns that they stand for."""
    examples = []
    for tool in tools.values():
        arguments = [f"{key}=..." for key in tool.parameters.get("properties", {})]
        short_call = " ".join([tool.name, *arguments])
        if expand(short_call, tools, dialect) != short_call:  # the dialect can write its call
            examples = [short_call]  # of the first such tool
            break
    lines = ["Write a turn as the agent would, or in short:"]
    for short_form in [*examples, "= 42"]:
        turn = expand(short_form, tools, dialect)
        lines.append(f"  {short_form}\n{indent(turn, '      ')}")
    lines.append("Give up with an empty line or Ctrl-D.")
    return "\n".join(lines)


class _ByHand(AgentEnvLoop, Policy):
    """Run the episode loop with a person as its policy.

    It prints what the agent reads, each call's outcome and each reward. `read_line` waits for the
    person's next turn.
    """

    def __init__(
        self,
        chat: ChatFormat,
        limits: Limits,
        make_env: Callable[[Row], AgentEnv],
        dialect: Dialect,
        read_line: Callable[[], str],
    ):
        super().__init__(self, chat, limits, make_env)  # its own policy
        self.dialect = dialect
        self.read_line = read_line

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        ids = super().observe(steps, observation)
        # A context grows: it begins with all ids up to the last turn. A rewritten one is all new.
        known_tokens = 0
        if steps and not observation.rewrite:
            known_tokens = len(steps[-1].observation_ids) + len(steps[-1].action_ids)
        new_ids = ids[known_tokens:]
        console().print(
            f"\n[bold]The agent reads[/] {len(new_ids)} tokens (mask 0), {len(ids)} in all:"
        )
        console().print(Text(clean(self.chat.decode(new_ids)), style="bright_black"))
        return ids

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        # In a thread: the event loop, with the tools' connections, must not wait for a person.
        text = await asyncio.to_thread(self.read_line)
        if not text.strip():
            raise EOFError  # caught in `play_by_hand`
        ids = self.chat.turn_ids(text, self.dialect)
        turn = ids[: sampling.max_tokens]  # a longer turn is cut off, as a model's would be
        limit = ""
        if sampling.max_tokens < NO_LIMIT:
            limit = f" of at most {sampling.max_tokens}"
        console().print(f"[bold]You wrote[/] {len(ids)} tokens (mask 1){limit}:")
        console().print(Text(clean(self.chat.decode(turn)), style="black on bright_cyan"))
        finish_reason = "stop" if len(turn) == len(ids) else "length"
        # A person has no log-probabilities; nothing is trained on these rows.
        return Generation(turn, [0.0] * len(turn), finish_reason)

    def on_result(self, result: StepResult) -> None:
        for call in result.info.get("tool_calls", ()):
            outcome = "ok" if call["ok"] else call["error"]
            console().print(
                f"{call['name']}: {outcome}, {1000 * call['seconds']:.1f} ms", markup=False
            )
        if result.reward:
            console().print(f"reward of this step: {result.reward:+.3f}")


def expand(line: str, tools: dict[str, BaseTool], dialect: Dialect) -> str:
    """Expand a short form to a turn: an answer (`= ...`) or a call (`NAME key=value ...`).

    Quotes may be left out: in `search query=the mayor of Pumfir` the later words belong to the
    query. Everything else is a turn already, and returned as it is.
    """
    line = line.strip()
    if line.startswith("="):
        return dialect.write_turn(line[1:].strip()) or line
    name, _, rest = line.partition(" ")
    if name not in tools:
        return line
    try:
        words = shlex.split(rest)
    except ValueError:  # a quotation mark without its other
        return line
    arguments: list[str] = []
    for word in words:
        if "=" in word:
            arguments.append(word)
        elif arguments:
            arguments[-1] += f" {word}"
    # Words before any argument are dropped: the tool then says which argument is missing.
    return dialect.write_turn(ToolCall(name, _arguments(arguments))) or line


def _arguments(words: list[str]) -> dict[str, Any]:
    """Parse `x=1 name=Ada` as call arguments: JSON values, else text. Each word has a `=`."""
    arguments: dict[str, Any] = dict(word.split("=", 1) for word in words)
    for key, text in arguments.items():
        with contextlib.suppress(ValueError):
            arguments[key] = json.loads(text)
    return arguments


def play_by_hand(
    row: Row,
    chat: ChatFormat,
    tools: dict[str, BaseTool],
    rollout: RolloutConfig,
    env: EnvConfig,
    make_env: Callable[[Row], AgentEnv],
    table: bool,
) -> None:
    """Play one episode, and show its rewards and training rows.

    `rollout` and `env` have the limits; with `table` the tokens are a table. Raises AgentR1Error if
    the person gives up.
    """
    dialect = dialect_of(env)
    console().print(how_to(dialect, tools), markup=False)

    def read_line() -> str:
        console().print("\n[bold]your turn>[/] ", end="")
        return expand(sys.stdin.readline(), tools, dialect)

    loop = _ByHand(chat, Limits.from_settings(rollout, env), make_env, dialect, read_line)
    try:
        trajectory = asyncio.run(
            loop.play(Task(row, "by hand", "by hand"), Sampling(rollout.max_tokens_per_turn))
        )
    except EOFError:
        raise AgentR1Error("cancelled before the episode ended", code="given_up") from None
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in trajectory.reward_parts.items())
    answers = ", ".join(str(answer) for answer in row["reward_model"]["ground_truth"])
    ending = trajectory.error or f"expected {answers or 'nothing'}"
    console().print(f"\nThe episode is over: {trajectory.stop_reason}, {ending}.", markup=False)
    reward = f"reward {trajectory.reward:+.3f}"
    if parts:
        reward += f" ({parts})"
    console().print(reward, markup=False)
    # One row, unless the environment rewrote the context (rollout/training_rows.py).
    for training_row in trajectory_rows(trajectory, 0):
        tokens = [chat.decode([i]) for i in training_row.input_ids]
        record = vars(training_row) | {"tokens": tokens}
        trained_tokens = sum(training_row.action_mask)
        console().print(f"\nTraining rows: {trained_tokens} of {len(tokens)} tokens are trained on")
        console().print(token_table(record) if table else token_text(record))


# -------------------------------------------------------------------------------------------- tools


def show_tools(tools: dict[str, BaseTool], schema: bool = False) -> None:
    """List name, arguments and description of each tool, or print their JSON schemas."""
    if schema:
        schemas = [tool.schema() for tool in tools.values()]
        print(json.dumps(schemas, indent=2, ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold")
    for column in ("tool", "arguments", "description for the agent"):
        table.add_column(column)
    for tool in tools.values():
        table.add_row(
            tool.name,
            ", ".join(tool.parameters.get("properties", {})),
            Text(clean(tool.description)),
        )
    console().print(table)


def call_by_hand(tools: dict[str, BaseTool], words: list[str], env: EnvConfig) -> bool:
    """Call `NAME key=value ...`, print what the agent would read, and return whether it succeeded.

    Raises ConfigError for an unknown tool, or a word that is no argument.
    """
    name, *rest = words
    if name not in tools:
        raise ConfigError(
            f"there is no tool {name!r}{nearest(name, tools)}; the preset has "
            f"{', '.join(tools) or 'none'} (methods of an environment need an episode: `agent-r1 "
            "try`)",
            code="unknown_tool",
        )
    bad = [word for word in rest if "=" not in word]
    if bad:
        raise ConfigError(
            f"--call {name}: {bad[0]!r} is not of the form argument=value", code="bad_argument"
        )
    result = asyncio.run(
        call_tool(tools, ToolCall(name, _arguments(rest)), env.tool_timeout_s, env.tool_max_chars)
    )
    console().print(clean(result.content), markup=False)
    outcome = "ok" if result.ok else result.error
    console().print(f"{outcome}, {1000 * result.seconds:.1f} ms", style="bright_black")
    return result.ok
