"""The checks before anything is installed, with stand-ins for nvidia-smi, ldconfig and Docker."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, speedrun

from agent_r1.cluster.hardware import GPUS, find_gpu
from agent_r1.config import load_config, preset_names, presets
from agent_r1.ground import preflight
from agent_r1.ground.units import GIB

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB"
A10G = "NVIDIA A10G, 23028 MiB"
RTX_4090 = "NVIDIA GeForce RTX 4090, 24564 MiB"
SCRIPT = ROOT / "src/agent_r1/ground/preflight.py"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder first on PATH; call it to put a program there that prints some text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    def add(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(0o755)

    return add


@pytest.mark.parametrize(
    ("lines", "container", "status", "remedy"),
    [
        (f"{H100}, 580.159.04, 9.0", False, "ok", ""),
        (f"{H100}, 570.86.15, 9.0", False, "fail", "apt-get install cuda-compat-13-0"),
        (f"{H100}, 570.86.15, 9.0", True, "fail", "choose another machine or image"),
        (f"{A10G}, 535.1, 8.6\n{A10G}, 580.1, 8.6", False, "fail", "cuda-compat-13-0"),
        (f"{RTX_4090}, 550.54.15, 8.9", False, "fail", "do not work on this card"),
        ("No devices were found", False, "unknown", "driver 580"),
    ],
)
def test_an_old_driver_is_found_with_the_remedy_for_its_card(
    programs, monkeypatch, lines, container, status, remedy
):
    programs("nvidia-smi", lines)
    monkeypatch.setattr(preflight, "in_container", lambda: container)
    finding = preflight.check_driver()
    assert finding[0] == status
    assert remedy in finding[2]
    if container:
        assert "speedrun.sh" not in finding[2]  # Docker is no remedy inside Docker


def test_compatibility_libraries_make_an_old_driver_work(programs, tmp_path, monkeypatch):
    programs("nvidia-smi", f"{H100}, 570.86.15, 9.0")
    folder = tmp_path / "compat"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    assert preflight.check_driver()[0] == "fail"
    (folder / "libcuda.so.1").touch()
    assert preflight.check_driver()[0] == "ok"
    programs("nvidia-smi", f"{RTX_4090}, 570.86.15, 8.9")
    assert preflight.check_driver()[0] == "fail", "they do not work on a GeForce"


@pytest.mark.parametrize(
    ("symbols", "status"),
    [(b"GLIBCXX_3.4.30\0", "ok"), (b"GLIBCXX_3.4.29\0", "fail"), (None, "unknown")],
)
def test_the_cpp_library_is_read_where_ldconfig_says(programs, tmp_path, symbols, status):
    library = tmp_path / "libstdc++.so.6"
    if symbols is not None:
        library.write_bytes(b"ELF" + symbols)
    programs("ldconfig", f"\tlibstdc++.so.6 (libc6,x86-64) => {library}")
    assert preflight.check_libstdcxx()[0] == status


def test_what_cannot_be_told_never_stops_a_run(programs, monkeypatch, capsys):
    programs("nvidia-smi", "")
    programs("ldconfig", "")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(preflight, "check_pip", lambda: preflight.Finding("ok", ""))
    monkeypatch.setattr(preflight, "check_disk", lambda folder: preflight.Finding("ok", ""))
    monkeypatch.setattr(
        preflight, "check_compiler", lambda headers=None: preflight.Finding("ok", "")
    )
    monkeypatch.setattr(preflight.os, "confstr", lambda name: None)
    assert preflight.main([]) == 0
    assert capsys.readouterr().out.count("unknown") == 5


def test_each_file_system_must_hold_what_falls_on_it(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 30 * 2**30})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert preflight.check_disk(str(tmp_path / "venv"))[0] == "ok"
    usage.free = 20 * 2**30  # the environment and pip's cache are 11 each
    status, seen, remedy = preflight.check_disk(str(tmp_path / "venv"))
    assert status == "fail" and "24 needed" in seen and "AGENT_R1_VENV" in remedy


def test_the_script_needs_nothing_but_an_old_python():
    """It runs before pip. No syntax and no module that Python 3.8 lacks."""
    text = SCRIPT.read_text()
    modules = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert modules <= {*sys.stdlib_module_names}
    assert not re.search(r"^\s*match |:=|\bremoveprefix\b|\btomllib\b", text, re.MULTILINE)
    old = Path.home() / ".pyenv/versions/3.8.18/bin/python"
    python = str(old) if old.exists() else sys.executable
    done = subprocess.run(
        [python, str(SCRIPT), ".venv-gpu"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode in (0, 1), done.stderr
    assert len(done.stdout.splitlines()) == len(preflight.run_checks(".venv-gpu"))


# ------------------------------------------------------------- what a newcomer's machine is told

NEEDS_24_GB = "preset discover, on the CPU, because a GPU run needs"
MACHINES = {
    "RTX 3060, driver 535": (
        ["NVIDIA GeForce RTX 3060, 12288 MiB, 535.183.01, 8.6"],
        f"{NEEDS_24_GB} driver 580 (here 535); 20 GiB on a GPU (NVIDIA GeForce RTX 3060: 12)",
    ),
    "RTX 3060, driver 580": (
        ["NVIDIA GeForce RTX 3060, 12288 MiB, 580.95.05, 8.6"],
        f"{NEEDS_24_GB} 20 GiB on a GPU (NVIDIA GeForce RTX 3060: 12)",
    ),
    "RTX 3060 of a laptop": (
        ["NVIDIA GeForce RTX 3060 Laptop GPU, 6144 MiB, 580.95.05, 8.6"],
        f"{NEEDS_24_GB} 20 GiB on a GPU (NVIDIA GeForce RTX 3060 Laptop GPU: 6)",
    ),
    "RTX 5090 of a laptop": (
        ["NVIDIA GeForce RTX 5090 Laptop GPU, 24463 MiB, 580.95.05, 12.0"],
        "preset discover, on the CPU, because NVIDIA GeForce RTX 5090 Laptop GPU is a laptop's; "
        "--preset first-agent-1x24gb uses it",
    ),
    "RTX 4090, driver 570": (
        [f"{RTX_4090}, 570.133.07, 8.9"],
        f"{NEEDS_24_GB} driver 580 (here 570)",
    ),
    "RTX 4090, driver 580": (
        [f"{RTX_4090}, 580.95.05, 8.9"],
        "preset first-agent-1x24gb, because of 1 x NVIDIA GeForce RTX 4090, 24 GiB here",
    ),
    "T4": (
        ["Tesla T4, 15360 MiB, 580.65.06, 7.5"],
        f"{NEEDS_24_GB} compute capability 8.0, as of an A10, L4, RTX 3090, A100 or newer "
        "(Tesla T4: 7.5); 20 GiB on a GPU (Tesla T4: 15)",
    ),
    "V100": (
        ["Tesla V100-SXM2-32GB, 32768 MiB, 580.65.06, 7.0"],
        f"{NEEDS_24_GB} compute capability 8.0, as of an A10, L4, RTX 3090, A100 or newer "
        "(Tesla V100-SXM2-32GB: 7.0)",
    ),
    "L4": (
        ["NVIDIA L4, 23034 MiB, 580.65.06, 8.9"],
        "preset first-agent-1x24gb with verl.gpu=L4, because of 1 x NVIDIA L4, 22 GiB here",
    ),
    "8 x L40S": (
        8 * ["NVIDIA L40S, 46068 MiB, 580.65.06, 8.9"],
        "preset first-agent-1x24gb with verl.gpu=L40S, because of 8 x NVIDIA L40S, 45 GiB here; "
        "it uses 1 of 8 cards (verl.ranks=8 uses all)",
    ),
    "A100, 40 GB": (
        ["NVIDIA A100-SXM4-40GB, 40960 MiB, 580.65.06, 8.0"],
        "preset first-agent-1x24gb with verl.gpu=A100-40GB, because of "
        "1 x NVIDIA A100-SXM4-40GB, 40 GiB here",
    ),
    "A100, 80 GB": (
        ["NVIDIA A100-SXM4-80GB, 81920 MiB, 580.65.06, 8.0"],
        "preset first-agent-1xh100 with verl.gpu=A100-80GB, because of "
        "1 x NVIDIA A100-SXM4-80GB, 80 GiB here",
    ),
    "4 x A100, 80 GB": (
        4 * ["NVIDIA A100-SXM4-80GB, 81920 MiB, 580.65.06, 8.0"],
        "preset hotpotqa-4xh100 with verl.gpu=A100-80GB, because of "
        "4 x NVIDIA A100-SXM4-80GB, 80 GiB here",
    ),
    "H100": (
        [f"{H100}, 580.65.06, 9.0"],
        "preset first-agent-1xh100, because of 1 x NVIDIA H100 80GB HBM3, 80 GiB here",
    ),
    "H100, driver 570": (
        [f"{H100}, 570.86.15, 9.0"],
        f"{NEEDS_24_GB} driver 580 (here 570)",
    ),
    "4 x H100": (
        4 * [f"{H100}, 580.65.06, 9.0"],
        "preset hotpotqa-4xh100, because of 4 x NVIDIA H100 80GB HBM3, 80 GiB here",
    ),
    "6 x H100": (
        6 * [f"{H100}, 580.65.06, 9.0"],
        "preset hotpotqa-4xh100, because of 6 x NVIDIA H100 80GB HBM3, 80 GiB here; "
        "it uses 4 of 6 cards",
    ),
    "8 x H100": (
        8 * [f"{H100}, 580.65.06, 9.0"],
        "preset hotpotqa-8xh100, because of 8 x NVIDIA H100 80GB HBM3, 80 GiB here",
    ),
    "GH200": (
        ["NVIDIA GH200 480GB, 97871 MiB, 580.65.06, 9.0"],
        "preset first-agent-1xh100, because of 1 x NVIDIA GH200 480GB, 96 GiB here; "
        "this project has not run it on aarch64 yet",
    ),
    "GH200, driver 570": (
        ["NVIDIA GH200 480GB, 97871 MiB, 570.86.15, 9.0"],
        f"{NEEDS_24_GB} driver 580 (here 570)",
    ),
    "an old nvidia-smi, which does not know compute_cap": (
        ["NVIDIA A10G, 23028 MiB, 470.57.02"],
        f"{NEEDS_24_GB} driver 580 (here 470)",
    ),
    "MI300": (
        None,
        "preset discover, because a GPU run needs a GPU of NVIDIA, and this one is AMD's",
    ),
    "none": ([], "preset discover, because there is no GPU here; --preset smoke is a shorter run"),
}


def put_gpus(programs, lines: list[str] | None) -> None:
    """Put an nvidia-smi on PATH that lists these cards; for None, AMD's program."""
    if lines is None:
        programs("rocm-smi", "")
    elif lines:
        programs("nvidia-smi", "\n".join(lines))


