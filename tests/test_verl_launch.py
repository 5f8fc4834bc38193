"""Around verl, without verl: what a run leaves is removed and nothing else; questions; shards to a
model folder."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, fails_with, random_model
from runs import tree

from agent_r1.chat.tokenizer import save_tokenizer
from agent_r1.cluster import launch, watchdog
from agent_r1.cluster.checkpoints import finish, keep_shards, newest_shards
from agent_r1.config import fingerprint, load_config
from agent_r1.data.build import build
from agent_r1.data.storage import read_rows
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model import decoder
from agent_r1.model import files as model_files
from agent_r1.rollout.rollouts import prompts_of_step
from agent_r1.training.checkpoint import read_checkpoint
from agent_r1.training.run_dir import RunDir

POPEN = subprocess.Popen
HOLDER = """
import sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=64)
print("ready", flush=True)
time.sleep(60)
"""


def holder(name: str, mark: str | None) -> subprocess.Popen:
    """A process that holds shared memory, in a session of its own as Ray's are; of a run, if it has
    a mark."""
    environment = os.environ | ({launch.RUN_VARIABLE: mark} if mark else {})
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def test_cleaning_up_takes_this_run_and_nothing_else(tmp_path):
    ours, theirs, bystander = (
        holder(f"test_verl_{os.getpid()}_{i}", mark)
        for i, mark in enumerate(["mine", "mine2", None])
    )
    try:
        scratch = tmp_path / "scratch"
        (scratch / "session_1" / "logs").mkdir(parents=True)
        (scratch / "session_1" / "logs" / "raylet.err").write_text("oh\n")
        launch.clean_up(launch.Child(ours, "mine", scratch), tmp_path / "logs")
        assert ours.poll() is not None and theirs.poll() is None and bystander.poll() is None
        names = [Path(f"/dev/shm/test_verl_{os.getpid()}_{i}").exists() for i in range(3)]
        assert names == [False, True, True]
        assert not scratch.exists()
        assert (tmp_path / "logs" / "ray" / "raylet.err").read_text() == "oh\n"
    finally:
        for i, process in enumerate((ours, theirs, bystander)):
            process.kill()
            process.wait()
            process.stdout.close()
            try:
                shared_memory.SharedMemory(name=f"test_verl_{os.getpid()}_{i}").unlink()
            except FileNotFoundError:
                continue


def test_two_runs_on_one_machine_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a verl test may run meanwhile
    monkeypatch.setenv("AGENT_R1_VERL_WAIT_S", "0")  # conftest.py sets ten minutes
    with (
        launch.only_one_here(),
        pytest.raises(AgentR1Error, match="another run"),
        launch.only_one_here(),
    ):
        pass
    with launch.only_one_here():
        pass


class Notes:
    """What a dashboard is told."""

    def __init__(self):
        self.steps, self.notes = [], []
        self.step, self.note = self.steps.append, self.notes.append


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """`watch` over a driver that does what the script says; it gets the run's folder `run`."""
    config = load_config(
        "small",
        ["engine=verl", "verl.stall_timeout_s=1", "env.episode_timeout_s=0.5"],
        algorithm="grpo",
    )
    run, notes, tracked = RunDir(tmp_path / "run"), Notes(), []
    for name in ("verl/progress", "logs"):
        (run.path / name).mkdir(parents=True)
    monkeypatch.setattr(launch, "POLL_S", 0.05)

    def watch(script: str, stall_timeout_s: int = 1):
        verl = config.verl.model_copy(update={"stall_timeout_s": stall_timeout_s})
        code = f"import json, os, pathlib, time; run = pathlib.Path({str(run.path)!r})\n{script}"
        monkeypatch.setattr(
            launch.subprocess,
            "Popen",
            lambda command, **options: POPEN([sys.executable, "-c", code], **options),
        )
        changed = config.model_copy(update={"verl": verl})
        launch.watch(run, changed, "cpu", notes, tracked.append)

    return SimpleNamespace(run=run, notes=notes, tracked=tracked, watch=watch)


PHASE = (
    '(run / "verl" / "phase.json").write_text(json.dumps({"step": 7, "phase": "weight sync"}))\n'
)


