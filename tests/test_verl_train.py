"""verl's real trainer on the CPU: Ray, FSDP2 and vLLM, with our episodes in it. Slow, and bounded
in time.

gpu-check's run of grpo in bfloat16, resumed after a kill, and one of ppo on two ranks whose servers
are killed. A start takes half a minute of two cores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from runs import (
    AGENT,
    CHECK,
    TINY,
    environment,
    lines,
    main,
    orphans,
    prepare,
    processes_of,
    undocumented,
)

from agent_r1.cluster.gpu_check import SMALL_RUN
from agent_r1.cluster.launch import read_phase
from agent_r1.cluster.watchdog import read_progress
from agent_r1.config import from_yaml
from agent_r1.model import files as model_files
from agent_r1.rollout.training_rows import TrainingRow, collate
from agent_r1.training.checkpoint import verify_checkpoint
from agent_r1.training.forward import action_logprobs
from agent_r1.training.learner import linear_decay
from agent_r1.training.losses import aggregate_loss, policy_loss
from agent_r1.training.run_dir import RunDir
from agent_r1.watch.log import step_times
from agent_r1.workspace import Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.cluster,
]

# Heads of 32: vLLM has no kernel for narrower ones on a CPU. The timeout is below the patience of
# the runs, `verl.stall_timeout_s`. That has its default of 600 s: on a slow machine, two replicas
# took more than 300 s to start.
SIZE = [
    "model.hidden_size=64",
    "env.episode_timeout_s=60",
    "cold_start.copy_steps=40",
    "cold_start.mix_steps=40",
]
RUN = [
    *TINY,
    *SIZE,
    "--engine=verl",
    "--plain",
    "trainer.threads=2",
    "trainer.eval_every=0",
    "trainer.rollouts_every=1",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Data, index and start model of the tiny configuration."""
    folder = tmp_path_factory.mktemp("verl")
    before = os.environ.get("AGENT_R1_HOME")
    os.environ["AGENT_R1_HOME"] = str(folder)
    prepare(folder, *SIZE)
    yield folder
    os.environ.pop("AGENT_R1_HOME") if before is None else os.environ.update(AGENT_R1_HOME=before)


def start(home: Path, name: str, *argv: str, words: list[str] = RUN) -> subprocess.Popen:
    command = [AGENT, "train", *words, "--run", name, *argv]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, env=environment(home) | {"OMP_NUM_THREADS": "2"}, text=True, **pipes
    )


def end(process: subprocess.Popen, within_s: float = 1600) -> tuple[int, str]:
    """Exit code and the last line of standard error."""
    _, errors = process.communicate(timeout=within_s)
    return process.returncode, (errors.strip().splitlines() or [""])[-1]


def until(condition, process: subprocess.Popen, every_s: float = 0.2) -> None:
    """A run that hangs ends itself, by verl.stall_timeout_s."""
    while not condition():
        assert process.poll() is None, process.stderr.read()[-2000:]
        time.sleep(every_s)


def named(pids: list[int], part: str) -> list[int]:
    """Those whose title has `part` in it (Ray and vLLM give their processes titles)."""
    out = []
    for pid in pids:
        try:
            if part in Path(f"/proc/{pid}/cmdline").read_text():
                out.append(pid)
        except OSError:
            continue
    return out


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in lines(run)]


def left_behind(run: Path) -> list[str]:
    """Processes, shared memory, Ray's folder."""
    begun = (
        (run / "config.yaml").stat().st_mtime
    )  # what is older is of somebody else's run, which was killed
    folders = [
        str(p)
        for p in Path(tempfile.gettempdir()).glob("agent-r1-ray-*")
        if p.stat().st_mtime > begun
    ]
    return [*map(str, processes_of(run.parents[1])), *orphans(begun), *folders]


RESUME = """
import json, sys
from pathlib import Path
from agent_r1.cluster.gpu_check import PHASES, GpuCheck, at_home, run_phases, small
from agent_r1.config import load_config
folder = Path(sys.argv[1])
with at_home(folder):
    check = GpuCheck(small(load_config("small", sys.argv[2:], algorithm="grpo")), folder)
    [found] = run_phases(check, tuple(phase for phase in PHASES if phase.name == "resume"))
print(json.dumps(found), file=sys.stderr)
"""
"""gpu-check's phase "resume", over the folder of a check."""


