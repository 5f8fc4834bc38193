"""Run the commands of docs/first-gpu-agent.md that need no GPU, in a minimal Debian root.

The page is written for an empty Ubuntu 24.04. Here the root is Debian's minbase, made by mmdebstrap
with the packages that the page names. So a program that the page forgot is missing here, too. A
stand-in for nvidia-smi states a card and a driver. Needs root, unshare and `apt-get install
mmdebstrap`.

Not run: apt-get itself (Ubuntu's archive), tmux (a terminal), the installation of 11 GB
(`PART=gpu_pins`), training, and `inference.sh` (vLLM on the card). `export` and `tar` get a run of
the preset small under the name that the page uses, by this environment's packages.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-gpu-agent.md"
DEBIAN = {"python3.12-venv": "python3-venv", "python3.12-dev": "python3-dev"}
"""Ubuntu 24.04's packages, and those of Debian 12, whose Python is 3.11."""
NOT_RUN = ("apt-get", "tmux", "bash inference.sh")
RUN = "first-agent-1xh100-grpo"
SMALL_RUN = (
    f"train grpo --preset small --run {RUN} --plain data.train=16 data.val=4 "
    "data.test=4 data.cold=60 cold_start.copy_steps=2 cold_start.mix_steps=2 cold_start.probe=0 "
    "trainer.steps=1 rollout.prompts_per_step=4"
)
"""It writes the files that `export` and `tar` take."""


def run() -> dict[str, Any]:
    assert shutil.which("mmdebstrap"), "it is not installed: apt-get install mmdebstrap"
    commands = page_commands()
    with tempfile.TemporaryDirectory(prefix="agent-r1-page-gpu-") as folder:
        root = Path(folder) / "root"
        make_root(root, commands)
        check_an_old_driver(root, commands)
        state_driver(root, "580.95.05")
        count = 0
        for command in commands:
            if command.startswith(NOT_RUN) or is_training(command):
                continue
            print(f"  {command}", flush=True)
            if command.startswith(".venv-gpu"):
                make_environment(root)
            check_command(root, command)
            count += 1
    return {"commands": len(commands), "run": count, "not_run": len(commands) - count}


def page_commands() -> list[str]:
    """Return the page's commands, in its order."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


def is_training(command: str) -> bool:
    """Return whether the command installs the packages of a GPU and trains."""
    return command.startswith("bash speedrun-nodocker.sh") and "--dry-run" not in command


def make_root(root: Path, commands: list[str]) -> None:
    """Make the minimal root, with the packages of the page's apt-get line, and a repository."""
    [line] = [words for words in commands if words.startswith("apt-get install")]
    packages = [DEBIAN.get(name, name) for name in line.split()[3:]]
    print(f"  a minimal root with {', '.join(packages)} ...", flush=True)
    include = f"--include={','.join(packages)}"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(root)]
    subprocess.run(command, check=True)
    repository = root / "srv" / "agent-r1.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), str(repository)], check=True)


def state_driver(root: Path, version: str) -> None:
    """Put a program in nvidia-smi's place that states an H100 with this driver."""
    program = root / "usr/local/bin/nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, {version}, 9.0'\n")
    program.chmod(0o755)


def call(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in the root, in the checkout once there is one."""
    inside = "export HOME=/root PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin; cd /root; "
    inside += "cd agent-r1 2>/dev/null; git config --global safe.directory '*'; " + command
    folders = [sysconfig.get_path("purelib"), sys.base_prefix]
    mounts = [f"mount --bind /proc {root}/proc", f"mount --bind /dev {root}/dev"]
    for place in folders:
        target = shlex.quote(f"{root}{place}")
        mounts.append(f"mkdir -p {target} && mount --bind {shlex.quote(place)} {target}")
    script = " && ".join([*mounts, f"exec chroot {root} bash -c {shlex.quote(inside)}"])
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def check_command(root: Path, command: str) -> None:
    """Run one command of the page. Raises AssertionError with what it printed when it fails."""
    if command.startswith("cd "):  # every call begins there
        assert (root / "root" / command.split()[1]).is_dir(), command
        return
    done = call(root, command.replace("git clone URL", "git clone --quiet /srv/agent-r1.git"))
    assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    if "--gpu-hour" in command:
        assert "$" in done.stdout, f"no price in: {done.stdout}"
    if command.startswith("bash speedrun"):
        assert "requirements/verl-gpu.txt" in done.stdout, done.stdout


def check_an_old_driver(root: Path, commands: list[str]) -> None:
    """Check that the training command stops before it installs anything, and names a remedy."""
    state_driver(root, "535.183.01")
    check_command(root, "git clone URL agent-r1")
    [command] = [words for words in commands if is_training(words) and "--resume" not in words]
    done = call(root, command)
    text = done.stdout + done.stderr
    print(f"  with driver 535: {text.strip().splitlines()[-1]}", flush=True)
    assert done.returncode != 0 and "driver" in text, text
    assert not (root / "root/agent-r1/.venv-gpu/lib").exists(), "it installed something"
    shutil.rmtree(root / "root/agent-r1")


def make_environment(root: Path) -> None:
    """Put an environment in .venv-gpu's place: this one's packages and the checkout's code.

    And make the run that the page exports. All of it is done once.
    """
    checkout = root / "root/agent-r1"
    if (checkout / ".venv-gpu").exists():
        return
    packages = sysconfig.get_path("purelib")
    paths = f"/root/agent-r1/src\n/root/agent-r1/build/types\n{packages}\n"
    script = "\n".join(
        [
            "python3 -m venv --without-pip .venv-gpu",
            f"printf %s {shlex.quote(paths)} > .venv-gpu/lib/python3.11/site-packages/here.pth",
            "mkdir -p build/types && ln -s ../../recipes build/types/agent_r1_recipes",
            "printf '#!/bin/sh\\nexec /root/agent-r1/.venv-gpu/bin/python -m agent_r1 \"$@\"\\n' "
            "> .venv-gpu/bin/agent-r1",
            "chmod +x .venv-gpu/bin/agent-r1",
            f".venv-gpu/bin/agent-r1 {SMALL_RUN}",
            f".venv-gpu/bin/agent-r1 eval --run {RUN} --before",
            f".venv-gpu/bin/agent-r1 eval --run {RUN}",
            f".venv-gpu/bin/agent-r1 report --run {RUN}",
        ]
    )
    done = call(root, f"set -e\n{script}")
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
