"""Compare 100 scripted episodes of each world here, in TRL and in verifiers.

The turns are those of the world's own demonstrator, which is often wrong. In TRL the real
GRPOTrainer plays them, with a model of two narrow layers that is not asked: only its
`_generate_single_turn` is replaced. In verifiers the real command `vf-eval` plays them, with an API
that answers with the demonstrator's turns. The package is installed into an environment of its own.
What that environment lacks comes from ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from agent_r1 import (
    ChatFormat,
    Generation,
    Hermes,
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
from agent_r1.cold_start.demonstrate import play_demonstrations, texts_of
from agent_r1.config import plugins
from agent_r1_recipes.homes.trl import Home, reward, trl_home, turn_text
from lab.rehearsals.agents import ROOT, install

sys.path.insert(0, str(ROOT / "tests"))
from api_servers import answer, scripted_api  # noqa: E402

EPISODES = 100
VERIFIERS = ("verifiers==0.4.0",)
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
        text = self.text(conversation(self.chat.decode(prompt_ids)))
        return self.chat.turn_ids(text, Hermes())

    def text(self, history: list[Message]) -> str:
        question = next(message["content"] for message in history if message["role"] == "user")
        row = next(row for text, row in self.rows.items() if question.startswith(text))
        turns = sum(message["role"] == "assistant" for message in history)
        rng = random.Random(f"{row['extra_info']['index']}/{turns}")
        return self.demonstrate(row, history, rng)


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


def play_here(config: Any, rows: list[Row], script: Script) -> list[Episode]:
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


def play_in_trl(
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
    reply: dict[str, Any] = {}

    def record_reward(**columns: Any) -> list[float | None]:
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
            reply["ids"], reply["completions"], reply["masks"] = result[:3]
            return result

    trainer = Trainer(
        model=Qwen2ForCausalLM(shape),
        processing_class=tokenizer,
        reward_funcs=record_reward,
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
        reply["ids"], reply["completions"], reply["masks"], rewards, strict=True
    ):
        ids = [*prompt, *completion]
        bits = [0] * len(prompt) + [int(bit) for bit in mask]
        episodes.append((ids, bits, value or 0.0))
    return episodes


# ---------------------------------------------------------------------------------------- verifiers

Transcript = tuple[list[tuple[str, str, bool]], float]
"""Messages as (role, text, whether the model wrote it), and the reward."""


def as_said(episodes: list[Episode], chat: ChatFormat) -> list[Transcript]:
    """Read our episodes as verifiers records them: as messages, sampled or not."""
    transcripts: list[Transcript] = []
    for ids, mask, value in episodes:
        messages: list[tuple[str, str, bool]] = []
        # `conversation` leaves out the beginning of the next turn, so it needs one.
        for message in conversation(chat.decode(ids) + "\n<|im_start|>assistant\n"):
            role = message["role"]
            if role != "system":  # the tools, which verifiers keeps in a field of their own
                messages.append((role, spell_tokens(message["content"], role), role == "assistant"))
        # Whatever the model wrote has mask 1, and nothing else has.
        runs = "".join(map(str, mask)).split("0")
        action_runs = [run for run in runs if run]
        if len(action_runs) != sum(one[2] for one in messages):
            raise RuntimeError("a turn of ours has no mask of its own")
        transcripts.append((messages, value))
    return transcripts


def spell_tokens(text: str, role: str) -> str:
    """Return one spelling of a turn; JSON and blanks may be written in several ways."""
    if role != "assistant":
        return text
    parts: list[Any] = []
    for part in Hermes().parts(text):
        value: Any = part.text.strip()
        if part.kind == "tool_call":
            value = json.loads(value)
        if value:
            parts.append([part.kind, value])
    return json.dumps(parts, sort_keys=True)


def as_answer(text: str) -> dict[str, Any]:
    """Write a turn as the body of an API's answer."""
    content = ""
    thought: dict[str, str] = {}
    calls: list[tuple[str, str]] = []
    for part in Hermes().parts(text):
        if part.kind == "think":
            thought["reasoning_content"] = part.text
        elif part.kind == "tool_call":
            call = json.loads(part.text)
            calls.append((call["name"], json.dumps(call["arguments"])))
        elif part.kind == "answer":
            content += f"<answer>{part.text}</answer>"
        else:
            content += part.text
    reason = "tool_calls" if calls else "stop"
    body = answer(content.strip() or None, calls, finish_reason=reason, **thought)
    # verifiers checks an answer against the schema of the `openai` package.
    body["choices"][0]["index"] = 0
    body["usage"]["total_tokens"] = 110
    return body | {"id": "a", "object": "chat.completion", "created": 1, "model": "script"}


