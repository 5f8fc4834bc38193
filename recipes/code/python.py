"""Run the agent's Python programs in a sandbox. In: code. Out: what it printed.

There are two backends: a sandbox of this machine's kernel (`sandbox.py`), or a SandboxFusion server
(2412.00535; bytedance/SandboxFusion), which `env.sandbox` names. Each call is a new process and
leaves nothing for the next. An exception is an ordinary result: the agent reads the traceback and
may correct the program.
"""

from __future__ import annotations

from typing import Any

from agent_r1 import (
    AgentR1Error,
    BaseTool,
    ConfigError,
    InvalidArgumentsError,
    TooLongError,
    first_line,
    send,
)
from agent_r1_recipes.code import sandbox
from agent_r1_recipes.code.sandbox import MAX_OUTPUT, MAX_SOURCE, Ran
from agent_r1_recipes.code.settings import CodeSettings


class PythonTool(BaseTool):
    """Run programs for an agent."""

    name = "python"
    description = "Run a Python program and read what it prints."
    parameters = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The program. Print what you want to see."}
        },
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(self, runner: Runner, within_s: float):
        super().__init__()
        self.runner = runner
        self.timeout_s = within_s
        if isinstance(runner, sandbox.Sandbox):
            # The wait for a slot and the start of a process do not count as the program's time.
            self.timeout_s += sandbox.QUEUE_S + sandbox.SANDBOX_START_S
        self.within_s = 0.9 * within_s
        """Time from the program's start, and time to end the process and return its output.

        That is the output so far.
        """

    def execute(self, args: dict[str, Any]) -> str:
        if "\0" in args["code"] or len(args["code"].encode("utf-8", "replace")) > MAX_SOURCE:
            raise InvalidArgumentsError(
                f"a program has at most {MAX_SOURCE} bytes, none of them zero; write a shorter one"
            )
        result = self.runner.run(args["code"], self.within_s)
        lines = []
        if result.output.rstrip():
            lines.append(result.output.rstrip())
        if result.ended == "time":
            lines.append(f"[ended: {self.within_s:g} s are over]")
        elif result.ended == "output":
            lines.append(f"[ended: it printed over {MAX_OUTPUT} bytes]")
        elif result.code not in (0, 1):  # 1: an exception, whose traceback says more
            lines.append(f"[exit code {result.code}]")
        return "\n".join(lines) or "[it printed nothing]"


def make(env: CodeSettings | None = None, **_: Any) -> PythonTool:
    """Make the tool from the resources of a run, for `make_tools`.

    Raises ConfigError where code cannot be confined.
    """
    env = env or CodeSettings()
    return PythonTool(make_runner(env), env.tool_timeout_s)


def make_runner(env: CodeSettings) -> Runner:
    """Choose where model-written code runs, by `env.sandbox`.

    Raises ConfigError if nothing protects this machine from it.
    """
    if env.sandbox in ("auto", "unconfined"):
        return local_sandbox(env)
    return SandboxFusion(env.sandbox)


def local_sandbox(env: CodeSettings) -> sandbox.Sandbox:
    """Return this process's sandbox. Raises ConfigError if there is none."""
    try:
        return sandbox.get_sandbox(env.sandbox == "unconfined")
    except AgentR1Error as error:
        raise ConfigError(
            f"model-written code is refused, because nothing here can confine it ({error}); name a "
            "SandboxFusion server with env.sandbox=http://..., or, if this machine has nothing to "
            "protect, env.sandbox=unconfined (docs/safety.md)",
            code="no_sandbox",
        ) from None


class SandboxFusion:
    """A client of `POST /run_code`. The server has its own limits of memory and processes."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def run(self, source: str, within_s: float) -> Ran:
        """Run a program on the server.

        Raises AgentR1Error if the server fails or is another one.
        """
        import httpx

        # A model can write half of a surrogate pair, which JSON in UTF-8 cannot carry.
        source = source.encode("utf-8", "replace").decode()
        request = {
            "language": "python",
            "code": source,
            "run_timeout": within_s,
            "memory_limit_MB": sandbox.MEMORY >> 20,
        }
        try:
            # The server's text is cut off, because a program may have written it.
            answer = send(
                "POST",
                f"{self.url}/run_code",
                body=request,
                within_s=within_s + 1,
                max_bytes=16 * MAX_OUTPUT,
            ).result()
            reply: dict[str, Any] = {"message": f"status {answer.status}"}
            if answer.status == 200:
                reply = answer.json()
            result = None
            if reply.get("status") in ("Success", "Failed"):
                result = reply.get("run_result")
            if result is None:
                raise AgentR1Error(
                    f"the sandbox at {self.url} refused: "
                    f"{reply.get('message') or 'without a reason'}",
                    code="server_refused",
                )
            output = f"{result.get('stdout') or ''}{result.get('stderr') or ''}"[:MAX_OUTPUT]
            if result["status"] == "TimeLimitExceeded":
                return Ran(output, None, "time")
            # A program that the server could not end properly has the status Error and no code.
            code = 1 if result["return_code"] is None else int(result["return_code"])
            return Ran(output, code, None)
        except TooLongError:
            return Ran("", None, "output")
        except (httpx.TimeoutException, TimeoutError):
            return Ran("", None, "time")
        except httpx.HTTPError as error:
            raise AgentR1Error(
                f"the sandbox at {self.url} does not answer: {first_line(error)}",
                code="server_unreachable",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise AgentR1Error(
                f"{self.url} answers in an unknown form; is it a SandboxFusion server?",
                code="bad_answer",
            ) from None


Runner = sandbox.Sandbox | SandboxFusion
"""A place where programs run."""
