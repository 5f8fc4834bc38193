"""Play our loop with a model of an API, by writing its messages as turns.

In: a task. Out: its trajectory, with a byte as a token, because the API's tokens are not known. The
environment, its tools, limits and reward are those of every other model. `client.py` asks the API.

    observation    -> messages with roles, and the tools' schemas
    message        -> a turn as the environment's dialect writes it: <think>, calls, text
    tool results   -> messages of role tool, with the ids of the calls

An API without tool calls (`rollout.api_calls=text`) gets the tools in the system message, and
writes its calls in the dialect's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agent_r1 import (
    AgentEnv,
    AgentEnvLoop,
    AgentFlowBase,
    BaseToolEnv,
    ChatFormat,
    ConfigError,
    Generation,
    Hermes,
    Message,
    Observation,
    Policy,
    Row,
    Sampling,
    Step,
    StopReason,
    Task,
    Trajectory,
)
from agent_r1_recipes.api.client import BYTES_OF_A_TOKEN, THOUGHTS, Client, ContextFullError
from agent_r1_recipes.api.settings import ApiSettings

NO_LIMIT = 10**8
"""Of our own: the API counts the tokens of a context, and its requests have their deadlines."""
LONGEST_TURN = 1 << 16
"""Characters of a turn, if its limit of tokens is small. A turn of 7 MB, a byte a token, would hold
all other episodes for most of a minute."""
TOOLS = """\
You can call these tools. A line is a tool's schema:
{schemas}
To call a tool, write
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
and end your turn. The result comes between <tool_response> and </tool_response>."""
"""The system message for an API without tool calls, in an environment that speaks Hermes."""


class ApiFlow(AgentFlowBase):
    """The usual loop, with an `ApiEpisode` for each task."""

    def __init__(
        self,
        policy: Client,
        chat: ChatFormat,
        limits: Any,
        make_env: Callable[[Row], AgentEnv],
        rollout: ApiSettings,
    ):
        if not isinstance(policy, Client):
            raise ConfigError(
                "rollout.api is for `agent-r1 eval --api` and `agent-r1 demonstrate --api`: a "
                "model of an API has no weights to train or to open; leave it out",
                code="unused_setting",
            )
        own_limits = replace(limits, max_context=NO_LIMIT, timeout_s=float(NO_LIMIT))
        super().__init__(None, chat, own_limits, make_env)
        self.client = policy
        self.rollout = rollout
        self.conversations: dict[str, list[Conversation]] = {}
        """Session -> its contexts, for demonstrations."""

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        """See `AgentFlowBase.run`."""
        episode = ApiEpisode(self, task)
        self.conversations[task.session] = episode.contexts
        return await episode.run(task, sampling)


class Conversation:
    """One context, in the words of the dialect and in those of the API."""

    def __init__(self, tools: list[dict[str, Any]] | None):
        self.tools = tools
        self.texts: list[Message] = []
        """As a data set for cloning has them."""
        self.messages: list[Message] = []
        """As the API gets them."""
        self.call_ids: list[str] = []
        """Of the last turn's native calls, which have no result yet."""


