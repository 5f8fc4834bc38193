"""Other people's models from end to end: cold start, two steps of RL, export, vLLM, a client's
call. The server goes when the process that started it is killed."""

from __future__ import annotations

import json
import time

import pytest
from runs import main, orphans
from server_processes import ServerOfAnother, answers, children, gone, server_of_another
from small_models import small_model

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat
from agent_r1.config import from_yaml
from agent_r1.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
FAMILIES = {
    "llama": ("llama3_2", "llama3_json", '{"name": "search", "parameters": {"query": "Vexlor"}}'),
    "qwen3": (
        "qwen3_5_think",
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=query>\nVexlor\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
}
"""Architecture -> template, the dialect that `auto` finds, a call in its form."""
QUESTION = {"role": "user", "content": "Who founded Vexlor?"}
RESULT = {"role": "tool", "content": "Vexlor was founded by Marn."}
ANSWER = "<answer>Marn</answer>"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "qwen3"])
def test_a_model_is_taught_trained_exported_and_asked_for_a_call(tmp_path, monkeypatch, family):
    template, dialect, call = FAMILIES[family]
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    model = small_model(tmp_path / "model", family, template)
    turns = [QUESTION, {"role": "assistant", "content": call}, RESULT]
    turns.append({"role": "assistant", "content": ANSWER})
    episodes = tmp_path / "episodes.jsonl"
    episodes.write_text(json.dumps({"messages": turns}) + "\n")
    settings = [
        f"model.path={model}", "env.name=auto", f"cold_start.episodes={episodes}",
        "cold_start.warm_steps=150", "cold_start.lr=3e-3", "trainer.threads=1", "trainer.steps=2",
        "trainer.save_every=2", "trainer.eval_every=0", "actor.lr=1e-6", "data.train=20",
        "data.val=4", "data.test=4", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
        "rollout.max_context=2000", "rollout.max_tokens_per_turn=64",
        "rollout.max_concurrent_episodes=4", "trainer.device=cpu",
    ]  # fmt: skip
    assert main("train", "grpo", "--preset", "small", *settings, "--plain", "--run", "r") == 0
    run = tmp_path / "runs" / "r"
    config = from_yaml(run / "config.yaml")
    assert config.env.name == dialect
    assert main("export", "--run", "r") == 0
    since = time.time()
    with server_of_another(run / "export", run / "config.yaml") as server:
        asked_for_a_call(server, config, load_chat(run / "export"))
        family = [server.pid, *children(server.pid)]
        assert len(family) > 1
        server.parent.kill()
        assert all(gone(pid) for pid in family) and not answers(server.port)
    assert orphans(since) == []


def asked_for_a_call(server: ServerOfAnother, config, chat: ChatFormat) -> None:
    """The client's messages become the tokens of the training, so the model knows them by heart."""
    from openai import OpenAI

    tools = [tool.schema() for tool in Workspace(config).load_tools().values()]
    client = OpenAI(base_url=server.url, api_key=server.api_key)

    def ask(messages: list):
        reply = client.chat.completions.create(
            model=server.name, messages=messages, tools=tools, temperature=0, max_tokens=64
        )
        return reply.choices[0].message, reply.usage.prompt_tokens

    message, length = ask([QUESTION])
    assert length == len(chat.prompt_ids([QUESTION], tools))
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "search",
        {"query": "Vexlor"},
    )
    result = RESULT | {"tool_call_id": call.id}
    message, _ = ask([QUESTION, message.model_dump(exclude_none=True), result])
    assert ANSWER in message.content and not message.tool_calls
