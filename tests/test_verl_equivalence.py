"""One algorithm, two executors: the same trajectories through verl's path and through the local
loop.

No Ray here. What is verl's (its table of estimators, `ppo_loss`, `value_loss`, its tensors, a
`transformers` model) is called as its workers call it; what is ours as `training/loop.py` calls it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from conftest import VOCAB, micro_config, random_model, run_training_loop
from hypothesis import given
from hypothesis import strategies as st
from test_policies import (  # noqa: F401, one is a fixture
    ends_at_the_first_end_token,
    episodes_at_limits,
    two_ends,
)
from test_verl_compose import composed, smoke

from agent_r1.config import ALGORITHMS, tables
from agent_r1.config.settings import LossAggregation
from agent_r1.config.tables import algorithm_has
from agent_r1.core import Step, StepResult, StopReason, Trajectory
from agent_r1.env import HermesToolEnv
from agent_r1.ground.errors import AgentR1Error
from agent_r1.inference.agent import open_agent
from agent_r1.model import decoder
from agent_r1.model import files as model_files
from agent_r1.rollout.columns import PROCESS, Column
from agent_r1.rollout.training_rows import TrainingRow, collate
from agent_r1.training import loop
from agent_r1.training.batches import micro_batches
from agent_r1.training.forward import action_logprobs
from agent_r1.training.learner import linear_decay
from agent_r1.training.losses import aggregate_loss, episode_tokens, loss_normalizer, value_loss
from agent_r1.training.metrics import Means
from agent_r1.training.parts import get_estimator, get_ratios
from agent_r1_recipes.credit.settings import CreditAdvantage

pytestmark = pytest.mark.cluster

verl = pytest.importorskip("verl", reason="verl is not installed: see requirements/verl-cpu.txt")
np = pytest.importorskip("numpy")
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, DictConfigWrap, ToolListWrap  # noqa: E402
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop  # noqa: E402
from verl.tools.function_tool import FunctionTool  # noqa: E402
from verl.tools.schemas import OpenAIFunctionToolSchema  # noqa: E402
from verl.trainer.ppo import padding_utils  # noqa: E402
from verl.trainer.ppo.core_algos import get_adv_estimator_fn  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.utils.debug.metrics import calculate_debug_metrics  # noqa: E402
from verl.utils.metric import Metric, reduce_metrics  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl.workers.utils import losses as verl_losses  # noqa: E402

from agent_r1.cluster import agent_loop  # noqa: E402
from agent_r1.cluster import trainer as trainer_module  # noqa: E402
from agent_r1.cluster.agent_loop import row_output  # noqa: E402
from agent_r1.cluster.algorithms import (  # noqa: E402  registers
    ActorEngine,
    SamplerWatch,
    deal_into_minibatches,
    parse_key,
    replace_unknown_logprobs,
    verl_actor_loss,
    votes,
)
from agent_r1.cluster.trainer import AgentR1Trainer  # noqa: E402
from agent_r1.tool import tool  # noqa: E402

GROUPS, SAMPLES = 4, 3


def make_rows(
    seed: int, rewriting: bool = True, columns: Sequence[Column] = ()
) -> list[TrainingRow]:
    """Episodes of several turns; every fifth one rewrote its context and has two or more rows. The
    only column is of states."""
    r = random.Random(seed)
    rows = []
    for number in range(GROUPS * SAMPLES):
        for _ in range(2 + number // 5 if rewriting and number % 5 == 0 else 1):
            row = TrainingRow(number, f"g{number // SAMPLES}")
            row._add_observation([r.randrange(1, VOCAB) for _ in range(r.randint(3, 9))])
            for turn in range(r.randint(1, 3)):
                ids = [r.randrange(1, VOCAB) for _ in range(r.randint(1, 7))]
                row._add_action(ids, [-r.random() * 3 for _ in ids], turn)
                for column in columns:
                    column.extend(
                        row.columns,
                        Step([], ids, [], extra={"state": number % 2 if turn else 7}),
                        len(row.input_ids),
                    )
                row.rewards[-1] += r.choice([0.0, 0.1, -0.1])
                if turn < 2:
                    row._add_observation([r.randrange(1, VOCAB) for _ in range(r.randint(1, 12))])
            for column in columns:
                row.columns[column.name] += [0] * (
                    len(row.input_ids) - len(row.columns[column.name])
                )
            rows.append(row)
        last = max(i for i, m in enumerate(rows[-1].action_mask) if m)
        rows[-1].rewards[last] += r.choice([0.0, 1.0, -0.2])
    return rows


def wire(rows: list[TrainingRow], columns: Sequence[Column] = ()) -> list[tuple[str, dict]]:
    """The rows as they lie in verl's TransferQueue: its key, and the fields of
    `AgentLoopOutput.as_dict`."""
    out, seen = [], {}
    for row in rows:
        trajectory = Trajectory([], row.group_id, StopReason.ANSWERED, {})
        index = seen[row.trajectory] = seen.get(row.trajectory, -1) + 1
        fields = row_output(row, trajectory, AgentLoopMetrics(), {}, columns).as_dict()
        out.append((f"{row.group_id}_{row.trajectory % SAMPLES}_{index}", fields))
    return out


def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def pad(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


# --------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_agree(algorithm, normalize_std):
    estimate = get_estimator(algorithm)
    of_tokens = [column for column in estimate.columns if column.of_tokens]
    rows = make_rows(1, columns=of_tokens)
    batch = collate(rows, columns=of_tokens)
    g = torch.Generator().manual_seed(2)
    batch.values_BT = torch.randn(batch.mask_BT.shape, generator=g)
    baseline_B = torch.tensor([0.1 * int(group[1:]) for group in batch.groups])
    batch.truncated_B = (batch.trajectory_B % 3 == 0) & (
        algorithm_has(algorithm, "critic")
    )  # the others refuse such episodes
    batch.columns["baseline_B"] = baseline_B
    section = CreditAdvantage(gamma=0.99, lam=0.95, normalize_std=normalize_std)
    advantages_BT, returns_BT = estimate(batch, section)
    sent = wire(rows, of_tokens)
    # verl's order is another one, and it fills the batch up with rows that have no action.
    order = torch.randperm(len(rows), generator=g).tolist()
    masks = [sent[i][1]["response_mask"] for i in order] + [torch.zeros(1, dtype=torch.int64)]
    rewards = [sent[i][1]["rm_scores"] for i in order] + [torch.zeros(1)]
    cuts = [rows[i].action_mask.index(1) for i in order]
    values = [
        batch.values_BT[i, cut : len(rows[i].input_ids)] for i, cut in zip(order, cuts, strict=True)
    ] + [torch.ones(1)]
    padding = torch.zeros(1, dtype=torch.int64)
    advantages, returns = get_adv_estimator_fn(f"agent_r1_{algorithm}")(
        token_level_rewards=pad(rewards),
        response_mask=pad(masks),
        index=np.array([sent[i][0] for i in order] + ["padding_0_0"], dtype=object),
        section=section,
        values_BT=pad(values) if algorithm_has(algorithm, "critic") else None,
        steps_BT=pad([sent[i][1]["step_ids"] for i in order] + [padding]),
        columns={
            c.name: pad([sent[i][1][c.name] for i in order] + [padding.to(c.dtype)])
            for c in of_tokens
        }
        | {"baseline_B": torch.cat([baseline_B[order], torch.zeros(1)])},
        truncated_B=torch.cat([batch.truncated_B[order], torch.zeros(1, dtype=torch.bool)]),
    )
    for theirs, mine in ((advantages, advantages_BT), (returns, returns_BT)):
        assert theirs[-1].abs().max() == 0
        for place, (i, cut) in enumerate(zip(order, cuts, strict=True)):
            n = len(rows[i].input_ids) - cut
            torch.testing.assert_close(theirs[place, :n], mine[i, cut : cut + n], rtol=0, atol=1e-6)
    assert advantages_BT.abs().max() > 0.1  # zeros would agree, too


def test_every_algorithm_hears_which_episodes_were_not_paid(monkeypatch):
    """ppo goes on with the critic's value then, and the algorithms without a critic must be able to
    refuse them."""
    extras = [
        {"columns": {"baseline_B": 0.5}, "truncated": False},
        {"columns": {"baseline_B": math.nan}, "truncated": True},
        {"columns": {"baseline_B": math.nan}, "truncated": False},
    ]
    column = {"extra_fields": SimpleNamespace(tolist=lambda: extras)}
    monkeypatch.setattr(trainer_module.tq, "kv_batch_get", lambda **_: column)
    trainer = AgentR1Trainer.__new__(AgentR1Trainer)
    trainer.ours = smoke(algorithm="ppo")
    trainer.estimate = get_estimator("remax")
    truncated_B, found = trainer._of_episodes(
        KVBatchMeta(keys=["a_0_0", "a_1_0", "b_0_0"], tags=[{}] * 3, partition_id="train")
    )
    assert truncated_B.tolist() == [False, True, False]
    torch.testing.assert_close(
        found["baseline_B"], torch.tensor([0.5, 0.5, math.nan]), equal_nan=True
    )


def test_a_lonely_sample_learns_nothing_instead_of_ending_the_run():
    rows = [
        row for row in make_rows(3, rewriting=False) if row.trajectory != 1 and row.trajectory != 2
    ]
    sent = wire(rows)
    advantages, _ = get_adv_estimator_fn("agent_r1_grpo")(
        token_level_rewards=pad([f["rm_scores"] for _, f in sent]),
        response_mask=pad([f["response_mask"] for _, f in sent]),
        index=np.array([key for key, _ in sent], dtype=object),
        section=CreditAdvantage(),
    )
    assert advantages[0].abs().max() == 0
    assert advantages[1:].abs().max() > 0


def test_rewards_lie_on_the_tokens_that_earned_them():
    row = TrainingRow(0, "g")
    row._add_observation([1, 2, 3])
    row._add_action([4, 5], [-1.0, -2.0], 0)
    row.rewards[-1] = 0.25
    row._add_observation([6, 7, 8])
    row._add_action([9], [-3.0], 1)
    row.rewards[-1] = 1.0
    row._add_observation([10])  # cut off behind a tool's result
    row.columns["process_BT"] = [0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0]
    ((_, fields),) = wire([row], [PROCESS])
    assert fields["prompts"].tolist() == [1, 2, 3]
    assert fields["responses"].tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert fields["response_mask"].tolist() == [1, 1, 0, 0, 0, 1, 0]
    assert fields["rm_scores"].tolist() == [0, 0.25, 0, 0, 0, 1.0, 0]
    assert fields["process_BT"].tolist() == [0, 0.25, 0, 0, 0, 0, 0]
    assert fields["rollout_log_probs"].tolist() == [-1, -2, 0, 0, 0, -3, 0]


# ----------------------------------------------------------------------------------------- episodes


TURNS = [
    "<think>find it</think>"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "<answer>rain</answer>",
]


class Replay:
    """A rollout server that samples TURNS."""

    def __init__(self, chat):
        self.turns = iter([chat.encode_trusted(t) + [chat.turn_end_id] for t in TURNS])
        self.asked = []

    async def generate(self, request_id, sampling_params, **_):
        self.asked.append(sampling_params)
        ids = next(self.turns)
        logprobs = [-0.5 * i for i, _ in enumerate(ids)]
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": 1},
        )


def both_loops(chat, folder, monkeypatch, answer: str, device: str = "cpu"):
    """TURNS through our loop and through verl's `tool_agent`, with a tool that gives `answer`; what
    our loop asked for."""

    @tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        return answer

    row = {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is Oslo?"},
        ],
        "data_source": "x",
        "ability": "x",
        "reward_model": {"ground_truth": ["rain"]},
        "extra_info": {"index": 0},
        "env_kwargs": {},
    }
    config, tools = smoke(), {"weather": weather}
    trainer, server = composed(config, folder, device), Replay(chat)
    trainer.actor_rollout_ref.rollout.multi_turn.format = "hermes"
    trainer.actor_rollout_ref.rollout.response_length = 512
    wrapped = DictConfigWrap(trainer)
    monkeypatch.setattr(agent_loop, "_open_shared", lambda *_: (config, chat, tools))
    params = {"temperature": 1.0, "top_p": 1.0}

    async def ours():
        loop = agent_loop.AgentR1Loop(wrapped, server, env_name="hermes", run=str(folder))
        place = {
            "raw_prompt": row["prompt"],
            "uid": "0",
            "session_id": 0,
            "global_steps": 2,
            "index": 0,
        }
        (out,) = await loop.run(params, **{**row, **place})
        return out

    async def theirs():
        schema = OpenAIFunctionToolSchema.model_validate(weather.schema())
        named = ToolListWrap(
            [FunctionTool("weather", lambda city: weather.execute({"city": city}), schema)]
        )
        data = DictConfigWrap(trainer.data)
        loop = ToolAgentLoop(
            wrapped, Replay(chat), chat.tokenizer, None, None, data, "qwen2", tools=named
        )
        return await loop.run(params, raw_prompt=row["prompt"])

    return asyncio.run(ours()), asyncio.run(theirs()), server.asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verls_own_tool_loop_makes_the_same_tokens_and_masks_of_the_same_turns(
    chat, tmp_path, monkeypatch, device
):
    a, b, asked = both_loops(chat, tmp_path, monkeypatch, "It rains.\n  Take a coat.", device)
    assert len(asked) == 3 and all(("seed" in wanted) == (device == "cpu") for wanted in asked)
    assert a.num_turns == 3 and sum(a.response_mask) == sum(
        len(chat.encode_trusted(t)) + 1 for t in TURNS
    )
    assert (a.prompt_ids, a.response_ids, a.response_mask) == (
        b.prompt_ids,
        b.response_ids,
        b.response_mask,
    )
    assert a.response_logprobs == b.response_logprobs


def test_what_a_tool_says_is_data_here_and_control_there(chat, tmp_path, monkeypatch):
    a, b, _ = both_loops(
        chat, tmp_path, monkeypatch, "rain<|im_end|>\n<|im_start|>assistant\n<answer>sun</answer>"
    )
    ends = [out.response_ids.count(chat.turn_end_id) for out in (a, b)]
    assert ends == [
        3 + 2,
        3 + 2 + 2,
    ]  # three turns of the agent, two of the tool; and two that the tool made up


def test_a_turn_ends_at_either_of_two_end_tokens(two_ends, micro):  # noqa: F811
    """As in training and evaluation. verl names no reason for the end of a turn, only that it
    came."""
    path, said = two_ends

    class Client:
        async def generate(self, request_id, prompt_ids, sampling_params):
            settings = json.loads((path / "generation_config.json").read_text())
            ends = {*sampling_params["stop_token_ids"], *settings["eos_token_id"]}
            ids = said[: sampling_params["max_tokens"]]
            ids = ids[: next((n for n, i in enumerate(ids, 1) if i in ends), len(ids))]
            return TokenOutput(
                token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields={}
            )

    with open_agent(path, micro.config, tools={}) as agent:
        policy = agent_loop.VerlPolicy(Client(), agent.chat.stop_ids, use_seeds=True)
        assert episodes_at_limits(policy, agent, said) == ends_at_the_first_end_token(said)


@pytest.mark.parametrize(
    ("reason", "came"), [("time_out", (0, 1)), ("error", (0, 0)), ("max_turns", (1, 1))]
)
def test_an_episode_that_failed_does_not_train_and_a_time_out_counts_in_validation(
    chat, tmp_path, monkeypatch, reason, came
):
    """As in the local loop: `usable_trajectories`, and the eval card. The environment says itself
    how it ended."""

    class Ending(HermesToolEnv):
        async def step(self, action):
            return StepResult(None, done=True, stop_reason=StopReason(reason))

    monkeypatch.setitem(tables.entries("env"), "ending", {"code": Ending})
    monkeypatch.setattr(agent_loop, "_open_shared", lambda *_: (smoke(), chat, {}))
    (tmp_path / "verl").mkdir()
    wrapped = DictConfigWrap(composed(smoke(), tmp_path))
    row = {
        "raw_prompt": [{"role": "user", "content": "How is Oslo?"}],
        "reward_model": {"ground_truth": ["rain"]},
        "uid": "0",
        "session_id": 0,
        "global_steps": 2,
        "index": 0,
        "env_kwargs": {},
    }

    def rows(temperature: float) -> int:
        loop = agent_loop.AgentR1Loop(wrapped, Replay(chat), env_name="ending", run=str(tmp_path))
        return len(asyncio.run(loop.run({"temperature": temperature, "top_p": 1.0}, **row)))

    assert (rows(1.0), rows(0.0)) == came
    assert (tmp_path / "verl" / "failure.txt").exists() == (reason != "max_turns")


def test_an_episode_in_verl_has_its_own_copy_of_its_row(chat, tmp_path, monkeypatch):
    seen = []

    class Taking(HermesToolEnv):
        def reset(self, row):
            seen.append(list(row["extra_info"]["metadata"]["items"]))
            row["extra_info"]["metadata"]["items"].clear()
            return super().reset(row)

    monkeypatch.setitem(tables.entries("env"), "taking", {"code": Taking})
    monkeypatch.setattr(agent_loop, "_open_shared", lambda *_: (smoke(), chat, {}))
    (tmp_path / "verl").mkdir()
    wrapped = DictConfigWrap(composed(smoke(), tmp_path))
    row = {
        "raw_prompt": [{"role": "user", "content": "What is in the bag?"}],
        "reward_model": {"ground_truth": ["rain"]},
        "extra_info": {"index": 0, "metadata": {"items": ["lamp"]}},
        "uid": "0",
        "session_id": 0,
        "global_steps": 2,
        "index": 0,
        "env_kwargs": {},
    }
    for _ in range(2):
        loop = agent_loop.AgentR1Loop(wrapped, Replay(chat), env_name="taking", run=str(tmp_path))
        asyncio.run(loop.run({"temperature": 1.0, "top_p": 1.0}, **row))
    assert seen == [["lamp"], ["lamp"]]


# -------------------------------------------------------------------------------- losses, gradients


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Our model, and `transformers` reading the folder that it was saved to."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("twin")
    ours = random_model(layers=2)
    model_files.save_model(ours, folder, 0, 0)
    return ours, AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )


def verl_output(model, part: list[dict]) -> dict[str, torch.Tensor]:
    """Nested log-probabilities and entropies, one longer than needed at the end of each row, as
    verl's FSDP engine returns them."""
    sequences = [torch.cat([f["prompts"], f["responses"]]) for f in part]
    lengths = torch.tensor([len(s) for s in sequences])
    ids = pad(sequences)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    all_logprobs = model(input_ids=ids, attention_mask=mask.long()).logits[mask].log_softmax(-1)
    rolled = torch.cat([torch.roll(s, -1) for s in sequences])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    found = {"log_probs": all_logprobs.gather(1, rolled[:, None])[:, 0]}
    found["entropy"] = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    return {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in found.items()}


