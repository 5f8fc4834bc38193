"""The doctor finds what is wrong, says what to do, and never falls ill itself."""

from __future__ import annotations

import importlib.metadata
import io
import socket
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1 import device, doctor, doctor_preset
from agent_r1.config import load_config
from agent_r1.device import GpuHere
from agent_r1.doctor import Check, print_checks, run_checks
from agent_r1.doctor_preset import suggest_preset
from agent_r1.sizes import GIB, MODELS

Usage = namedtuple("Usage", "total used free")


def test_every_check_answers_with_a_remedy_for_each_trouble():
    checks = run_checks() + doctor_preset.check_preset(load_config("laptop"))
    names = {check.name for check in checks}
    assert {"python", "packages", "torch works", "memory", "disk", "gpu", "verl", "port 8100", "preset"} <= names
    assert all(check.remedy for check in checks if check.status != "ok")


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "warn"), ((2, 7), "fail")]
)
def test_python(version, status):
    assert doctor.check_python(version).status == status


def test_pins_are_read_and_compared():
    text = "--index-url https://x.org\n# torch==1\ntorch==2.13.0+cpu  # CPU\nPyYAML\nuvicorn[all]==0.3 ; a\nnumpy>=2\n"
    assert doctor.read_pins(text) == {"torch": "2.13.0+cpu", "uvicorn": "0.3"}
    assert doctor.same_version("2.13.0+cpu", "2.13.0")
    assert not doctor.same_version("2.13.0", "2.13.0+cpu")
    assert not doctor.same_version("2.13.1", "2.13.0")


def test_packages_missing_or_of_another_version(monkeypatch, tmp_path):
    def version(name):
        if name == "faiss-cpu":
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").write_text("torch==2.0\nnumpy==1.0\n")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "src/agent_r1/doctor.py"))
    found = {check.name: (check.status, check.detail) for check in doctor.check_packages()}
    assert found == {"torch": ("warn", "1.0 is installed, 2.0 is pinned"), "faiss-cpu": ("fail", "is not installed")}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0" if name == "torch" else "1.0")
    (only,) = doctor.check_packages()
    assert only.status == "ok" and "match" in only.detail


def test_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check = doctor.check_torch()
    assert check.status == "fail" and "cannot be used" in check.detail
    assert device.torch_sees_gpu() is False


@pytest.mark.parametrize(("free", "status"), [(3 * GIB, "ok"), (GIB, "fail"), (None, "warn")])
def test_memory(free, status):
    assert doctor.check_memory(free).status == status


def test_container_limits_count(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": str(3 * GIB),
        "/sys/fs/cgroup/memory.current": str(2 * GIB),
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    monkeypatch.setattr(device, "_read", lambda path: files.get(path, ""))
    assert device.available_memory() == GIB + GIB // 2  # what is left of the limit, caches given back
    assert device.cores() == 1
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert device.available_memory() == 8 * GIB


def test_disk_looks_where_runs_will_be(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda p: asked.append(p) or Usage(9, 9, GIB))
    check = doctor.check_disk(tmp_path / "not" / "yet" / "runs")
    assert check.status == "fail" and asked == [tmp_path] and list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert doctor.check_disk(tmp_path).status == "ok"


def test_a_place_for_runs_that_cannot_be_written():
    check = doctor.check_disk(Path("/proc/1"))
    assert check.status == "fail" and "/proc/1: " in check.detail and "AGENT_R1_HOME" in check.remedy


def test_gpu_as_nvidia_smi_tells_it(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor, "torch_sees_gpu", lambda: True)
    assert doctor.check_gpu() == Check("gpu", "ok", "NVIDIA H200, 143771 MiB, driver 570.86")
    assert "H200" in device.describe_machine()
    monkeypatch.setattr(doctor, "torch_sees_gpu", lambda: False)
    assert doctor.check_gpu().status == "warn"
    program.write_text("#!/bin/sh\nexit 9\n")  # a driver that does not answer
    assert doctor.check_gpu() == Check("gpu", "ok", "none: the laptop preset needs none")


def test_port_in_use_is_a_warning():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert doctor.check_port(port, "x").status == "warn"
    assert doctor.check_port(port, "x").status == "ok"


def test_preset_that_does_not_exist_or_fit(monkeypatch):
    config = load_config("laptop", ["trainer.device=cuda"])
    monkeypatch.setattr(doctor_preset, "torch_sees_gpu", lambda: False)
    assert "GPU" in doctor_preset.check_preset(config)[0].detail
    config.trainer.device, config.model.path = "cpu", "/no/such/model"
    assert "/no/such/model" in doctor_preset.check_preset(config)[0].detail
    config.model.path = "some/model"  # on the hub, for all we know
    assert doctor_preset.check_preset(config)[0].status == "ok"


def test_first_failure_ends_standard_error_and_sets_the_exit_code(capsys):
    checks = [Check("a", "ok", "fine [red]x"), Check("b", "fail", "broken", "mend b")]
    checks.append(Check("c", "fail", "too", "mend c"))
    out = io.StringIO()
    assert print_checks(checks, Console(file=out, width=20)) == 1
    assert out.getvalue() == "ok    a: fine [red]x\nfail  b: broken  -> mend b\nfail  c: too  -> mend c\n"
    assert capsys.readouterr().err.splitlines()[-1] == "b: broken; mend b"
    assert print_checks(checks[:1], Console(file=out)) == 0
    assert capsys.readouterr().err == ""


def test_describe_machine_is_one_line():
    text = device.describe_machine()
    assert " of " in text and "\n" not in text


@pytest.mark.parametrize("file, extra", [("cpu.txt", {}), ("verl-gpu.txt", {"verl": "0.9.1"})])
def test_packages_are_held_against_the_pins_of_their_own_set(monkeypatch, file, extra):
    pins = doctor.read_pins((Path(doctor.__file__).parents[2] / "requirements" / file).read_text())
    monkeypatch.setattr(doctor, "installed", (pins | extra).get)
    (check,) = doctor.check_packages()
    assert check.status == "ok" and check.detail.endswith(f"match requirements/{file}")
    monkeypatch.setattr(doctor, "installed", (pins | extra | {"torch": "2.0"}).get)
    (check,) = doctor.check_packages()
    assert check.status == "warn" and pins["torch"] in check.detail and file in check.remedy


# ------------------------------------------------------------------------------------------------------- presets for GPUs

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"
SHAPE = MODELS["Qwen/Qwen2.5-1.5B-Instruct"]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A machine with the GPUs that the test says."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_preset, "torch_sees_gpu", lambda: True)

    def say(*lines: str) -> None:
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)

    return say


