"""`bash speedrun-nodocker.sh`, as a user calls it: from nothing to an agent that has learned to
search."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from runs import CARD_KEYS, ROOT, curve, environment, leftovers, speedrun, steps

# ------------------------------------------------------------------------------- nothing is started


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--foo"], "--foo"),
        (["grop"], "'grpo'"),
        (["--presett=smoke"], "'--preset'"),
        (["--preset", "smok"], "'smoke'"),
    ],
)
def test_wrong_usage_names_the_word_or_the_nearest_before_anything_is_installed(
    tmp_path, argv, named
):
    done = speedrun(tmp_path, *argv, AGENT_R1_VENV=str(tmp_path / "none"))
    assert done.returncode == 2 and named in done.stderr.splitlines()[-1 if "'" in named else 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("version", "gpus"), [("3.10.12", False), ("3.11.9", True)])
def test_a_python_that_is_too_old_or_too_new(box, tmp_path, version, gpus):
    """On a CPU 3.11 and 3.12 serve, on GPUs 3.12 alone."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit 0\nexit 1\n'
    )
    python.chmod(0o755)
    variables = box.variables if gpus else {}
    done = speedrun(
        tmp_path,
        "grpo",
        **variables
        | {
            "PYTHON": str(python),
            "AGENT_R1_VENV": str(tmp_path / "none"),
            "AGENT_R1_PREFLIGHT": "no",  # its own tests are in test_preflight.py
        },
    )
    assert done.returncode == 1 and version in done.stderr.splitlines()[-1]
    assert not (tmp_path / "none").exists()


def test_a_dry_run_on_a_bare_machine_installs_nothing(tmp_path):
    done = speedrun(tmp_path, "--dry-run", AGENT_R1_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0 and "environment: to do" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_package_whose_hash_is_known_is_that_very_file_or_is_not_installed(tmp_path):
    """With a real pip, and a package that lies next to the script, so that nothing is
    downloaded."""
    wheel = tmp_path / "tiny_part-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in about.items():
            file.writestr(f"tiny_part-1.0.dist-info/{name}", text)
    script = shutil.copy(ROOT / "speedrun-nodocker.sh", tmp_path)
    for name in (
        "requirements/environment.sh",
        "requirements/packages.sh",
        "src/agent_r1/config/names.toml",
        "recipes/laptop/discover.yaml",
        "recipes/credit/recipe.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements/cpu.txt").write_text("tiny_part[x]==1.0  # the only one\n")
    settings = environment(tmp_path) | {
        "PYTHON": sys.executable,
        "AGENT_R1_STACK": "cpu",
        "AGENT_R1_VENV": "venv",
    }
    settings |= {"PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1"}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for expected in (f"{'0' * 63}1", digest):
        lines = f"# two\ntiny-part==1.0 --hash=sha256:{expected}\nother==1 --hash=sha256:{digest}\n"
        (tmp_path / "requirements/hashes.txt").write_text(lines)
        done = subprocess.run(
            ["bash", script], env=settings, capture_output=True, text=True, timeout=120
        )
        # There is no agent-r1 here to be installed after it; a pipe must not hide that pip failed.
        assert (
            done.returncode == 1
            and "the packages could not be installed" in done.stderr.splitlines()[-1]
        )
        assert ("DO NOT MATCH THE HASHES" in done.stderr) == (expected != digest)
        assert bool([*tmp_path.glob("venv/lib/*/site-packages/tiny_part-1.0.dist-info")]) == (
            expected == digest
        )


# ------------------------------------------------------ which preset, which packages, which service

NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 80GB HBM3" && exit 0
for gpu in 1 2 3 4; do echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0"; done
"""
PYTHON = """#!/bin/bash
# Every package is at its pinned version; and is the search service up?
case "$2" in
    *"import ray"*) echo 8 ;;
    *"import secrets"*) printf token ;;
    *"import httpx"*) [ -e {up} ] ;;
    *) cat >/dev/null ;;