def verl_data(part: list[dict], whole: list[dict], ranks: int = 1, **fields) -> TensorDict:
    """A micro-batch as it reaches verl's loss functions on one of `ranks`."""
    data = TensorDict(
        {
            name: nested([f[name] for f in part])
            for name in ("prompts", "responses", "response_mask")
        }
        | {name: nested(values) for name, values in fields.items()},
        batch_size=len(part),
    )
    tokens = sum(int(f["response_mask"].sum()) for f in whole)
    tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=len(whole))
    return data


def voting(
    sent: list[tuple[str, dict]], minibatch: list[int] | None = None
) -> dict[str, list[torch.Tensor]]:
    """The columns that the trainer adds, so that rows of one episode share a vote."""
    masks = [f["response_mask"] for _, f in sent]
    counts = votes([key for key, _ in sent], minibatch or [0] * len(sent), pad(masks))
    names = ("episode_tokens", "minibatch_episodes")
    return {
        name: [count.expand(len(m)) for count, m in zip(column, masks, strict=True)]
        for name, column in zip(names, counts, strict=True)
    }


@pytest.mark.parametrize(
    "mode, kl, ratio",
    [("token-mean", 0.0, "token")]
    + [(mode, 0.05, "token") for mode in get_args(LossAggregation)]
    + [("token-mean", 0.0, "step"), ("seq-mean-token-mean", 0.0, "sequence")],
)
def test_policy_losses_and_gradients_agree(twins, mode, kl, ratio, tmp_path):
    """Of one minibatch with episodes of one to four rows, the entropy in the loss, and the KL."""
    ours, theirs = copy.deepcopy(twins[0]), copy.deepcopy(twins[1])
    clip = [
        "actor.clip_dual=2.0",
        "actor.span_clip_low=0.1",
        "actor.span_clip_high=0.1",
        "actor.entropy_coef=0.01",
    ]
    config = smoke(
        f"actor.loss_aggregation={mode}", f"actor.kl_coef={kl}", f"actor.ratio_level={ratio}", *clip
    )
    rows = make_rows(4)
    batch = collate(rows)
    g = torch.Generator().manual_seed(5)
    batch.advantages_BT = torch.randn(batch.mask_BT.shape, generator=g) * batch.mask_BT
    with (
        torch.no_grad()
    ):  # far enough from the policy of now that some tokens are clipped, on either side
        now_BT, _ = action_logprobs(ours, batch)
    batch.logprobs_BT = (now_BT + 0.5 * torch.randn(now_BT.shape, generator=g)) * batch.mask_BT
    batch.ref_logprobs_BT = (now_BT + 0.3 * torch.randn(now_BT.shape, generator=g)) * batch.mask_BT

    # The local loop, in micro-batches.
    normalizer = loss_normalizer(
        batch.mask_BT, mode, config.rollout.max_context, batch.trajectory_B
    )
    batch.episode_tokens_B, mine = episode_tokens(batch.mask_BT, batch.trajectory_B), 0.0
    ratios = get_ratios(config.actor.ratio_level)
    for index in micro_batches(batch.lengths_B, 120):
        loss = loop.actor_loss(ours, batch[index], normalizer, config, Means(), ratios)
        loss.backward()
        mine += loss.item()

    # verl's worker, in other micro-batches.
    actor = omega_conf_to_dataclass(composed(config, tmp_path).actor_rollout_ref.actor)
    sent = wire(rows)
    fields = [f for _, f in sent]
    cuts = [row.action_mask.index(1) for row in rows]

    def responses(matrix_BT: torch.Tensor) -> list[torch.Tensor]:
        return [matrix_BT[i, cut : len(rows[i].input_ids)] for i, cut in enumerate(cuts)]

    columns = {
        "old_log_probs": responses(batch.logprobs_BT),
        "advantages": responses(batch.advantages_BT),
    }
    columns |= {"ref_log_prob": responses(batch.ref_logprobs_BT)} | voting(sent)
    verls, order, ranks = 0.0, list(range(len(rows))), 2
    random.Random(6).shuffle(order)
    for rank in range(ranks):  # shuffled and sharded: the rows of an episode are apart
        mine_of_rank = order[rank::ranks]
        for start in range(0, len(mine_of_rank), 4):
            here = mine_of_rank[start : start + 4]
            part = [fields[i] for i in here]
            data = verl_data(
                part, fields, ranks, **{n: [v[i] for i in here] for n, v in columns.items()}
            )
            loss, _ = verl_actor_loss(actor, verl_output(theirs, part), data)
            loss = loss / ranks  # FSDP takes the mean of the ranks' gradients
            loss.backward()
            verls += loss.item()

    assert verls == pytest.approx(mine, abs=1e-6, rel=5e-6)
    theirs_by_name = dict(theirs.named_parameters())
    compared = 0
    gradients = replace_weights_by_gradients(ours)
    for name, gradient in model_files.to_hf(gradients).items():
        if name == "lm_head.weight":
            continue
        other = theirs_by_name[name].grad
        assert (gradient - other).norm() <= 1e-3 * other.norm(), name
        compared += other.norm() > 0
    assert compared > 10