ON_ARM = """#!/bin/sh
[ "$2" = --choose ] || exec {python} "$@"
exec {python} - <<'END'
import platform, runpy, sys
platform.machine = lambda: "aarch64"
sys.argv = ["{script}", "--choose"]
runpy.run_path(sys.argv[0], run_name="__main__")
END
"""
"""A Python of an Arm machine, as the script calls it."""


@pytest.mark.parametrize(("machine", "first"), [(name, row[1]) for name, row in MACHINES.items()])
def test_the_first_line_names_preset_and_reason(programs, tmp_path, machine, first):
    """Before anything is downloaded: the packages that would be are named by the second line."""
    put_gpus(programs, MACHINES[machine][0])
    variables = {"PATH": os.environ["PATH"], "AGENT_R1_VENV": "none"}
    if machine.startswith("GH200"):
        python = tmp_path / "python"
        text = ON_ARM.replace("{python}", sys.executable)
        python.write_text(text.replace("{script}", str(SCRIPT)))
        python.chmod(0o755)
        variables["PYTHON"] = str(python)
    done = speedrun(tmp_path, "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
    line, packages = done.stdout.splitlines()[:2]
    assert line == first
    stack = "cpu" if "preset discover" in first else "verl-gpu"
    assert f"requirements/{stack}.txt" in packages


def test_another_processor_is_said(programs, monkeypatch):
    """A GH200 is an Arm machine. `make long PART=gpu_pins` counts the pins' wheels for it."""
    programs("nvidia-smi", "NVIDIA GH200 480GB, 97871 MiB, 580.65.06, 9.0")
    monkeypatch.setattr(preflight.platform, "machine", lambda: "aarch64")
    choice, reason = preflight.choose(preflight.gpus_here())
    assert choice == "first-agent-1xh100 gpu" and reason.endswith("on aarch64 yet")
    assert preflight.check_processor()[0] == "warn"
    monkeypatch.setattr(preflight.platform, "machine", lambda: "ppc64le")
    assert preflight.check_processor()[0] == "fail"


def test_the_table_of_presets_is_that_of_the_presets():
    """It is a copy, because it is read before there are packages."""
    assert preflight.CPU_PRESET == presets.DEFAULT
    for count, least_gib, name, gpu in preflight.PRESETS:
        verl = load_config(name).verl
        assert (verl.ranks, verl.gpu) == (count, gpu)
        assert least_gib * GIB <= find_gpu(gpu).memory
    assert {name for name, _, _ in preflight.PLANS} == GPUS.keys()


@pytest.mark.parametrize("name", ["first-agent-1x24gb", "first-agent-1xh100"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_that_use_all_cards_divide_the_batch(name, algorithm, ranks):
    assert load_config(name, [f"verl.ranks={ranks}"], algorithm=algorithm).verl.ranks == ranks


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("RTX 3060, driver 580", "needs 20 GiB on a GPU"),
        ("RTX 4090, driver 570", "CUDA 13 needs driver 580"),
        ("T4", "needs compute capability 8.0"),
        ("V100", "needs compute capability 8.0"),
        ("MI300", "needs GPUs of NVIDIA, and nvidia-smi finds none"),
        ("none", "needs GPUs of NVIDIA, and nvidia-smi finds none"),
    ],
)
def test_a_gpu_preset_is_refused_before_pip(programs, tmp_path, machine, said):
    put_gpus(programs, MACHINES[machine][0])
    words = ["grpo", "--preset", "first-agent-1x24gb"]
    variables = {"PATH": os.environ["PATH"], "AGENT_R1_VENV": str(tmp_path / "venv")}
    done = speedrun(tmp_path, *words, **variables)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr.splitlines()[-1]
    assert not (tmp_path / "venv").exists()


def test_a_recipe_of_ones_own_gets_the_packages_that_its_preset_needs(programs, tmp_path):
    """A recipe that extends a CPU preset needs no GPU stack, whatever card is here."""
    programs("nvidia-smi", f"{H100}, 580.65.06, 9.0")
    for base, packages in {"small": "cpu.txt", "hotpotqa-4xh100": "verl-gpu.txt"}.items():
        own = tmp_path / "own"
        own.mkdir(exist_ok=True)
        (own / "preset.yaml").write_text(f"extends: {base}\ntrainer: {{steps: 3}}\n")
        variables = {"PATH": os.environ["PATH"], "AGENT_R1_VENV": "none"}
        done = speedrun(tmp_path, "--recipe", str(own), "--dry-run", **variables)
        assert f"install requirements/{packages} into" in done.stdout


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_before_pip_if_the_preset_names_a_model_there(tmp_path, answers):
    """With HF_ENDPOINT, a mirror on this machine that answers or does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not answers:
            server.close()
        variables = {
            "AGENT_R1_STACK": "gpu",
            "AGENT_R1_VENV": str(tmp_path / "venv"),
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(tmp_path / "hub"),
            "PATH": os.environ["PATH"],
            # The installation would begin: this Python cannot make an environment for GPUs.
            "PYTHON": sys.executable,
            "PIP_INDEX_URL": "http://127.0.0.1:9/",
        }
        for proxy in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
            variables[proxy] = ""
        done = speedrun(tmp_path, "--preset", "first-agent-1xh100", **variables)
    [line] = [line for line in done.stdout.splitlines() if " hub: " in line]
    assert line.split()[0] == ("ok" if answers else "fail")
    assert ("which has Qwen/Qwen3-1.7B, does not answer" in line) is not answers
    assert not (tmp_path / "venv").exists()


def test_a_model_that_is_here_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for proxy in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    assert preflight.check_hub("Qwen/Qwen3-1.7B")[0] == "fail"
    (tmp_path / "hub" / "models--Qwen--Qwen3-1.7B").mkdir(parents=True)
    assert preflight.check_hub("Qwen/Qwen3-1.7B")[0] == "ok"


def test_every_gpu_preset_names_its_model_where_the_script_looks(programs, tmp_path):
    """The script reads model.path of a preset with sed, before there is a YAML reader."""
    script = (ROOT / "requirements/environment.sh").read_text()
    function = re.search(r"^preset_value\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)[0]
    pattern = r"model: *{.*path: *\([^ ,}]*\)"
    for name in preset_names():
        config = load_config(name, algorithm="grpo")
        if config.engine == "verl":
            command = [*["bash", "-uc"], f"{function}\npreset_value {name} '{pattern}'"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == config.model.path


def test_a_card_that_the_user_names_stays(programs, tmp_path):
    programs("nvidia-smi", "NVIDIA L4, 23034 MiB, 580.65.06, 8.9")
    variables = {"PATH": os.environ["PATH"], "AGENT_R1_VENV": "none"}
    done = speedrun(tmp_path, "--dry-run", "verl.gpu=A10", **variables)
    assert done.stdout.startswith("preset first-agent-1x24gb, because")
