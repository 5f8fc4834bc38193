"""The checks before anything is installed, with stand-ins for nvidia-smi, ldconfig and Docker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

from agent_r1.ground import preflight

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
        ("NVIDIA H100 80GB HBM3, 580.159.04", False, "ok", ""),
        ("NVIDIA H100 80GB HBM3, 570.86.15", False, "fail", "apt-get install cuda-compat-13-0"),
        ("NVIDIA H100 80GB HBM3, 570.86.15", True, "fail", "nvidia-container-toolkit 1.17.8"),
        ("NVIDIA A10G, 535.1\nNVIDIA A10G, 580.1", False, "fail", "cuda-compat-13-0"),
        ("NVIDIA GeForce RTX 4090, 550.54.15", False, "fail", "do not work on this card"),
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
    programs("nvidia-smi", "NVIDIA H100 80GB HBM3, 570.86.15")
    folder = tmp_path / "compat"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    assert preflight.check_driver()[0] == "fail"
    (folder / "libcuda.so.1").touch()
    assert preflight.check_driver()[0] == "ok"


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
    monkeypatch.setattr(preflight, "check_pip", lambda: ("ok", "", ""))
    monkeypatch.setattr(preflight, "check_disk", lambda folder: ("ok", "", ""))
    monkeypatch.setattr(preflight, "check_compiler", lambda headers=None: ("ok", "", ""))
    monkeypatch.setattr(preflight.os, "confstr", lambda name: None)
    assert preflight.main([]) == 0
    assert capsys.readouterr().out.count("unknown") == 4


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


def test_the_installation_stops_before_pip(tmp_path):
    """A driver that is too old ends the script before it makes an environment."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    smi = bin_folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 550.54.15'\n")
    smi.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "AGENT_R1_STACK": "gpu",
        "AGENT_R1_VENV": str(tmp_path / "venv"),
    }
    done = subprocess.run(
        ["bash", "speedrun-nodocker.sh", "grpo", "--preset", "first-agent-1x24gb"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "driver 550" in done.stdout
    assert "this machine is not ready" in done.stderr
    assert not (tmp_path / "venv").exists()