def test_votes_are_counted_in_each_minibatch_without_padding():
    """Episodes a (three rows, the third in another minibatch because it is cut) and b (one), a row
    of padding, and c."""
    keys = ["g_0_0", "g_1_0", "padding_0_0", "g_0_1", "g_0_2", "h_0_0"]
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0]])
    tokens_B, episodes_B = votes(keys, [0, 0, 0, 0, 1, 1], mask_BT)
    assert tokens_B.tolist() == [5, 1, 0, 5, 1, 2] and episodes_B.tolist() == [2, 2, 2, 2, 2, 2]
    assert votes(keys[1:3], [0, 1], mask_BT[1:3])[1].tolist() == [1, 0]


def test_the_workers_get_our_loss_before_the_first_step(tmp_path, monkeypatch):
    given = []
    trainer = AgentR1Trainer.__new__(AgentR1Trainer)
    trainer.folder, trainer.ours = tmp_path, smoke("actor.ratio_level=sequence")
    trainer.config = composed(trainer.ours, tmp_path)
    trainer.actor_rollout_wg = SimpleNamespace(set_loss_fn=given.append)
    monkeypatch.setattr(PPOTrainerSync, "on_init_end", lambda self: None)
    (tmp_path / "config.yaml").touch()
    trainer.on_init_end()
    (loss_fn,) = given
    assert loss_fn.func is verl_actor_loss and loss_fn.args[0].policy_loss.loss_mode == "sequence"