@pytest.mark.parametrize(
    "script, said",
    [
        (PHASE + "time.sleep(600)",
            r"nothing has moved for 1 s .*in step 7, weight sync; log: .*no checkpoint"),
        ("failure('an episode broke'); cause('ValueError: small'); raise "
            "SystemExit(1)", ": an episode broke; log"),
        # ... which does not hide why the trainer itself ended the run.
        (PHASE + "failure('an episode broke'); cause('AgentR1Error: no weights'); raise "
            "SystemExit(1)", "sync: no weights;"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_told_with_phase_cause_and_log(watched, script, said):
    writers = 'cause = (run / "verl" / "cause.txt").write_text\n'
    writers += 'failure = (run / "verl" / "failure.txt").write_text\n'
    with pytest.raises(AgentR1Error, match=said):
        watched.watch(writers + script)


DEATH = """
import shutil, subprocess
server = subprocess.Popen(["VLLM::EngineCore", "600"], executable=shutil.which("sleep"))
(run / "server").write_text(str(server.pid))
time.sleep(1)
server.kill()
"""
"""A driver whose server dies after it was seen. It does not wait for the server, as a busy one."""
SLEEP = "time.sleep(.5)"


@pytest.mark.parametrize(
    "then, said",
    [
        ("time.sleep(600)", "take a machine with more"),
        # The trainer's own error comes in time.
        ("(run / 'verl' / 'cause.txt').write_text('ValueError: no weights'); raise SystemExit(1)",
            "ValueError: no weights"),
    ],
)  # fmt: skip
def test_a_dead_server_ends_a_run_and_is_named(watched, monkeypatch, then, said):
    monkeypatch.setattr(watchdog, "ERROR_WAIT_S", 0.5)
    with pytest.raises(AgentR1Error) as caught:
        watched.watch(PHASE + DEATH + "time.sleep(.3)\n" + then, stall_timeout_s=60)
    pid = (watched.run.path / "server").read_text()
    server = f"a process of the vLLM server (VLLM::EngineCore, process {pid}) crashed or was killed"
    assert f"in step 7, weight sync: {server}: " in str(caught.value) and said in str(caught.value)


def test_workers_may_end_after_the_training(watched, monkeypatch):
    monkeypatch.setattr(watchdog, "ERROR_WAIT_S", 0)
    end = """
from agent_r1.cluster.watchdog import note_end
end = lambda: note_end(run / "verl")
"""
    watched.watch(end + DEATH.replace("server.kill", "end(); server.kill") + SLEEP, 60)
    (watched.run.path / "verl" / watchdog.ENDED).unlink()
    monkeypatch.setattr(watchdog, "ERROR_WAIT_S", 60)
    # Before the end it is a death, and the trainer's own error does not hide it.
    with pytest.raises(AgentR1Error, match="EngineCore.* crashed or was killed: the driver ended"):
        watched.watch(end + DEATH + "server.wait(); end(); raise SystemExit(1)", 60)


def test_a_run_that_makes_progress_is_not_stalled(watched, monkeypatch):
    """More than an hour in one phase, where ten minutes are the limit: on a clock that goes on by
    400 s with each micro-batch of a worker."""
    folder = watched.run.path / "verl" / "progress"

    def clock() -> float:
        reports = map(json.loads, watchdog.read_progress(folder).values())
        return 400.0 * sum(report["micro_batches"] for report in reports)

    ours = SimpleNamespace(monotonic=clock, sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(launch, "time", ours)
    watched.watch(PHASE + """
from agent_r1.cluster import watchdog
watchdog.REPORT_S = 0
for _ in range(12):
    watchdog.report("micro_batches")
    time.sleep(.1)
""", stall_timeout_s=600)  # fmt: skip
    assert clock() == 4800


def test_each_new_line_goes_to_dashboard_and_trackers_and_no_key_to_the_driver(
    watched, monkeypatch
):
    watched.run.metrics.append({"training/global_step": 1})  # of an earlier process
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    watched.watch("""
(run / "verl" / "note.txt").write_text("the service is gone")
with (run / "metrics.jsonl").open("a") as file:
    for step in (2, 3):
        keys = len({"WANDB_API_KEY", "HF_TOKEN"} & set(os.environ))
        line = {"training/global_step": step, "keys": keys, "checkpoint/unverified": step == 3}
        file.write(json.dumps(line) + "\\n")
""")
    lines = [
        {"training/global_step": n, "keys": 0, "checkpoint/unverified": n == 3} for n in (2, 3)
    ]
    assert watched.tracked == watched.notes.steps == lines
    assert (
        watched.notes.notes.count("the service is gone")
        == watched.notes.notes.count(launch.UNVERIFIED_NOTE)
        == 1
    )


def test_questions_come_in_the_local_loops_order(tmp_path):
    config = load_config(
        "small",
        ["engine=verl", "trainer.steps=7", "data.train=30", "data.cold=40"],
        algorithm="grpo",
    )
    build(config.data, config.seed, tmp_path / "data", config.env.name)
    launch.write_questions(tmp_path / "data" / "train.parquet", config, tmp_path / "train.parquet")
    rows, questions = (
        read_rows(tmp_path / "train.parquet"),
        read_rows(tmp_path / "data" / "train.parquet"),
    )
    P = config.rollout.prompts_per_step
    assert len(rows) == 7 * P > len(questions)  # more than two epochs
    for step in range(1, 8):
        expected = [
            row["prompt"]
            for row in prompts_of_step(
                questions, step, config.rollout.prompts_per_step, config.seed
            )
        ]
        assert [row["prompt"] for row in rows[(step - 1) * P : step * P]] == expected


@pytest.mark.parametrize(
    "settings, change, code",
    [
        ([], {"num_attention_heads": 8, "head_dim": 16}, "unsupported_model"),
        (["verl.ranks=2", "verl.tensor_parallel=2"], {}, "gpu_only"),
    ],
)  # fmt: skip
def test_models_that_verl_cannot_run_here_are_refused(tokenizer, tmp_path, settings, change, code):
    model_files.save_model(random_model(hidden_size=128, heads=4), tmp_path, 0, 0)
    save_tokenizer(tokenizer, tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    config = load_config(
        "small",
        ["engine=verl", "trainer.max_tokens_per_microbatch=1500", *settings],
        algorithm="grpo",
    )
    if not settings:
        launch.check_runnable(config, "cpu", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(shape | change))
    with fails_with(code):
        launch.check_runnable(config, "cpu", tmp_path)


# -------------------------------------------------------------------------------------- checkpoints

SHARDER = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.load(f"{folder}/whole.pt", weights_only=True)
parts = {}
for name, tensor in whole.items():
    placement = Shard(0) if tensor.dim() > 1 else Replicate()
    parts[name] = distribute_tensor(tensor, mesh, [placement])
torch.save(parts, f"{folder}/model_world_size_2_rank_{rank}.pt")
dist.barrier()
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A model's weights in the shards of two ranks, whose rows do not divide evenly."""
    folder = tmp_path_factory.mktemp("actor")
    model = random_model(vocab=VOCAB + 1, seed=3)
    torch.save(
        {name: t.detach().clone() for name, t in model_files.to_hf(model).items()},
        folder / "whole.pt",
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDER, str(folder), str(rank)])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    return folder, model


def rows_of(model: decoder.Decoder, half: bool = False) -> list[dict]:
    """A row of 90 tokens with the log-probabilities that training gives them; every other token of
    the response is one that the policy chose."""
    from agent_r1.rollout.training_rows import TrainingRow, collate
    from agent_r1.training.forward import action_logprobs

    ids, row = (
        torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist(),
        TrainingRow(0, "g"),
    )
    row._add_observation(ids[:30])
    row._add_action(ids[30:], [0.0] * 60, 0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        logprobs, _ = action_logprobs(model, collate([row]))
    return [{"ids": ids, "logprobs": logprobs[0, 30:].tolist(), "mask": [1, 0] * 30}]


def trained(sharded, folder: Path, rows: list[dict], dtype: str) -> tuple:
    """A run in whose third step verl has saved: what `finish` takes."""
    actor, model = sharded
    run = RunDir(folder / "run")
    shards = shutil.copytree(actor, run.path / "verl" / "global_step_3" / "actor").parent
    kept = keep_shards(run, 3, shards, dtype, rows)
    assert not shards.exists() and newest_shards(run) == kept
    start = folder / "start"
    model_files.save_model(random_model(vocab=VOCAB + 1, seed=4), start, 0, 0)
    return run, load_config("small", ["engine=verl"], algorithm="grpo"), start, kept


@pytest.mark.slow
def test_shards_become_a_checkpoint_that_everybody_reads(sharded, tmp_path):
    phases, (_, model) = [], sharded
    run, config, start, kept = trained(sharded, tmp_path, rows_of(model), "float32")
    found = finish(run, config, start, kept, phases.append)
    assert found["checkpoint/logprob_diff_max"] < 1e-3 and found["checkpoint/unverified"] == 0
    assert phases == ["checkpoint: merge", "checkpoint: check", "checkpoint: hash"]
    checkpoint = run.checkpoints / "step_000003"
    assert read_checkpoint(checkpoint, fingerprint(config)) == (3, {"engine": "verl"})
    assert list(run.checkpoints.iterdir()) == [checkpoint] and newest_shards(run) is None
    assert tree(checkpoint / "global_step_3" / "actor") == tree(sharded[0])
    read = model_files.load_model(checkpoint / "model")
    for name, value in model_files.to_hf(model).items():
        assert torch.equal(model_files.to_hf(read)[name], value), name


def unchosen(model: decoder.Decoder) -> list[dict]:
    """The text of a tool, which the policy finds next to impossible, has other
    log-probabilities."""
    (row,) = rows_of(model)
    changed = [
        value - 5 * (1 - acted) for value, acted in zip(row["logprobs"], row["mask"], strict=True)
    ]
    return [row | {"logprobs": changed}]


def rounded(model: decoder.Decoder) -> list[dict]:
    """FSDP keeps weights in float32, and each pass of a run in bfloat16 has them in bfloat16."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return rows_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer, dtype, least, most, is_unverified",
    [
        (unchosen, "float32", 0, 1e-3, 0),
        (rounded, "float32", 1e-4, 0.3, 1),
        (
            partial(rows_of, half=True),
            "float32",
            1e-3,
            0.3,
            1,
        ),  # a failed check: named, and the run goes on
    ],
)
def test_a_model_is_compared_with_the_trainer_as_it_multiplied(
    sharded, tmp_path, trainer, dtype, least, most, is_unverified
):
    run, config, start, kept = trained(sharded, tmp_path, trainer(sharded[1]), dtype)
    found = finish(run, config, start, kept)
    apart = [found[f"checkpoint/logprob_diff_{name}"] for name in ("mean", "p99", "max")]
    assert apart == sorted(apart) and least <= apart[-1] < most
    assert found["checkpoint/unverified"] == is_unverified
    assert run.latest_checkpoint().name == "step_000003"


@pytest.mark.slow
def test_weights_that_are_not_the_trainers_end_the_run_and_nothing_is_lost(sharded, tmp_path):
    rows = rows_of(random_model(vocab=VOCAB + 1, seed=5))
    run, config, start, kept = trained(sharded, tmp_path, rows, "bfloat16")
    for _ in range(2):  # --resume tries it again
        with pytest.raises(
            AgentR1Error,
            match="unverified_000003: .* differs from the trained one by .* kept there: --resume",
        ):
            finish(run, config, start, kept)
        assert tree(kept / "actor") == tree(sharded[0]) and newest_shards(run) == kept
        assert run.latest_checkpoint() is None
    assert "continue from unverified_000003 with --resume" in launch.resume_hint(run)


@pytest.mark.slow
def test_a_full_disk_loses_no_shard(sharded, tmp_path):
    run, config, start, kept = trained(sharded, tmp_path, rows_of(sharded[1]), "float32")
    before, (soft, hard) = tree(kept), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # a full disk, as the writers see it
    try:
        with pytest.raises(AgentR1Error, match="cannot write the checkpoint .*; free space"):
            finish(run, config, start, kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(kept) == before and list(run.checkpoints.iterdir()) == [kept]
    finish(run, config, start, kept)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000003"]


# ------------------------------------------------------------------------- what Ray says of a death

DYING = """
import os, signal, sys, time
import ray
from agent_r1.cluster import driver

sys.modules["verl"] = None  # the driver does without: its import takes longer than all the rest

@ray.remote(num_cpus=1)
class Runner:
    def run(self, config):
        if config.trainer.dies == "by a signal":
            os.kill(os.getpid(), signal.SIGKILL)
        block = bytearray(600 * 2**20)
        time.sleep(60)

driver.AgentTaskRunner = Runner
driver.main(sys.argv[1], sys.argv[2], "2", "0")
"""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "dies, said",
    [
        ("by a signal", "a process of the run (Runner) crashed or was killed"),
        ("of hunger", "the machine's memory was nearly full, so Ray ended a process of the run"),
    ],
)
def test_a_process_that_dies_is_told_of_in_one_line_with_a_remedy(tmp_path, dies, said):
    """By the real Ray; to its watch over the memory, this machine is full when two hundredths of it
    are taken."""
    (tmp_path / "config.yaml").write_text(
        json.dumps({"trainer": {"nnodes": 1, "dies": dies}, "transfer_queue": {}})
    )
    (tmp_path / "runtime.json").write_text(json.dumps({"env_vars": {}}))
    config = load_config("small", ["engine=verl"], algorithm="grpo")
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as scratch:  # short, for Ray's sockets
        (Path(scratch) / "auth_token").write_text("0" * 64)
        variables = launch.driver_environment(config, "cpu", uuid.uuid4().hex, Path(scratch))
        if dies == "of hunger":
            variables |= {
                "RAY_memory_usage_threshold": "0.02",
                "RAY_memory_monitor_refresh_ms": "250",
            }
        command = [sys.executable, "-c", DYING, str(tmp_path / "config.yaml"), scratch]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    cause = (tmp_path / "cause.txt").read_text()
    assert done.returncode == 1 and cause.startswith(f"AgentR1Error: {said}"), (
        cause + done.stderr[-2000:]
    )
    assert (
        "\n" not in cause and "take a machine with more" in cause and "verl.offload=false" in cause
    )


def test_hours_count_from_the_scripts_first_start(tmp_path, monkeypatch):
    """The trainer's limit counts from the time of this file (trainer.on_init_end)."""
    file = tmp_path / "config.yaml"
    file.touch()
    now = file.stat().st_mtime
    monkeypatch.delenv("AGENT_R1_FIRST_START", raising=False)
    launch.count_from_first_start(file)
    assert file.stat().st_mtime == now
    monkeypatch.setenv("AGENT_R1_FIRST_START", "1700000000")
    launch.count_from_first_start(file)
    assert file.stat().st_mtime == 1_700_000_000
