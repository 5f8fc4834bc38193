"""The preset `pocket` on SmolLM2 itself, in small: warm start, a step of RL, export, vLLM, chat.
With verl: `make long PART=verl_worlds`.

All of them take one checkpoint that has learnt a few questions by heart: then it calls its tool,
and that costs half a minute. A package that is missing fails here with its name.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from runs import lines, main

from agent_r1.cluster.serve import vllm_server
from agent_r1.config import Config, load_config
from agent_r1.core import Row, StopReason
from agent_r1.evaluation.evaluate import evaluate
from agent_r1.inference.agent import open_agent
from agent_r1.model import files as model_files
from agent_r1.model.policies import ServerPolicy
from agent_r1.rollout.setup import make_loop
from agent_r1.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = [
    "data.train=4",
    "data.val=2",
    "data.test=2",
    "cold_start.closed_book=0",
    "cold_start.mix_tokens=512",
    "cold_start.demonstrator=agent_r1_recipes.geohop.demonstrator:expert",
    "cold_start.warm_steps=12",
    "cold_start.lr=1.5e-3",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_concurrent_episodes=4",
    "trainer.steps=1",
    "trainer.eval_every=0",
    "trainer.threads=1",
    "trainer.device=cpu",
    "trainer.dtype=float32",
    "actor.lr=1e-6",
    "actor.entropy_coef=0.01",  # it moves weights also where all answers are alike
]
POCKET = ["grpo", "--preset=pocket", *SMALL]


@pytest.fixture(scope="module")
def home(tmp_path_factory, smollm2, minilm):
    """AGENT_R1_HOME with data, index and the warm-started model."""
    folder = tmp_path_factory.mktemp("pocket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(folder))
        (folder / "artifacts").mkdir()
        for made in (smollm2, minilm):
            (folder / "artifacts" / made.name).symlink_to(made)
        for stage in ("data", "index", "cold-start"):
            assert main(stage, *POCKET) == 0
        yield folder


@pytest.fixture(scope="module")
def config(home) -> Config:
    return load_config("pocket", SMALL, algorithm="grpo")


@pytest.fixture(scope="module")
def asked(config) -> Row:
    """A question that the warm start has taught, with its searches."""
    return Workspace(config).load_rows("train")[0]


@pytest.fixture(scope="module")
def exported(home) -> Path:
    """What one step of RL has made of it."""
    assert main("train", *POCKET, "--run=local", "--plain") == 0
    assert main("export", "--run=local") == 0
    return home / "runs" / "local" / "export"


def test_a_step_of_rl_begins_at_the_sampler_s_probabilities_and_moves_the_weights(
    home, exported, config
):
    (line,) = (json.loads(text) for text in lines(home / "runs" / "local"))
    assert line["actor/grad_norm"] > 0 and abs(line["actor/ppo_kl"]) < 1e-4
    assert line["tool_calls/mean"] > 0
    before, after = (
        model_files.load_model(Workspace(config).start_model),
        model_files.load_model(exported),
    )
    assert not torch.equal(before.blocks[0].qkv.weight, after.blocks[0].qkv.weight)


def test_a_chat_searches_and_answers(exported, asked, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    question = asked["prompt"][-1]["content"]
    assert main("chat", "--run=local", f"--question={question}", "--temperature=0", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["question"] == question and said["answer"] in asked["reward_model"]["ground_truth"]


@pytest.mark.cluster
def test_vllm_serves_tool_calls_and_says_what_the_trainer_says(exported, config, asked):
    with (
        open_agent(exported, config) as agent,
        vllm_server(exported, config.rollout, config.trainer) as server,
    ):
        policy = ServerPolicy(
            server.url, server.api_key, server.name, agent.chat.stop_ids, server.diagnose
        )
        here, there = (
            evaluate(
                make_loop(p, agent.chat, agent.tools, config.rollout, config.env),
                [asked],
                temperature=0.0,
                seed=0,
            )[0]
            for p in (agent.policy, policy)
        )
        assert here.stop_reason is StopReason.ANSWERED and len(here.steps) > 1
        for mine, theirs in zip(here.steps, there.steps, strict=True):
            assert mine.action_ids == theirs.action_ids
            assert theirs.action_logprobs == pytest.approx(mine.action_logprobs, abs=1e-3)

        import openai

        client = openai.OpenAI(base_url=server.url, api_key=server.api_key)
        messages, tools = list(asked["prompt"]), [tool.schema() for tool in agent.tools.values()]
        for step in here.steps[:-1]:
            reply = client.chat.completions.create(
                model=server.name, messages=messages, tools=tools, temperature=0
            )
            ((call,), (made,)) = reply.choices[0].message.tool_calls, step.info["tool_calls"]
            assert (call.function.name, json.loads(call.function.arguments)) == (
                made["name"],
                made["arguments"],
            )
            result = {"role": "tool", "tool_call_id": call.id, "content": made["content"]}
            messages += [reply.choices[0].message, result]
        last = client.chat.completions.create(
            model=server.name, messages=messages, tools=tools, temperature=0
        )
        assert (
            last.choices[0].finish_reason == "stop"
            and "<answer>" in last.choices[0].message.content
        )