esac
"""
AGENT = r"""#!/bin/bash
# Writes down how it was called. As the search service it is up until it is told to end.
echo "$*" >> {calls}
case "$STALL $*" in
    always\ train*--resume) exit 75 ;;
    once\ train*--resume) ;;
    always\ train*|once\ train*) echo "$AGENT_R1_FIRST_START" >{calls}.start; exit 75 ;;
esac
case "$*" in
    search-server*)
        [ -z "$NO_SERVER" ] || { echo "loading"; echo "agent-r1: cannot listen"; exit 1; } >&2
        trap 'rm -f {up}; exit 0' TERM
        touch {up}
        while true; do sleep 0.05; done ;;
    # One process: bash ignores a signal while `touch` ends well.
    "$HANG"*) : > {calls}.hangs; exec sleep 30 ;;
    "$FAIL"*) exit 7 ;;
esac
"""


class Box:
    """A machine with four GPUs and stand-ins for the environment's programs."""

    def __init__(self, folder: Path):
        self.home, self.log, self.up = folder / "home", folder / "calls", folder / "up"
        (self.home / "artifacts").mkdir(parents=True)
        programs = {
            "bin/nvidia-smi": NVIDIA_SMI,
            "venv/bin/python": PYTHON,
            "venv/bin/agent-r1": AGENT,
        }
        for name, text in programs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{calls}", str(self.log)).replace("{up}", str(self.up)))
            path.chmod(0o755)
        for name in ("venv/bin/ray", "bin/srun"):
            (folder / name).write_text(
                f'#!/bin/bash\necho "{Path(name).name} $*" KEY=$WANDB_API_KEY >> {self.log}.ray\n'
            )
            (folder / name).chmod(0o755)
        self.variables = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "AGENT_R1_VENV": f"{folder}/venv",
            "FAIL": "nothing",
            "HANG": "nothing",
            "STALL": "",
        }

    def calls(self) -> list[str]:
        return [
            stage for line in self.log.read_text().splitlines() for stage in line.split(" then ")
        ]


@pytest.fixture
def box(tmp_path) -> Box:
    return Box(tmp_path)


def test_gpus_choose_the_preset_and_get_a_search_service(box):
    done = speedrun(box.home, "grpo", "--run", "mine", **box.variables)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[0]
        == "preset hotpotqa-4xh100, because of 4 x NVIDIA H100 80GB HBM3, 80 GiB here"
    )
    assert "search: one service for all, at http://127.0.0.1:8100" in done.stdout
    words, url = "--preset hotpotqa-4xh100 grpo", "search.url=http://127.0.0.1:8100"
    assert box.calls() == [
        f"doctor {words}",
        f"gpu-check {words}",
        f"data {words}",
        f"index {words}",
        f"cold-start {words}",
        f"search-server {words} --host 127.0.0.1 --port 8100",
        f"eval --before {words} {url} --run mine",
        f"train {words} {url} --run mine",
        f"eval {words} {url} --run mine",
        f"report {words} {url} --run mine",
    ]
    assert not box.up.exists(), "it is gone when the script is"


@pytest.mark.parametrize(
    ("words", "service"),
    [
        (["--preset", "hotpotqa-1x80gb"], True),
        (["--preset", "hotpotqa-1x80gb", "search.url=http://10.0.0.1:8100"], False),
        (["--preset", "small"], False),
    ],
)
def test_a_preset_that_is_named_is_taken(box, words, service):
    """A tiny preset searches in its own process, also next to GPUs; a service that is named is
    used."""
    assert speedrun(box.home, *words, **box.variables).returncode == 0
    assert any(call.startswith("search-server") for call in box.calls()) == service
    assert any(call.startswith("gpu-check") for call in box.calls()) == ("small" not in words)
    assert any(call.startswith(f"train {' '.join(words)}") for call in box.calls())
    processes = len(box.log.read_text().splitlines())
    assert processes == (1 if "small" in words else len(box.calls()))


