"""Episodes in each dialect: tools, turns and the text that becomes of them."""

from __future__ import annotations

import asyncio

from building import tools_of
from conftest import ScriptedPolicy, make_env_loop, question_row, task

from agent_r1.chat.format import ChatFormat
from agent_r1.config.settings import EnvConfig
from agent_r1.core import AgentEnv, Sampling, Trajectory
from agent_r1.env import environment, make_env
from agent_r1.tool import BaseTool
from agent_r1_recipes.dialects.harmony import CONTROL_TOKENS

QWEN25 = """\
{%- set first_is_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' }}
{{- messages[0].content if first_is_system else 'You are a helpful assistant.' }}
{%- if tools %}
    {{- "\\n\\n# Tools\\n\\nFunction signatures are within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call> tags:" }}
    {{- "\\n<tool_call>\\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Search(BaseTool):
    """Says what it was asked, and what a test wants it to say."""

    name, description = "search", "Search."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self, says: str = "Marn is in Tulo."):
        super().__init__()
        self.says = says

    async def execute(self, args):
        return f"{args['query']}: {self.says}"


TOOLS = tools_of("python") | {"search": Search()}


def env_of(dialect: str, **config) -> AgentEnv:
    env = environment(dialect)(TOOLS, EnvConfig(**config))
    env.reset(question_row("17 * 23 + 4?", ("395",)))
    return env


FENCED = "```python\nprint(17 * 23)\n```"
GOLDEN = {
    "retool": (
        [
            f"The product first. <code>\n{FENCED}\n</code>",
            "<think>And 4.</think><answer>395</answer>",
        ],
        f"<|im_start|>assistant\nThe product first. <code>\n{FENCED}\n</code><|im_end|>\n"
        "<|im_start|>user\n<interpreter>\n391\n</interpreter><|im_end|>\n"
        "<|im_start|>assistant\n<think>And 4.</think><answer>395</answer><|im_end|>",
    ),
    "mathtir": (
        [f"The product first.\n{FENCED}", "And 4, so it is $\\boxed{395}$."],
        f"<|im_start|>assistant\nThe product first.\n{FENCED}<|im_end|>\n"
        "<|im_start|>user\n```output\n391\n```<|im_end|>\n"
        "<|im_start|>assistant\nAnd 4, so it is $\\boxed{395}$.<|im_end|>",
    ),
    "react": (
        [
            "Thought: Look it up.\nAction: search\nAction Input: Marn",
            "Thought: I know.\nFinal Answer: 395",
        ],
        "<|im_start|>assistant\nThought: Look it up.\nAction: search\nAction Input: "
        "Marn<|im_end|>\n"
        "<|im_start|>user\nObservation: Marn: Marn is in Tulo.<|im_end|>\n"
        "<|im_start|>assistant\nThought: I know.\nFinal Answer: 395<|im_end|>",
    ),
}
"""What an agent says, and the tokens of the whole episode behind the question, decoded."""

HARMONY = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.search "
    '<|constrain|>json<|message|>{"query":"Marn"}<|call|>',
    "<|channel|>analysis<|message|>I "
    "know.<|end|><|start|>assistant<|channel|>final<|message|>395<|return|>",
)

PIECES = [
    "<code>",
    "</code>",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<interpreter>",
    "```python\n",
    "```\n",
    "```output\n",
    "\\boxed{",
    "}",
    "Action: search\n",
    "Action Input:",
    "Observation:",
    "Final Answer:",
    "to=functions.search",
    "\n",
    "{",
    "x",
    *CONTROL_TOKENS,
    "<|channel|>final",
    "<|channel|>analysis",
]


def played(dialect: str, chat: ChatFormat, turns: list) -> Trajectory:
    policy = ScriptedPolicy(chat, turns)
    loop = make_env_loop(policy, lambda row: make_env(row, TOOLS, EnvConfig(name=dialect)))
    return asyncio.run(
        loop.run(task(question_row("17 * 23 + 4?", ("395",), agent_name=dialect)), Sampling(400))
    )