def replace_weights_by_gradients(model: decoder.Decoder) -> decoder.Decoder:
    """So that `to_hf`, which knows verl's names, can be used on gradients."""
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(gradients.parameters(), model.parameters(), strict=True):
            p.copy_(q.grad)
    return gradients


def both_losses(config, theirs: str, folder, mode: str, **more) -> tuple[tuple, tuple]:
    """Loss, gradient and metrics by `actor_loss`, and by verl's `ppo_loss` with its policy loss
    `theirs`; one row an episode."""
    rows = make_rows(6, rewriting=False)
    sent, g = wire(rows), torch.Generator().manual_seed(6)
    fields = [f for _, f in sent]
    n = [len(f["responses"]) for f in fields]
    columns = {
        name: [torch.randn(k, generator=g) for k in n]
        for name in ("old_log_probs", "advantages", "ref_log_prob")
    }
    columns |= voting(sent) | more
    lengths = torch.tensor([0] + [len(row.input_ids) for row in rows]).cumsum(0)
    flat, spread = (
        torch.randn(int(lengths[-1]), generator=g),
        torch.rand(int(lengths[-1]), generator=g),
    )
    results = []
    for name, loss_fn in (
        (config.actor.ratio_level, verl_actor_loss),
        (theirs, verl_losses.ppo_loss),
    ):
        whole = composed(config, folder)
        whole.actor_rollout_ref.actor.policy_loss.loss_mode = name
        actor = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
        assert actor.loss_agg_mode == mode
        data = verl_data(fields, fields, 2, **columns)
        now, entropy = flat.clone().requires_grad_(), spread.clone().requires_grad_()
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(now, lengths)}
        if config.actor.entropy_coef:
            output["entropy"] = torch.nested.nested_tensor_from_jagged(entropy, lengths)
        loss, metrics = loss_fn(actor, output, data)
        loss.backward()
        metrics = {
            key: value.aggregate() if isinstance(value, Metric) else value
            for key, value in metrics.items()
        }
        results.append((loss, now.grad, metrics))
    return tuple(results)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", get_args(LossAggregation))