def found(preset: str) -> dict[str, Check]:
    return {check.name: check for check in doctor_preset.check_preset(load_config(preset))}


@pytest.mark.parametrize(
    ("count", "gib", "preset"),
    [
        (0, 0, "laptop"),
        (1, 24, "hotpotqa-1x24gb"),
        (4, 24, "hotpotqa-1x24gb"),
        (1, 48, "hotpotqa-1x24gb"),
        (2, 12, "laptop"),
        (1, 80, "hotpotqa-1x80gb"),
        (2, 80, "hotpotqa-2x80gb"),
        (3, 80, "hotpotqa-2x80gb"),
        (4, 140, "hotpotqa-4xh100"),
        (7, 80, "hotpotqa-4xh100"),
        (8, 80, "hotpotqa-8xh100"),
    ],
)
def test_the_preset_for_some_gpus(count, gib, preset):
    assert suggest_preset([GpuHere("any", gib * 1024, "580.1")] * count) == preset
    load_config(preset)


def test_the_smallest_of_unlike_gpus_decides():
    assert suggest_preset([GpuHere("a", 81559, "580.1"), GpuHere("b", 24564, "580.1")]) == "hotpotqa-1x24gb"


def test_the_suggestion_is_all_that_is_printed_and_needs_no_torch(nvidia_smi):
    nvidia_smi(*[H100] * 4)
    code = (
        "import sys; from agent_r1.cli import main; main(['doctor', '--suggest-preset']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("hotpotqa-4xh100\nFalse\n", "")


def test_nvidia_smi_that_says_something_else_is_no_gpu(nvidia_smi):
    nvidia_smi("NVIDIA H100, [N/A], 580.65.06", "Failed to initialize NVML: Driver/library version mismatch")
    assert device.gpus_here() == []


def test_enough_gpus_with_enough_memory(nvidia_smi):
    nvidia_smi(*[H100] * 4)
    checks = found("hotpotqa-4xh100")
    assert checks["number of GPUs"].status == checks["GPU memory"].status == checks["GPU driver"].status == "ok"
    assert "of 80 GiB (computed)" in checks["GPU memory"].detail


def test_too_few_too_small_too_old(nvidia_smi, monkeypatch):
    monkeypatch.setattr(doctor_preset, "torch_sees_gpu", lambda: False)
    nvidia_smi(*["NVIDIA GeForce RTX 4090, 24564 MiB, 550.54.15"] * 2)
    checks = found("hotpotqa-4xh100")
    assert checks["number of GPUs"] == Check(
        "number of GPUs", "fail", "2, and hotpotqa-4xh100 takes 4",
        "use --preset hotpotqa-1x24gb here, or a machine with 4 GPUs",
    )  # fmt: skip
    assert checks["GPU memory"].status == "fail" and "of 24 GiB" in checks["GPU memory"].detail
    assert "trainer.micro_tokens" in checks["GPU memory"].remedy or "verl.gpu_memory" in checks["GPU memory"].remedy
    assert (checks["GPU driver"].status, checks["GPU driver"].detail) == ("fail", "550.54.15, and CUDA 13 takes 580")
    assert "install driver 580 or newer" in checks["GPU driver"].remedy and "Docker" in checks["GPU driver"].remedy
    assert all(check.remedy for check in checks.values() if check.status != "ok")


def test_an_old_driver_with_which_pytorch_can_use_the_gpus_is_a_warning(nvidia_smi, monkeypatch):
    """As in a container that brings CUDA's compatibility libraries."""
    nvidia_smi(*["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"] * 4)
    check = found("hotpotqa-4xh100")["GPU driver"]
    assert check.status == "warn" and "550.54.15" in check.detail and "580" in check.remedy
    nvidia_smi(*[H100] * 4)
    assert found("hotpotqa-4xh100")["GPU driver"].status == "ok"
    monkeypatch.setattr(doctor_preset, "torch_sees_gpu", lambda: False)
    check = found("hotpotqa-4xh100")["GPU driver"]
    assert check.status == "fail" and "PyTorch sees no GPU" in check.detail


def test_no_gpu_at_all(nvidia_smi):
    nvidia_smi()
    checks = found("hotpotqa-8xh100")
    assert checks["number of GPUs"].status == "fail" and "--preset laptop" in checks["number of GPUs"].remedy
    assert "GPU memory" not in checks and "GPU driver" not in checks


def test_packages_of_the_stages(monkeypatch):
    config = load_config("hotpotqa-4xh100")
    monkeypatch.setattr(doctor_preset, "installed", lambda name: None if name in ("datasets", "flash-attn") else "1")
    (check,) = doctor_preset.check_gpu_packages(config)
    assert check == Check("GPU packages", "fail", "flash-attn, datasets missing", doctor_preset.INSTALL)
    config.data.source, config.search.encoder = "here", "ngram"
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setattr(
        doctor_preset, "installed", lambda n: None if n in ("datasets", "sentence-transformers") else "1"
    )
    assert doctor_preset.check_gpu_packages(config)[0].status == "ok"


def test_flash_attn_is_loaded_before_anything_is_downloaded(monkeypatch, tmp_path):
    """As the extension of a wheel for another glibc or torch fails: installed, and not to be loaded."""
    monkeypatch.setattr(doctor_preset, "installed", lambda name: "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    (tmp_path / "flash_attn.py").write_text("import ctypes\nctypes.CDLL('flash_attn_2_cuda.so')\n")
    packages, check = doctor_preset.check_gpu_packages(load_config("hotpotqa-4xh100"))
    assert (packages.status, check.name, check.status) == ("ok", "flash-attn", "fail")
    assert "OSError: flash_attn_2_cuda.so" in check.detail and "Docker" in check.remedy
    (tmp_path / "flash_attn.py").write_text("VERSION = '2.8.3, of another import'\n")
    assert doctor_preset.check_gpu_packages(load_config("hotpotqa-4xh100"))[1].status == "ok"
    sys.modules.pop("flash_attn", None)


def test_what_is_on_the_disk_need_not_fit_again(monkeypatch, tmp_path):
    config = load_config("hotpotqa-4xh100", algorithm="grpo")
    need = sum(doctor_preset.plan.disk(config, SHAPE).values())
    free = int(need) - GIB
    monkeypatch.setattr(doctor_preset.shutil, "disk_usage", lambda p: Usage(9, 9, free))
    check = doctor_preset.check_space(config, SHAPE, tmp_path)
    assert check.status == "fail" and "AGENT_R1_HOME" in check.remedy
    (tmp_path / "artifacts" / "index").mkdir(parents=True)
    with (tmp_path / "artifacts" / "index" / "vectors.npy").open("wb") as file:
        file.truncate(2 * GIB)  # sparse: it takes no room here
    assert doctor_preset.check_space(config, SHAPE, tmp_path).status == "ok"


def test_host_memory_counts_one_index():
    config = load_config("hotpotqa-4xh100", algorithm="grpo")
    assert doctor_preset.check_host(config, SHAPE, 20 * GIB).status == "fail"
    assert (
        doctor_preset.check_host(config, SHAPE, 85 * GIB).status == "ok"
    )  # 80 with one search service, 170 with eight indexes
    assert doctor_preset.check_host(config, SHAPE, None).status == "warn"


def test_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_preset.shutil, "disk_usage", lambda p: Usage(9, 9, 64 * 2**20))  # Docker's own choice
    check = doctor_preset.check_shm()
    assert check.status == "warn" and "--shm-size=8g" in check.remedy
    monkeypatch.undo()
    assert doctor_preset.check_shm(str(tmp_path / "nowhere")).status == "warn"


def test_a_model_that_nobody_knows(monkeypatch, nvidia_smi):
    config = load_config("hotpotqa-4xh100")
    config.model.path = "some/model"
    (check,) = doctor_preset.check_preset(config)
    assert check.status == "fail" and "some/model" in check.detail