def play_in_verifiers(
    preset: str, settings: list[str], script: Script, python: Path, folder: str
) -> list[Transcript]:
    """Play the questions with `vf-eval`. Raise RuntimeError if it fails, or branches."""
    name = f"home_{preset.replace('-', '_')}"
    words = ", ".join(repr(word) for word in [preset, *settings])
    (Path(folder) / f"{name}.py").write_text(
        "from agent_r1_recipes.homes.verifiers import verifiers_home\n\n"
        f"Questions, Episodes = verifiers_home({words})\n"
        '__all__ = ["Questions", "Episodes"]\n'
    )
    out = Path(folder) / f"out-{name}"
    path = f"{ROOT / 'src'}:{ROOT}:{folder}"
    with scripted_api(lambda body, number: as_answer(script.text(body["messages"]))) as api:
        options = ["--client.base-url", api.url, "--client.api-key-var", "SCRIPT_KEY"]
        options += ["--env.agent.runtime.type", "subprocess", "--no-push", "-o", str(out)]
        done = subprocess.run(
            [python.with_name("vf-eval"), name, "-m", "script", "-c", "8", *options],
            cwd=folder,
            env=os.environ | {"SCRIPT_KEY": "none", "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"vf-eval {name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    [file] = out.rglob("traces.jsonl")
    traces = [json.loads(line)["traces"][0] for line in file.read_text().splitlines()]
    transcripts: list[Transcript] = []
    for trace in sorted(traces, key=lambda one: one["task"]["data"].get("idx", 0)):
        nodes = trace["nodes"]
        if not trace["ok"] or [node.get("parent") for node in nodes[1:]] != [
            *range(len(nodes) - 1)
        ]:
            raise RuntimeError(f"verifiers saw an error or a branch: {trace['errors'] or nodes}")
        messages: list[tuple[str, str, bool]] = []
        for node in nodes:
            role = node["message"]["role"]
            messages.append((role, text_in(node["message"]), node["sampled"]))
        transcripts.append((messages, trace["rewards"]["outcome"]["score"]))
    return transcripts


def text_in(message: dict[str, Any]) -> str:
    """Return a recorded message as ours is spelled."""
    if message["role"] != "assistant":
        return message["content"]
    calls = [
        {"function": {"name": call["name"], "arguments": json.loads(call["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    thought = message.get("reasoning_content")
    text = f"<think>{thought}</think>" if thought else ""
    text += turn_text({"content": message.get("content"), "tool_calls": calls})
    return spell_tokens(text, "assistant")


# -------------------------------------------------------------------------------------- comparisons


def compare(preset: str, settings: list[str], folder: str, python: Path) -> dict[str, Any]:
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
    ours = play_here(config, rows, script)
    theirs = play_in_trl(config, home, rows, script, folder)
    equal = [0, 0, 0]
    for one, other in zip(ours, theirs, strict=True):
        for place in range(3):
            equal[place] += one[place] == other[place]
    equal_said = [0, 0]
    here = as_said(ours, chat)
    there = play_in_verifiers(preset, settings, script, python, folder)
    for one, other in zip(here, there, strict=True):
        for place in range(2):
            equal_said[place] += one[place] == other[place]
    return {
        f"{preset}_ids_masks_rewards": "{} {} {} of {}".format(*equal, len(rows)),
        f"{preset}_verifiers_messages_rewards": "{} {} of {}".format(*equal_said, len(rows)),
        f"{preset}_mean_reward": round(sum(one[2] for one in ours) / len(ours), 2),
    }


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENT_R1_HOME"] = folder
        python = install(Path(folder) / "verifiers", VERIFIERS)
        # Its own packages come first; what it lacks (torch, our dependencies) is ours.
        [theirs] = (Path(folder) / "verifiers" / "lib").glob("python*/site-packages")
        (theirs / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        for preset, settings in WORLDS.items():
            figures |= compare(preset, settings, folder, python)
            print(figures, flush=True)
    return figures