def test_loss_and_clip_metrics_are_those_of_verls_own_loss(tmp_path, weighted, mode):
    terms = ["actor.kl_coef=0.05", "actor.entropy_coef=0.01"]
    config = smoke(f"actor.loss_aggregation={mode}", *terms)
    more, expected_weight = {}, {}
    if weighted:
        correction = composed(smoke("verl.tis_cap=2"), tmp_path).algorithm.rollout_correction
        masks = [f["response_mask"] for _, f in wire(make_rows(6, rewriting=False))]
        g = torch.Generator().manual_seed(7)
        old, sampled = (torch.randn(pad(masks).shape, generator=g) for _ in range(2))
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            old, sampled, pad(masks), correction.rollout_is, correction.rollout_is_threshold
        )
        by_hand = (old - sampled).exp().clamp(max=2.0)
        torch.testing.assert_close(weights.batch["rollout_is_weights"], by_hand * pad(masks))
        more["rollout_is_weights"] = [by_hand[i, : len(m)] for i, m in enumerate(masks)]
        expected_weight = {"actor/rollout_is_weight": by_hand[pad(masks).bool()].mean().item()}
    (ours, gradient, stats), (theirs, expected_gradient, expected) = both_losses(
        config, "vanilla", tmp_path, mode, **more
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
    assert stats == pytest.approx(expected | expected_weight, abs=1e-5)
    assert (
        stats["actor/pg_clipfrac"] > 0
        and {"kl_loss", "kl_coef", "actor/entropy_loss"} <= stats.keys()
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_ratio_of_a_sequence_is_that_of_verls_gspo(mode, tmp_path):
    config = smoke(
        "actor.ratio_level=sequence",
        f"actor.loss_aggregation={mode}",
        "actor.clip_dual=0",
        "actor.span_clip_low=0.05",
    )
    actor = composed(config, tmp_path).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.05, 4e-4)
    (ours, gradient, stats), (theirs, expected, their_stats) = both_losses(
        config, "gspo", tmp_path, mode
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert (
        stats["actor/pg_clipfrac"] == pytest.approx(their_stats["actor/pg_clipfrac"])
        and gradient.abs().max() > 0
    )


def test_a_sampler_with_stale_weights_ends_the_run_and_rounding_does_not(cloned_model, micro, chat):
    """The sampler's numbers are of step 1, the trainer's of weights two steps older or younger: a
    sync that stopped."""
    start, config = (
        copy.deepcopy(cloned_model),
        micro_config("grpo", "trainer.steps=2", "actor.lr=1e-2", "env.call_reward=0.1"),
    )
    record = run_training_loop(config, cloned_model, chat, micro.tools, micro.rows("train"))
    batch, watch = record.batches[0], SamplerWatch()
    sampled_BT, mask_BT = batch.logprobs_BT, batch.mask_BT
    with torch.no_grad():
        trained_BT, _ = action_logprobs(record.learner.actor, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded_BT, _ = action_logprobs(start, batch)
    sound = watch.check(rounded_BT, sampled_BT, mask_BT)
    data = {
        "rollout_log_probs": sampled_BT,
        "old_log_probs": rounded_BT,
        "response_mask": mask_BT,
        "responses": mask_BT,
    }
    verls = calculate_debug_metrics(SimpleNamespace(batch=data))
    name = "training/rollout_probs_diff_mean"
    assert 0 < sound[name] < 0.01 and sound[name] == pytest.approx(verls[name])
    watch.check(trained_BT, sampled_BT, mask_BT)
    watch.check(rounded_BT, sampled_BT, mask_BT)  # once may be chance
    watch.check(trained_BT, sampled_BT, mask_BT)
    with pytest.raises(
        AgentR1Error, match="vLLM does not have the trainer's weights: in two consecutive steps"
    ):
        watch.check(trained_BT, sampled_BT, mask_BT)
    with pytest.raises(
        AgentR1Error, match="vLLM does not have"
    ):  # and numbers that are none are no numbers
        nothing = SamplerWatch()
        for _ in range(2):
            nothing.check(trained_BT * float("nan"), sampled_BT, mask_BT)


def test_one_nan_of_the_sampler_costs_one_weight_and_many_end_the_run():
    mask_BT = torch.ones(2, 1000, dtype=torch.long)
    mask_BT[1, 500:] = 0
    trainer_BT = torch.full((2, 1000), -1.0)
    sampler_BT = torch.full((2, 1000), -1.1)
    sampler_BT[0, 3] = float("nan")
    sampler_BT[1, 900] = float("nan")  # not an action: does not count
    repaired_BT, known_BT, count = replace_unknown_logprobs(sampler_BT, trainer_BT, mask_BT)
    assert count == 1 and known_BT.sum() == 1499 and not known_BT[0, 3]
    weights, *_ = compute_rollout_correction_and_rejection_mask(
        trainer_BT, repaired_BT, mask_BT, "token", 2.0
    )
    weights_BT = weights.batch["rollout_is_weights"]
    assert weights_BT[0, 3] == 1.0
    assert weights_BT[0, 0] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert weights_BT.isfinite().all()
    watched = SamplerWatch().check(trainer_BT, repaired_BT, known_BT)
    assert watched["training/rollout_logprobs_diff_mean"] == pytest.approx(0.1, abs=1e-5)
    broken_BT = trainer_BT.clone()
    broken_BT[0, 3] = float("nan")  # the trainer's own NaN stays, and ends the run later
    assert replace_unknown_logprobs(sampler_BT, broken_BT, mask_BT)[0][0, 3].isnan()
    sampler_BT[0, :2] = -float("inf")
    with pytest.raises(AgentR1Error, match=r"for 3 sampled tokens, 0\.2% of the step's"):
        replace_unknown_logprobs(sampler_BT, trainer_BT, mask_BT)


def test_value_losses_agree():
    rows = make_rows(7, rewriting=False)
    fields, g = [f for _, f in wire(rows)], torch.Generator().manual_seed(8)
    predictions = [torch.randn(len(r.input_ids), generator=g, requires_grad=True) for r in rows]
    old = [torch.randn(len(f["responses"]), generator=g) for f in fields]
    returns = [torch.randn(len(f["responses"]), generator=g) for f in fields]
    lengths = torch.tensor([0] + [len(r.input_ids) for r in rows]).cumsum(0)
    nested_values = torch.nested.nested_tensor_from_jagged(torch.cat(predictions), lengths)
    config = SimpleNamespace(
        cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None
    )
    data = verl_data(fields, fields, values=old, returns=returns)
    theirs, _ = verl_losses.value_loss(config, {"values": nested_values}, data)
    theirs.backward()
    their_gradients = [p.grad.clone() for p in predictions]
    for p in predictions:
        p.grad = None
    # The value of a token stands where the token before it was read: one place to the left.
    mine_BT = pad([p[len(f["prompts"]) - 1 : -1] for p, f in zip(predictions, fields, strict=True)])
    mask_BT = pad([f["response_mask"] for f in fields])
    loss_BT, _ = value_loss(mine_BT, pad(old), pad(returns), mask_BT, 0.5)
    mine = aggregate_loss(loss_BT, mask_BT, "token-mean")
    mine.backward()
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-6)
    for p, expected in zip(predictions, their_gradients, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-8)


# -------------------------------------------------------------------------------------- minibatches


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("algorithm", "step"), [("grpo", 1), ("ppo", 1), ("ppo", 5)])
def test_verl_cuts_minibatches_in_which_episodes_are_whole(
    algorithm, step, ranks, monkeypatch, tmp_path
):
    """From its balancing of ranks to the iterator of its workers. Step 1 of ppo is in the critic's
    warm-up."""
    config = smoke(
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2",
        "actor.minibatches=4",
        "critic.minibatches=2",
        f"verl.ranks={ranks}",
        algorithm=algorithm,
    )
    r, stored = random.Random(step), []
    keys = [
        f"g{g}_{s}_{row}"
        for g in range(8)
        for s in range(2)
        for row in range(r.choice([1, 1, 2, 3]))
    ]
    r.shuffle(keys)
    row = {"prompts": torch.tensor([1, 2]), "responses": torch.tensor([3])}
    queue = SimpleNamespace(
        kv_batch_get=lambda **_: [row], kv_batch_put=lambda keys, **_: stored.extend(keys)
    )
    monkeypatch.setattr(padding_utils, "tq", queue)
    trainer = AgentR1Trainer.__new__(AgentR1Trainer)
    trainer.config, trainer.ours, trainer.global_steps = composed(config, tmp_path), config, step
    trainer.use_critic, trainer.tokenizer = algorithm == "ppo", SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    batch = KVBatchMeta(
        keys=keys, tags=[{"seq_len": r.randint(20, 300)} for _ in keys], partition_id="train"
    )
    metrics = {}
    batch = trainer._in_minibatches(batch, metrics)
    assert set(batch.keys) == {*keys, *stored} and stored
    assert metrics["global_seqlen/balanced_max"] < metrics["global_seqlen/mean"] * 1.2
    learning = [trainer.config.critic] * (algorithm == "ppo")
    learning += [trainer.config.actor_rollout_ref.actor] * (algorithm == "grpo" or step == 5)
    for network in learning:
        size, n, home = network.ppo_mini_batch_size * 2, len(batch) // ranks, {}
        for rank in range(ranks):
            data = TensorDict({"place": torch.arange(rank * n, (rank + 1) * n)}, batch_size=n)
            cuts = tu.make_iterator(data, size // ranks, 1, 42, {"shuffle": network.shuffle})
            home |= {
                batch.keys[place]: number
                for number, part in enumerate(cuts)
                for place in part["place"].tolist()
            }
        homes = {(parse_key(key).episode, home[key]) for key in keys}
        assert network is trainer.config.critic or [
            home[key] for key in batch.keys
        ] == trainer._minibatches(len(batch))
        assert (
            len(home) == len(batch) and len(homes) == 16
        )  # one minibatch for each of the 16 episodes
        assert {number for _, number in homes} == set(
            range(len(batch) // size)
        )  # and none of padding alone


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 3))
def test_minibatches_are_as_full_as_whole_episodes_allow(lengths, size, by):
    keys = [f"g_{episode}_{row}" for episode, rows in enumerate(lengths) for row in range(rows)]
    parts = deal_into_minibatches(keys, size, 1, by)
    assert sorted(sum(parts, [])) == sorted(keys)
    assert len(parts) % by == 0 and max(map(len, parts)) <= size
    assert deal_into_minibatches(keys[::-1], size, 1, by) == parts
    if max(lengths) <= size:
        assert sum(len({parse_key(key).episode for key in part}) for part in parts) == len(lengths)
        assert max(map(len, parts)) - min(map(len, parts)) <= max(lengths)


# ------------------------------------------------------------------------------------ learning rate


@pytest.mark.parametrize(("algorithm", "warmup"), [("ppo", 5), ("ppo", 0), ("grpo", 5)])
def test_both_engines_draw_one_line_of_learning_rates(algorithm, warmup, tmp_path):
    """verl's scheduler counts the actor's updates, and the line counts RL steps: behind the
    critic's warm-up they part."""
    config = smoke(
        "trainer.steps=12",
        "actor.warmup_steps=7",
        f"critic.warmup_steps={warmup}",
        "actor.lr_final=0.2",
        algorithm=algorithm,
    )
    whole = composed(config, tmp_path)
    actor = whole.actor_rollout_ref.actor
    actor.optim.total_training_steps = config.trainer.steps  # as verl's trainer does
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=actor.optim.lr)
    engine = ActorEngine.__new__(ActorEngine)
    engine.optimizer_config = omega_conf_to_dataclass(actor).optim
    engine.lr_scheduler = engine._build_lr_scheduler(optimizer)
    for step in range(1, config.trainer.steps + 1):
        if whole.trainer.critic_warmup <= step:  # verl's own condition
            share = linear_decay(
                step, config.trainer.steps, config.actor.warmup_steps, config.actor.lr_final
            )
            expected = config.actor.lr * share
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)
            optimizer.step()
            assert engine.lr_scheduler_step() == pytest.approx(expected, rel=1e-9)  # what is logged


# ------------------------------------------------------------------------------- numbers that broke


@pytest.mark.parametrize("who", ["actor", "critic"])
def test_verls_trainer_stops_before_it_saves_what_is_broken(monkeypatch, who):
    """verl leaves the step out and goes on; what it reports is the mean over the optimiser
    steps."""
    trainer = AgentR1Trainer.__new__(AgentR1Trainer)
    trainer.global_steps = 3
    reported = {f"{who}/grad_norm": [0.5, 0.25]}
    monkeypatch.setattr(
        PPOTrainerSync,
        "step",
        lambda self, metrics, timing: metrics.update(reduce_metrics(dict(reported))) or "batch",
    )
    assert trainer.step({}, {}) == "batch"
    reported[f"{who}/grad_norm"] = [0.5, math.nan]
    with pytest.raises(AgentR1Error, match=f"step 3: the {who} has a gradient of norm nan"):
        trainer.step({}, {})