def test_grpo_in_bfloat16_goes_on_where_it_was_killed_and_saves_at_sigterm(
    checked, tmp_path, monkeypatch
):
    """In the arithmetic of a GPU: gpu-check resumes its run, whose shards are not converted yet;
    and SIGTERM."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    home = shutil.copytree(
        checked, tmp_path / "home", ignore=shutil.ignore_patterns("logs", "export", "eval.json")
    )
    run, sizes = home / "runs" / "check", [f"model.{n}=2" for n in ("heads", "kv_heads")]
    words = [
        *CHECK,
        *SMALL_RUN,
        *sizes,
        "model.hidden_size=128",
        "rollout.prompts_per_step=4",
        "data.train=64",
        "actor.lr=1e-3",
    ]

    # What a kill in the middle of the conversion leaves: no checkpoint, and all that verl has
    # saved.
    checkpoints = run / "checkpoints"
    (checkpoints / "step_000001" / "global_step_1").rename(checkpoints / "unverified_000001")
    for step in (1, 2):
        shutil.rmtree(checkpoints / f"step_00000{step}")
    shutil.rmtree(run / "verl")
    os.utime(run / "config.yaml")
    process = subprocess.Popen(
        [sys.executable, "-c", RESUME, home, *CHECK[2:]], env=environment(home), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    until(
        lambda: (read_phase(RunDir(run)) or {}).get("step") == 2 and len(lines(run)) == 1, process
    )
    process.send_signal(signal.SIGTERM)
    code, said = end(process)
    assert code == 0 and json.loads(said)["status"] == "passed", (
        said
    )  # the step that it came in was the last one
    assert left_behind(run) == []
    curve = metrics(run)
    assert [line["training/global_step"] for line in curve] == [1, 2]
    for line in curve:
        assert (
            line["training/rollout_probs_diff_mean"] < 0.05
        )  # vLLM sampled from the weights that are trained
        assert 0 < line["training/rollout_logprobs_diff_mean"] < 0.2
        assert (
            0.9 < line["actor/rollout_is_weight"] < 1.1 and line["actor/rollout_is_weight"] != 1
        )  # it reached the loss
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(
            line["actor/rollout_is_weight"], abs=0.05
        )
        assert (
            0 < line["checkpoint/logprob_diff_mean"] < 0.05 and line["checkpoint/unverified"] == 0
        )
        assert line["rollout/lost_episodes"] == 0
        assert {
            "critic/score/mean",
            "reward/em",
            "actor/ppo_kl",
            "tool_calls/mean",
            "timing_s/step",
        } <= line.keys()
        assert "actor/kl_loss" in line  # the reference model works, too
        assert undocumented(line) == []  # docs/metrics.md
        # What dashboard and report read beyond the local loop's keys.
        assert {"timing_s/old_log_prob", "timing_s/ref", "perf/agent_tokens_per_s"} <= line.keys()
        assert step_times(line)["other"] >= 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000001", "step_000002"]
    checkpoint = checkpoints / "step_000002"
    verify_checkpoint(checkpoint)
    assert main("eval", *words, "--model", str(checkpoint / "model")) == 0
    assert main("export", "--run", "check") == 0

    # The questions are the local loop's: the same ones in the same step.
    episodes = [
        json.loads(line)
        for line in (run / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    ]
    assert len(episodes) == 16 and len({e["group_id"] for e in episodes}) == 4
    row = episodes[0]["rows"][0]
    assert len(row["input_ids"]) == len(row["advantages"]) == len(row["action_mask"])
    # A finished run is not trained again.
    assert main("train", *words, "--run", "check") == 0
    assert len(lines(run)) == 2


def test_ppo_on_two_ranks_learns_what_we_compute_until_its_servers_die(home):
    """FSDP over two processes, two replicas of vLLM; the critic is warmed up for a step, so the
    first update is of step 2."""
    run = home / "runs" / "ppo"
    settings = [
        "rollout.prompts_per_step=16",
        "rollout.samples_per_prompt=1",
        "trainer.steps=200",
        "trainer.save_every=2",
        "trainer.eval_every=2",
        "critic.warmup_steps=1",
        "actor.kl_in=reward",
        "actor.kl_estimator=k1",
        "actor.minibatches=1",
        "verl.ranks=2",
    ]
    process = start(home, "ppo", "ppo", *settings)
    until(lambda: len(lines(run)) >= 2, process)
    servers = named(processes_of(run.parents[1]), "EngineCore")
    assert len(servers) >= 2
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    # verl's weight sync would wait for ever. Less than verl.stall_timeout_s, and much more than the
    # ten seconds of the launcher: another test may run meanwhile.
    code, said = end(process, within_s=300)
    assert code == 1 and "nothing has moved" not in said
    loss = r"a process of the vLLM server \(VLLM::EngineCore, process (\d+)\) crashed or was killed"
    assert (named_pid := re.search(loss, said)) and int(named_pid[1]) in servers, said
    assert "logs/verl-" in said and re.search(r"continue from step_\d{6} with --resume", said), said
    assert left_behind(run) == []

    done = Counter()  # what the workers told the launcher on the way
    for report in read_progress(run / "verl" / "progress").values():
        done.update(json.loads(report))
    units = ("tokens", "episodes", "micro_batches", "critic_micro_batches")
    assert all(done[unit] >= 2 for unit in units), done

    curve, (loss, norm) = metrics(run)[:2], first_update(run, 2)
    assert ["actor/pg_loss" in line for line in curve] == [False, True]
    for line in curve:
        assert (
            line["training/rollout_probs_diff_max"] < 1e-3
        )  # in float32 the sampler agrees to the rounding
        assert "actor/rollout_is_weight" not in line  # so there is nothing to correct
        assert {"critic/vf_loss", "actor/reward_kl_penalty"} <= line.keys()
        assert undocumented(line) == []
    # Whitened advantages add up to nothing, and before an update each ratio is 1: both losses are
    # rounding. The gradient is what tells one advantage from another.
    assert abs(loss) < 1e-5 and curve[1]["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert norm > 1e-2 and curve[1]["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    a = from_yaml(run / "config.yaml").actor
    lr = a.lr * linear_decay(2, 200, a.warmup_steps, a.lr_final)  # the local loop's line
    assert curve[1]["actor/lr"] == pytest.approx(lr, rel=1e-6)
    assert "val-core/tinyhop/acc/mean@1" in curve[1]


def first_update(run: Path, step: int) -> tuple[float, float]:
    """Policy loss and gradient norm that our functions give on the recorded episodes of `step`, as
    one minibatch, with the start model: the first step in which the policy learns."""
    config = from_yaml(run / "config.yaml")
    a, model = config.actor, model_files.load_model(Workspace(config).cold_start)
    episodes = [
        json.loads(line)
        for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]
    rows = [row for episode in episodes for row in episode["rows"]]
    names = ("input_ids", "action_mask", "logprobs", "rewards")
    batch = collate([TrainingRow(0, "", *(row[name] for name in names)) for row in rows])
    advantages_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["advantages"]) for row in rows], batch_first=True
    )
    logprobs_BT, entropy_BT = action_logprobs(model, batch, entropy=True)
    clips = a.clip_low, a.clip_high, a.clip_dual
    loss_BT, _ = policy_loss(
        logprobs_BT, logprobs_BT.detach(), advantages_BT, batch.mask_BT, *clips
    )
    loss, entropy = (
        aggregate_loss(x, batch.mask_BT, a.loss_aggregation) for x in (loss_BT, entropy_BT)
    )
    (loss - a.entropy_coef * entropy).backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.long
def test_a_stopped_worker_is_noticed(home):
    """SIGSTOP: the process lives and nothing moves, as when a weight sync hangs."""
    run = home / "runs" / "stuck"
    process = start(
        home,
        "stuck",
        "grpo",
        "trainer.steps=200",
        "trainer.save_every=1",
        "verl.stall_timeout_s=100",
    )
    until(lambda: len(lines(run)) >= 1, process)
    workers = named(processes_of(run.parents[1]), "WorkerDict")
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    code, said = end(process)
    assert code == 1
    assert "nothing has moved for 100 s" in said and "in step" in said and "logs/verl-" in said, (
        said
    )
    assert left_behind(run) == []