class ApiEpisode(AgentEnvLoop, Policy):
    """One episode of the usual loop, with the API as its policy."""

    def __init__(self, flow: ApiFlow, task: Task):
        def make_env(row: Row) -> AgentEnv:
            env = flow.make_env(row)
            self.native = is_native(env, flow.rollout.api_calls)
            return env

        super().__init__(self, flow.chat, flow.limits, make_env)
        self.client = flow.client
        self.rollout = flow.rollout
        self.session = task.session
        self.native = True
        self.turns = 0
        self.contexts: list[Conversation] = []

    async def _converse(
        self, env: AgentEnv, task: Task, sampling: Sampling, steps: list[Step]
    ) -> StopReason:
        try:
            return await super()._converse(env, task, sampling, steps)
        except ContextFullError:
            return StopReason.CONTEXT_OVERFLOW

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        """Add an observation to the conversation; the returned ids are for the record only."""
        if not steps or observation.rewrite:
            self.contexts.append(Conversation(observation.tools))
        here = self.contexts[-1]
        here.texts += observation.messages
        if self.native:
            here.messages += self._native_messages(here, observation.messages)
        else:
            if not here.messages and here.tools:
                here.messages += with_tools([], here.tools)
            for message in as_text_messages(observation.messages):
                first = here.messages[:1]
                if message["role"] == "system" and first and first[0]["role"] == "system":
                    here.messages[0] = join(message, first[0])
                else:
                    here.messages.append(message)
        return super().observe(steps, observation)

    def _native_messages(self, here: Conversation, messages: list[Message]) -> list[Message]:
        """Give results the ids of their calls. Raise ConfigError if the dialect has no results."""
        results = [message for message in messages if message["role"] == "tool"]
        ids = here.call_ids
        here.call_ids = []
        if len(results) < len(ids):
            raise ConfigError(
                "this environment writes the results of calls as plain text, so the API's own "
                "calls would have none; set rollout.api_calls=text",
                code="no_native_calls",
            )
        # Calls that the model wrote as text stand before its native ones, and have no id.
        text_results = results[: len(results) - len(ids)]
        native_messages: list[Message] = []
        for key, result in zip(ids, results[len(text_results) :], strict=True):
            native_messages.append(
                {"role": "tool", "tool_call_id": key, "content": result["content"]}
            )
        native_messages += as_text_messages(text_results)
        native_messages += [message for message in messages if message["role"] != "tool"]
        return native_messages

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """Ask the API for the next turn; see `Policy.generate`."""
        here = self.contexts[-1]
        body: dict[str, Any] = {
            "messages": here.messages,
            self.rollout.api_limit: sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if self.native and here.tools:
            body["tools"] = here.tools
        answer = await self.client.ask(f"{self.session}/{self.turns}", body)
        self.turns += 1
        message = answer["message"]
        text, call_ids, sent_message = read_message(message, self.rollout.api_thoughts)
        longest = max(LONGEST_TURN, BYTES_OF_A_TOKEN * sampling.max_tokens)
        if len(text) > longest:  # the server did not keep the limit, so it is kept here
            text = text[:longest]
            call_ids = []
            sent_message = {"role": "assistant", "content": text}
            answer = answer | {"finish_reason": "length"}
        here.call_ids = call_ids if self.native else []
        here.messages.append(sent_message)
        here.texts.append({"role": "assistant", "content": text})
        if answer["finish_reason"] == "length":
            # A thought may take all tokens: then the turn is empty, and a record needs a token.
            ids = self.chat.encode_data(text or " ")
            return Generation(ids, [0.0] * len(ids), "length")
        ids = self.chat.turn_ids(text, Hermes())
        return Generation(ids, [0.0] * len(ids), "stop")

    def release(self, session: str) -> None:
        """Do nothing: an API keeps no session."""


def is_native(env: AgentEnv, setting: str) -> bool:
    """Return whether the API's own tool calls are used. Raise ConfigError if nothing fits."""
    hermes = isinstance(env, BaseToolEnv) and isinstance(env.dialect, Hermes)
    if setting == "native" and not hermes:
        raise ConfigError(
            "rollout.api_calls=native needs an environment in the Hermes dialect, such as "
            "env.name=hermes; use rollout.api_calls=text",
            code="no_native_calls",
        )
    if hermes or not isinstance(env, BaseToolEnv):
        return hermes and setting != "text"
    if env.tools and env.dialect.system_prompt(env.tools) is None:
        raise ConfigError(
            "the tools of this dialect are shown by a model's own chat template, which an API "
            "does not tell; evaluate with env.name=hermes, whose calls are the API's own",
            code="no_native_calls",
        )
    return False


# ------------------------------------------------------------------------------ messages and texts


def read_message(message: dict[str, Any], thoughts: bool) -> tuple[str, list[str], Message]:
    """Return the turn as text, its calls' ids, and the message to send back.

    A call whose arguments are not JSON is written as it is: the environment tells the model.
    """
    content = text_of(message.get("content"))
    thought = ""
    for field in THOUGHTS:
        if isinstance(message.get(field), str) and message[field]:
            # Its end tag would end the thought earlier than the model did.
            thought = f"<think>{message[field].replace('</think>', '< /think>')}</think>"
            break
    calls = ""
    sent_calls: list[dict[str, Any]] = []
    native_calls = message.get("tool_calls")
    for number, call in enumerate(native_calls if isinstance(native_calls, list) else []):
        name, arguments = function_of(call)
        calls += f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n'
        calls += "</tool_call>"
        key = call.get("id") if isinstance(call, dict) else None
        key = key if isinstance(key, str) and key else f"call_{number}"
        function = {"name": name, "arguments": arguments}
        sent_calls.append({"id": key, "type": "function", "function": function})
    sent_message: Message = {"role": "assistant", "content": content or None}
    if sent_calls:
        sent_message["tool_calls"] = sent_calls
    elif not content:
        sent_message["content"] = ""
    if thoughts:
        sent_message |= {field: message[field] for field in THOUGHTS if field in message}
    return f"{thought}{content}{calls}", [call["id"] for call in sent_calls], sent_message


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be in parts."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text += part["text"]
    return text


def function_of(call: Any) -> tuple[str, str]:
    """Return name and arguments of a call as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", ""
    name = function.get("name")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some servers parse them
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = name if isinstance(name, str) else ""
    arguments = arguments if isinstance(arguments, str) else ""
    return name, arguments if arguments.strip() else "{}"  # of a call without arguments


def as_text_messages(messages: list[Message]) -> list[Message]:
    """Write results as a user's message, for an API without tool calls."""
    text_messages: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
        else:
            text_messages.append({"role": message["role"], "content": message["content"]})
    if results:
        text_messages.insert(0, {"role": "user", "content": "\n".join(results)})
    return text_messages


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Put a system message about the tools before the messages."""
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return [{"role": "system", "content": TOOLS.format(schemas=schemas)}, *messages]


def join(first: Message, second: Message) -> Message:
    """Join two system messages: many APIs take only one."""
    return {"role": "system", "content": f"{first['content']}\n\n{second['content']}"}
