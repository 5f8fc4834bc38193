"""`bash speedrun-nodocker.sh`, as a user calls it: from nothing to an agent that has learned to search."""

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
from runs import CARD_KEYS, ROOT, SMOKE, curve, environment, leftovers, speedrun, steps, tree

from agent_r1.config import ALGORITHMS

# ------------------------------------------------------------------------------------------------- nothing is started


def test_help(tmp_path):
    done = speedrun(tmp_path, "--help", AGENT_R1_VENV=str(tmp_path / "none"))
    assert done.returncode == 0
    for word in (*ALGORITHMS, "--preset", "--run", "--seed", "--resume", "--dry-run", "section.key=value", "examples:"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv", [["--foo"], ["gropo"], ["grpo", "trainer"], ["--preset"], ["grpo", "--seed"], ["--run"]]
)
def test_an_unknown_argument_is_wrong_usage(tmp_path, argv):
    done = speedrun(tmp_path, *argv, AGENT_R1_VENV=str(tmp_path / "none"))
    assert done.returncode == 2
    assert argv[-1] in done.stderr and "--help" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["grop"], "unknown argument 'grop' (did you mean 'grpo'?)"), (["--presett", "smoke"], "(did you mean '--preset'?)"),
     (["--presett=smoke"], "(did you mean '--preset'?)"), (["--preset=smok"], "unknown preset 'smok' (did you mean 'smoke'?)"),
     (["--preset", "mine/preset.yaml"], "there is no preset file mine/preset.yaml")],
)  # fmt: skip
def test_a_typing_error_gets_the_nearest_word_before_anything_is_installed(tmp_path, argv, said):
    done = speedrun(tmp_path, *argv, AGENT_R1_VENV=str(tmp_path / "none"))
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["3.9.19", "3.10.12", "3.13.1"])
def test_a_python_that_is_too_old_or_too_new(tmp_path, version):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit 0\nexit 1\n')
    python.chmod(0o755)
    done = speedrun(tmp_path, "grpo", PYTHON=str(python), AGENT_R1_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"Python {version} is not supported" in last and "install Python 3.11 or 3.12, or set PYTHON" in last
    assert not (tmp_path / "venv").exists()


def test_a_dry_run_on_a_bare_machine_installs_nothing(tmp_path):
    done = speedrun(tmp_path, "--dry-run", AGENT_R1_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0 and "environment: to do" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_installation_says_its_size_and_moves(tmp_path):
    """With a real pip, and a package that lies beside it, so that nothing is downloaded."""
    wheel = tmp_path / "tiny_part-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "tiny_part-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").write_text(f"{wheel}\n")
    script = shutil.copy(ROOT / "speedrun-nodocker.sh", tmp_path)
    for name in ("environment.sh", "packages.sh"):
        shutil.copy(ROOT / "requirements" / name, tmp_path / "requirements")
    for name in ("src/agent_r1/config/names.toml", "recipes/laptop/preset.yaml", "recipes/credit/recipe.toml"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = environment(tmp_path) | {"PYTHON": sys.executable, "AGENT_R1_STACK": "cpu", "AGENT_R1_VENV": "venv"}
    done = subprocess.run(["bash", script], env=settings, capture_output=True, text=True, timeout=120)
    # There is no agent-r1 here to be installed behind it; a pipe must not hide that pip failed.
    assert done.returncode == 1 and "the packages could not be installed" in done.stderr.splitlines()[-1]
    said = done.stdout.splitlines()
    assert "GB" in said[0] and "minutes" in said[0] and said[1] == "  unpacking all of them ..."
    (tmp_path / "requirements/cpu.txt").write_text(f"{tmp_path}/none.whl\n")
    again = subprocess.run(["bash", script], env=settings, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and "could not be installed" in again.stderr and len(again.stdout.splitlines()) == 1
    # A package whose hash is known is that very file, or none.
    (tmp_path / "requirements/cpu.txt").write_text("tiny_part[x]==1.0  # the only one\n")
    settings |= {"PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1"}
    [installed] = tmp_path.glob("venv/lib/*/site-packages/tiny_part-1.0.dist-info")
    shutil.rmtree(installed)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for expected in (f"{'0' * 63}1", digest):
        lines = f"# two\ntiny-part==1.0 --hash=sha256:{expected}\nother==1 --hash=sha256:{digest}\n"
        (tmp_path / "requirements/hashes.txt").write_text(lines)
        done = subprocess.run(["bash", script], env=settings, capture_output=True, text=True, timeout=120)
        assert "could not be installed" in done.stderr  # agent-r1 itself is not here
        assert ("DO NOT MATCH THE HASHES" in done.stderr) == (expected != digest)
        assert installed.exists() == (expected == digest)


@pytest.mark.slow
def test_a_dry_run_starts_nothing(tmp_path):
    before = {path.name for path in ROOT.iterdir()}
    done = speedrun(tmp_path, "grpo", "--preset", "smoke", "--run", "mine", "--seed", "3", "actor.lr=0.25", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "environment" not in done.stdout, "what is installed is not installed again"
    assert "algorithm: grpo" in done.stdout and "seed: 3" in done.stdout and "lr: 0.25" in done.stdout
    assert len(re.findall(r" to do +\S", done.stdout)) == 7
    assert f"{tmp_path}/runs/mine/report.html" in done.stdout
    assert list(tmp_path.iterdir()) == [] and {path.name for path in ROOT.iterdir()} == before


def test_a_wrong_setting_ends_it_before_the_first_stage(tmp_path):
    done = speedrun(tmp_path, "grpo", "--preset", "smoke", "actor.lrr=1")
    assert done.returncode == 2
    assert "unknown configuration key 'actor.lrr' (did you mean 'actor.lr'?)" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


OLD_PYTHON = """#!/bin/bash
# Python 3.10, whose pip installs a uv that brings another one, unless there is no network.
echo "python3 $*" >> {calls}
[ -z "$OFFLINE" ] || { echo "ERROR: no network" >&2; exit 1; }
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/bin"
cat > "$2/bin/uv" <<'UV'
#!/bin/bash
echo "uv $*" >> {calls}
mkdir -p "${!#}/bin"
printf '#!/bin/sh\\nexit 0\\n' > "${!#}/bin/python"
printf '#!/bin/sh\\necho "pip $*" >> {calls}\\nexit 1\\n' > "${!#}/bin/pip"
chmod +x "${!#}/bin/python" "${!#}/bin/pip"
UV
chmod +x "$2/bin/uv"
"""


@pytest.mark.parametrize("offline", ["", "yes"])
def test_a_gpu_box_without_python_312_gets_one_from_uv_or_the_line_that_does(tmp_path, offline):
    """As on Ubuntu 22.04. What uv downloads is a stand-in: no test fetches a Python."""
    programs, venv = tmp_path / "bin", tmp_path / "venv gpu"
    programs.mkdir()
    for name in (
        "bash",
        "dirname",
        "basename",
        "head",
        "mkdir",
        "chmod",
        "cat",
        "rm",
        "sed",
        "tr",
        "grep",
        "paste",
        "du",
        "cut",
    ):
        (programs / name).symlink_to(shutil.which(name))
    (programs / "python3").write_text(OLD_PYTHON.replace("{calls}", str(tmp_path / "calls")))
    (programs / "python3").chmod(0o755)
    variables = {"PATH": str(programs), "AGENT_R1_STACK": "gpu", "AGENT_R1_VENV": str(venv), "OFFLINE": offline}
    variables["HOME"] = str(tmp_path)  # pyenv's and conda's are found there
    done = speedrun(tmp_path, "grpo", "--preset", "hotpotqa-4xh100", **variables)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (
        done.returncode == 1 and calls[0].startswith("python3 -m pip install") and calls[0].endswith("venv gpu.uv uv")
    )
    if offline:
        last = done.stderr.splitlines()[-1]
        assert "no Python 3.12 found" in last and f"pip install uv && uv venv --seed --python 3.12 {venv}" in last
        assert len(calls) == 1
    else:
        assert calls[1] == f"uv venv --quiet --seed --python 3.12 {venv}"
        assert calls[2].startswith("pip install") and "--require-hashes" in calls[2]  # and on with the packages
        assert not (tmp_path / "venv gpu.uv").exists()


# --------------------------------------------------------------------------- which preset, which packages, which service

NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 80GB HBM3" && exit 0
for gpu in 1 2 3 4; do echo "NVIDIA H100 80GB HBM3, 81559 MiB"; done
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
AGENT = """#!/bin/bash
# Writes down how it was called. As the search service it is up until it is told to end.
echo "$*" >> {calls}
case "$*" in
    *--suggest-preset*) echo hotpotqa-4xh100 ;;
    search-server*)
        [ -z "$NO_SERVER" ] || { echo "loading"; echo "agent-r1: cannot listen"; exit 1; } >&2
        trap 'rm -f {up}; exit 0' TERM
        touch {up}
        while true; do sleep 0.05; done ;;
    "$HANG"*) touch {calls}.hangs; sleep 30 ;;
    "$FAIL"*) exit 7 ;;
esac
"""


class Box:
    """A machine with four GPUs and stand-ins for the environment's programs."""

    def __init__(self, folder: Path):
        self.home, self.log, self.up = folder / "home", folder / "calls", folder / "up"
        (self.home / "artifacts").mkdir(parents=True)
        programs = {"bin/nvidia-smi": NVIDIA_SMI, "venv/bin/python": PYTHON, "venv/bin/agent-r1": AGENT}
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
        self.variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "AGENT_R1_VENV": f"{folder}/venv",
                          "FAIL": "nothing", "HANG": "nothing"}  # fmt: skip

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def box(tmp_path) -> Box:
    return Box(tmp_path)


@pytest.mark.parametrize(
    ("argv", "gpus", "packages"),
    [([], True, "verl-gpu.txt into .venv-gpu"), ([], False, "cpu.txt into .venv"),
     (["--preset", "laptop"], True, "cpu.txt into .venv"), (["--preset", "hotpotqa-tiny"], True, "cpu.txt into .venv"),
     (["--preset", "hotpotqa-4xh100"], True, "verl-gpu.txt into .venv-gpu"),
     (["--preset", "hotpotqa-4xh100"], False, "cpu.txt into .venv")],
)  # fmt: skip
def test_which_packages(box, tmp_path, argv, gpus, packages):
    """As named by the script in a place where nothing is installed."""
    for name in ("speedrun-nodocker.sh", "requirements", "src", "recipes"):
        (tmp_path / "clone").mkdir(exist_ok=True)
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    script = shutil.copy(ROOT / "speedrun-nodocker.sh", tmp_path / "clone" / "copy.sh")
    variables = environment(tmp_path) | ({"PATH": box.variables["PATH"]} if gpus else {"PATH": "/usr/bin:/bin"})
    done = subprocess.run(
        ["bash", script, *argv, "--dry-run"], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and f"requirements/{packages};" in done.stdout


def test_gpus_choose_the_preset_and_get_a_search_service(box):
    done = speedrun(box.home, "grpo", "--run", "mine", **box.variables)
    assert done.returncode == 0, done.stderr
    assert "preset hotpotqa-4xh100, because of 4 NVIDIA H100 80GB HBM3, 81559 MiB here" in done.stdout
    assert "search: one service for all, at http://127.0.0.1:8100" in done.stdout
    words, url = "--preset hotpotqa-4xh100 grpo", "search.url=http://127.0.0.1:8100"
    assert box.calls() == [
        "doctor --suggest-preset",
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


def test_a_preset_that_is_named_is_taken(box):
    done = speedrun(box.home, "--preset", "hotpotqa-1x80gb", "search.url=http://10.0.0.1:8100", **box.variables)
    assert done.returncode == 0 and "because" not in done.stdout
    assert "search: one" not in done.stdout, "there is a service already"
    assert "train --preset hotpotqa-1x80gb search.url=http://10.0.0.1:8100" in box.calls()


def test_the_laptop_preset_beside_gpus_searches_in_its_own_process(box):
    done = speedrun(box.home, "--preset", "laptop", **box.variables)
    assert done.returncode == 0 and not any("search" in call or "check" in call for call in box.calls())


@pytest.mark.parametrize(("words", "code", "last"), [([], 7, "gpu-check"), (["--no-check"], 0, "report")])
def test_gpus_are_checked_unless_that_is_left_out(box, words, code, last):
    done = speedrun(box.home, *words, **box.variables | {"FAIL": "gpu-check"})
    assert done.returncode == code and box.calls()[-1].startswith(last)


def test_a_failing_stage_ends_the_service_too(box):
    done = speedrun(box.home, **box.variables | {"FAIL": "train"})
    assert done.returncode == 7
    assert box.calls()[-1].startswith("train ") and not box.up.exists()


def test_a_service_that_cannot_start(box):
    done = speedrun(box.home, **box.variables | {"NO_SERVER": "yes"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "speedrun: the search service ended; agent-r1: cannot listen"
    assert not any(call.startswith("eval") for call in box.calls())


def test_somebody_elses_service_is_not_taken_for_ours(box):
    box.up.touch()
    done = speedrun(box.home, **box.variables)
    assert done.returncode == 1 and "use it with search.url=http://127.0.0.1:8100" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_service_ends_when_the_script_is_ended(box, end):
    command = ["bash", ROOT / "speedrun-nodocker.sh"]
    variables = environment(box.home) | box.variables | {"HANG": "train"}
    process = subprocess.Popen(command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not box.log.with_name("calls.hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert box.up.exists()
    os.killpg(process.pid, end)  # as a terminal's Ctrl-C, and as an init that ends a container
    assert process.wait(timeout=100) in (-end, 128 + end)
    assert not box.up.exists()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script(box, nodes):
    """With stand-ins for srun and ray, that is: its words and its order, not Slurm and not Ray."""
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}
    command = ["bash", ROOT / "docs/cloud/slurm.sh", "grpo", "--preset", "hotpotqa-8xh100"]
    variables = environment(box.home) | box.variables | slurm | {"WANDB_API_KEY": "secret123"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [train] = [call for call in box.calls() if call.startswith("train")]
    assert train.startswith("train --preset hotpotqa-8xh100 grpo") and train.endswith(" --resume")
    ray = box.log.with_name("calls.ray")
    if nodes == 1:
        assert "verl.nodes" not in train and not ray.exists()
    else:
        assert " verl.nodes=2 verl.ranks=8 " in train
        address = re.search(r"search\.url=http://(\S+):8100", train)[1]
        told = sorted(ray.read_text().splitlines())
        assert told[0].startswith(f"ray start --block --num-cpus=32 --head --node-ip-address={address} --port=6379")
        assert re.match(
            r"srun --relative=1 --nodes=1 .*ray start --block --num-cpus=32 --address=" + re.escape(f"{address}:6379"),
            told[1],
        )
        assert told[0].endswith(" KEY="), "Ray shows its environment"
    assert not list(box.home.glob(".ray-token*")) and not box.up.exists()


def test_a_slurm_job_that_ran_out_of_time_goes_back_into_the_queue(box):
    scontrol = box.log.parent / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho scontrol $* >> {box.log}\n")
    scontrol.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "FAIL": "train"}
    for code, requeued in ((130, True), (7, False)):
        box.log.write_text("")
        agent = box.log.parent / "venv/bin/agent-r1"
        agent.write_text(re.sub(r"exit \d+ ;;", f"exit {code} ;;", agent.read_text()))
        done = subprocess.run(
            ["bash", ROOT / "docs/cloud/slurm.sh", "grpo", "--preset", "hotpotqa-4xh100"],
            env=environment(box.home) | box.variables | slurm, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert ("scontrol requeue 7" in box.calls()) == requeued


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
    (kept / "mine/checkpoints/step_000060").rename(kept / "mine/checkpoints/.part-step_000060")  # killed in the copying
    assert keep() == ["step_000040", "step_000060"]
    assert (kept / "mine/checkpoints/step_000060/manifest.json").read_text() == "60"


@pytest.mark.parametrize("place", [".pyenv/versions/3.12.7/bin/python", "miniconda3/bin/python3.12"])
def test_a_python_312_that_is_not_on_the_path_is_found(tmp_path, place):
    python = tmp_path / "home" / place
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$1" != -m ] || exit 1\n')
    python.chmod(0o755)
    variables = {"HOME": str(tmp_path / "home"), "AGENT_R1_STACK": "gpu", "AGENT_R1_VENV": str(tmp_path / "venv")}
    variables["PATH"] = "/usr/bin:/bin"
    if shutil.which("python3.12", path=variables["PATH"]):
        pytest.skip("this machine has one on the path")
    done = speedrun(tmp_path, "grpo", "--preset", "hotpotqa-4xh100", **variables)
    assert done.returncode == 1 and f"-m venv {tmp_path / 'venv'}" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("version", ["3.11.9", "3.13.1"])
def test_gpus_need_python_3_12(box, tmp_path, version):
    python = tmp_path / "python"
    minor = version.split(".")[1]
    python.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo Python {version} && exit 0
case "$2" in *"(3, 12) <= sys"*) [ {minor} -eq 12 ] ;; esac
""")
    python.chmod(0o755)
    variables = box.variables | {"PYTHON": str(python), "AGENT_R1_VENV": str(tmp_path / "none")}
    done = speedrun(box.home, "grpo", **variables)
    assert done.returncode == 1
    assert f"Python {version} is not supported; install Python 3.12, or set PYTHON" in done.stderr.splitlines()[-1]


# ------------------------------------------------------------------------------------------------- the whole of it


@pytest.mark.slow
def test_the_agent_learns(smoke):
    before, after = (
        json.loads((smoke[0] / "runs/smoke-grpo" / name).read_text()) for name in ("eval_before.json", "eval.json")
    )
    assert after["em"] >= before["em"] + 0.15
    assert after["mean_tool_calls"] > before["mean_tool_calls"]
    assert before["prompt_hash"] == after["prompt_hash"] and before["n"] == after["n"] == 300


@pytest.mark.slow
def test_each_stage_says_what_how_long_and_where(smoke):
    home, said = smoke
    for stage in ("data", "index", "cold start", "evaluate before RL", "train", "evaluate after RL", "report"):
        assert re.search(rf"^{stage}:", said, re.MULTILINE), stage
    assert len(re.findall(rf"\d+\.\d s, in {home}", said)) == 6
    assert re.search(r"^done in \d+ s; talk to it: bash inference.sh$", said, re.MULTILINE)
    assert "environment" not in said


@pytest.mark.slow
def test_the_run_directory_keeps_its_contract(smoke):
    run = smoke[0] / "runs" / "smoke-grpo"
    names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "eval_before.json",
        "eval.json",
        "report.html",
    }
    assert leftovers(smoke[0]) == []
    assert steps(run) == ["step_000024", "step_000032"]
    assert [record["training/global_step"] for record in curve(run)] == list(range(1, 33))
    for name in ("eval_before.json", "eval.json"):
        card = json.loads((run / name).read_text())
        assert set(CARD_KEYS) <= card.keys()
        assert card["em_ci95"][0] < card["em"] < card["em_ci95"][1]
    dumps = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert [path.stem for path in dumps] == ["step_000001", "step_000016", "step_000032"]
    record = json.loads(dumps[-1].read_text().splitlines()[0])
    for row in record["rows"]:
        keys = ("input_ids", "action_mask", "logprobs", "rewards", "advantages", "step_ids")
        assert len({len(row[key]) for key in keys}) == 1 and sum(row["action_mask"]) > 0


@pytest.mark.slow
def test_the_checkpoint_is_an_ordinary_model_folder(smoke):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smoke[0] / "runs" / "smoke-grpo" / "checkpoints" / "step_000032" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    record = json.loads((folder.parents[2] / "rollouts" / "step_000032.jsonl").read_text().splitlines()[0])
    row, message = record["rows"][0], {"role": "user", "content": record["question"]}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert record["question"] in prompt
    ids = torch.tensor([row["input_ids"]])
    with torch.inference_mode():
        logprobs = model(ids).logits[0].log_softmax(-1)
    sampled = [i for i, m in enumerate(row["action_mask"]) if m]
    # Sampled before the last step's update: close to what the model says now, not equal.
    gaps = [abs(logprobs[i - 1, row["input_ids"][i]].item() - row["logprobs"][i]) for i in sampled]
    assert sum(gaps) / len(gaps) < 0.3


@pytest.mark.slow
def test_a_second_call_skips_every_stage(smoke):
    home, _ = smoke
    before = tree(home)
    done = speedrun(home, *SMOKE, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done before, in") == 6
    changed = {name for name, digest in tree(home).items() if before.get(name) != digest}
    assert changed <= {"runs/smoke-grpo/report.html"} and tree(home).keys() == before.keys()
