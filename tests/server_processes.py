"""A model server in a process of its own, and what is left of it when that process is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_r1.cluster.serve import VllmServer

PARENT = """
import sys, time
from pathlib import Path
from agent_r1.config import from_yaml, load_config
from agent_r1.env import dialect_of
from agent_r1.cluster.serve import vllm_server
model, file = map(Path, sys.argv[1:3])
config = from_yaml(file)
spoken = dialect_of(config.env)
with vllm_server(model, config.rollout, config.trainer, dialect=spoken) as server:
    print("server", server.process.pid, server.port, server.api_key, flush=True)
    time.sleep(1000)
"""


@dataclass
class ServerOfAnother:
    """A server that another process has started."""

    parent: subprocess.Popen
    pid: int
    port: int
    api_key: str
    name = VllmServer.name
    url = VllmServer.url


@contextmanager
def server_of_another(model: Path, config: Path) -> Iterator[ServerOfAnother]:
    """Start a process that serves a model with the settings of a run's file; kill it at the end."""
    command = [sys.executable, "-c", PARENT, str(model), str(config)]
    parent = subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in parent.stdout if line.startswith("server "))
        pid, port, api_key = line.split()[1:]
        yield ServerOfAnother(parent, int(pid), int(port), api_key)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def alive(pid: int) -> bool:
    """Is there such a process, and is it more than a zombie that nobody has collected yet?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def children(pid: int) -> list[int]:
    """All descendants."""
    found = [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]
    return found + [grandchild for child in found for grandchild in children(child)]