@pytest.mark.parametrize(
    ("words", "code", "last"), [([], 7, "gpu-check"), (["--no-check"], 7, "train")]
)
def test_a_failing_stage_ends_the_script_and_the_service(box, words, code, last):
    box.variables["FAIL"] = last
    assert speedrun(box.home, *words, **box.variables).returncode == code
    assert box.calls()[-1].startswith(last) and not box.up.exists()


@pytest.mark.parametrize(("stall", "code"), [("once", 0), ("always", 75)])
def test_training_that_hangs_is_resumed_once_by_the_script(box, stall, code):
    """Exit code 75 is training in which nothing moved; any other failure ends the script."""
    before = int(time.time())
    done = speedrun(box.home, **box.variables | {"STALL": stall})
    assert done.returncode == code
    trains = [call for call in box.calls() if call.startswith("train")]
    assert [call.endswith(" --resume") for call in trains] == [False, True]
    assert box.calls()[-1].startswith("report" if stall == "once" else "train")
    first_start = int(box.log.with_name("calls.start").read_text())
    assert before <= first_start <= time.time()


@pytest.mark.parametrize("taken", [False, True])
def test_a_service_that_cannot_start_or_is_not_ours_ends_the_script(box, taken):
    if taken:
        box.up.touch()
    done = speedrun(box.home, **box.variables | {"NO_SERVER": "yes"})
    assert done.returncode == 1 and not any(call.startswith("eval") for call in box.calls())
    assert (
        "search.url=http://127.0.0.1:8100" if taken else "cannot listen"
    ) in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_service_ends_when_the_script_is_ended(box, end):
    command = ["bash", ROOT / "speedrun-nodocker.sh"]
    variables = environment(box.home) | box.variables | {"HANG": "train"}
    process = subprocess.Popen(
        command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 100
    while not box.log.with_name("calls.hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert box.up.exists()
    os.killpg(process.pid, end)  # as a terminal's Ctrl-C, and as an init that ends a container
    assert process.wait(timeout=100) in (-end, 128 + end)
    assert not box.up.exists()


def test_the_slurm_script_on_two_nodes(box):
    """With stand-ins for srun and ray: its words and its order, not Slurm and not Ray."""
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "7",
    }
    command = ["bash", ROOT / "docs/cloud/slurm.sh", "grpo", "--preset", "hotpotqa-8xh100"]
    variables = environment(box.home) | box.variables | slurm | {"WANDB_API_KEY": "secret123"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [train] = [call for call in box.calls() if call.startswith("train")]
    assert train.startswith("train --preset hotpotqa-8xh100 grpo") and train.endswith(" --resume")
    assert " verl.nodes=2 verl.ranks=8 " in train
    address = re.search(r"search\.url=http://(\S+):8100", train)[1]
    head, worker = sorted(box.log.with_name("calls.ray").read_text().splitlines())
    start = "ray start --block --num-cpus=32"
    assert head.startswith(f"{start} --head --node-ip-address={address} --port=6379")
    assert head.endswith(" KEY="), "Ray shows its environment"
    assert (
        worker.startswith("srun --relative=1 --nodes=1 ")
        and f"{start} --address={address}:6379" in worker
    )
    assert not list(box.home.glob(".ray-token*")) and not box.up.exists()


def test_the_lines_for_two_machines_without_a_scheduler(box):
    """docs/cloud.md's lines, typed in a shell of each machine; ray and the stages are stand-ins."""
    section = re.search(
        r"^## Two machines without.*?(?=^## )",
        (ROOT / "docs/cloud.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    both, first, second, train, end = (
        block.replace("/shared/agent-r1", str(box.home))
        .replace("FIRST", "10.0.0.1")
        .replace(".venv-gpu/bin", f"{box.variables['AGENT_R1_VENV']}/bin")
        for block in blocks
    )
    shell = {"env": environment(box.home) | box.variables | {"WANDB_API_KEY": "secret123"}}
    shell |= {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    for lines in (both + second + end, both + first + train + end):
        done = subprocess.run(["bash", "-euc", lines], **shell)
        assert done.returncode == 0, done.stderr
    worker, _, head, _ = box.log.with_name("calls.ray").read_text().splitlines()
    start = "ray start"
    size = "--num-cpus=44"  # as docs/cloud/slurm.sh computes it for eight GPUs
    assert worker == f"{start} --address=10.0.0.1:6379 {size} KEY="
    flags = f"--port=6379 {size} --include-dashboard=false"
    assert head == f"{start} --head --node-ip-address=10.0.0.1 {flags} KEY="
    assert "--num-cpus=$((3 * SLURM_GPUS_ON_NODE + 20))" in (
        (ROOT / "docs/cloud/slurm.sh").read_text()
    )
    [train] = [call for call in box.calls() if call.startswith("train")]
    assert train.startswith("train --preset hotpotqa-8xh100 grpo verl.nodes=2 verl.ranks=16 ")
    assert "search.url=http://10.0.0.1:8100" in train
    token = box.home / ".ray-token"
    assert token.read_text() == "token" and token.stat().st_mode & 0o077 == 0


def test_a_checkpoint_is_kept_whole_or_not_at_all(tmp_path):
    """docs/cloud/keep.sh, with folders in place of a disk and a bucket."""
    runs, kept = tmp_path / "runs", tmp_path / "kept"

    def keep() -> list[str]:
        subprocess.run(["bash", ROOT / "docs/cloud/keep.sh", runs, kept], check=True, timeout=60)
        return sorted(p.name for p in (kept / "mine" / "checkpoints").iterdir())

    for step in (20, 40, 60):
        (runs / "mine/checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (runs / "mine/checkpoints" / f"step_{step:06d}" / "manifest.json").write_text(str(step))
        (runs / "mine/metrics.jsonl").write_text("line\n" * step)
        assert len(keep()) == min(step // 20, 2)
    assert keep() == ["step_000040", "step_000060"]
    assert (kept / "mine/metrics.jsonl").read_text() == "line\n" * 60
    (kept / "mine/checkpoints/step_000060").rename(
        kept / "mine/checkpoints/.part-step_000060"
    )  # killed in the copying
    assert keep() == ["step_000040", "step_000060"]
    assert (kept / "mine/checkpoints/step_000060/manifest.json").read_text() == "60"


# ---------------------------------------------------------------------------------- the whole of it


@pytest.mark.slow
def test_the_agent_learns_and_the_run_directory_keeps_its_contract(smoke):
    run = smoke[0] / "runs" / "smoke-grpo"
    before, after = (
        json.loads((run / name).read_text()) for name in ("eval_before.json", "eval.json")
    )
    assert after["em"] >= before["em"] + 0.3
    assert after["mean_tool_calls"] > before["mean_tool_calls"]
    assert before["prompt_hash"] == after["prompt_hash"] and before["n"] == after["n"] == 300
    assert all(
        set(CARD_KEYS) <= card.keys() and card["em_ci95"][0] < card["em"] < card["em_ci95"][1]
        for card in (before, after)
    )
    files = "config.yaml metrics.jsonl rollouts checkpoints eval_before.json eval.json report.html"
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == set(
        files.split()
    )
    assert leftovers(smoke[0]) == []
    assert steps(run) == ["step_000010", "step_000020", "step_000030"]
    assert [record["training/global_step"] for record in curve(run)] == list(range(1, 31))
    dumps = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert [path.stem for path in dumps] == ["step_000001", "step_000015", "step_000030"]
    record = json.loads(dumps[-1].read_text().splitlines()[0])
    for row in record["rows"]:
        keys = ("input_ids", "action_mask", "logprobs", "rewards", "advantages", "step_ids")
        assert len({len(row[key]) for key in keys}) == 1 and sum(row["action_mask"]) > 0
