"""Call a model through a vLLM server, instead of the local sampler.

In: prompts as token ids. Out: `Generation`s with the sampled ids and their log-probabilities, as
from any `Policy`.
Next: the same episode loop as in training. An export is checked with `transformers`, whose models
are read here.

A server's chat endpoint would decode the sampled tokens and encode them again in the next turn. The
endpoint /v1/completions takes a prompt of ids and returns the sampled ids. To stream, set
`Policy.on_token`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import httpx
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.core import Generation, Policy, Sampling
from agent_r1.ground.errors import AgentR1Error, LostConnection, first_line
from agent_r1.model import decoder
from agent_r1.model import files as model_files

if (
    TYPE_CHECKING
):  # importing its model classes takes seconds, and a conversation with vLLM does not need them
    from transformers import PreTrainedModel

AnyModel = Union["PreTrainedModel", decoder.Decoder]


# ------------------------------------------------------------------------------------- transformers


def load_transformers(
    folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Read a model folder: safetensors only, without its code.

    Raise AgentR1Error naming the fault.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    raw = model_files.read_config(folder)
    try:
        sizes = model_files.sizes_in(sorted(folder.glob("*.safetensors")))
        sizes_in_config = raw.get("vocab_size"), raw.get("hidden_size")
        numbers: list[int] = []
        for name in sizes:
            numbers += [int(n) for n in re.findall(r"\.(\d+)\.", name)]
        layers = 1 + max(numbers, default=-1)
        # transformers fills missing weights with random numbers, however much memory that takes.
        if sizes and (
            None not in sizes_in_config
            and sizes_in_config not in sizes.values()
            or layers < raw.get("num_hidden_layers", 0)
        ):
            raise ValueError(
                "config.json has another vocab_size, hidden_size or num_hidden_layers than its "
                "weights"
            )
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a config.json can break its model classes anywhere
        raise AgentR1Error(
            f"{folder} cannot be loaded by transformers ({first_line(error)})", code="damaged_model"
        ) from None
    if missing := sorted(report["missing_keys"]):  # transformers would continue with random numbers
        raise AgentR1Error(
            f"{folder} lacks {len(missing)} weights of its model, the first {missing[0]}; make it "
            "again",
            code="damaged_model",
        )
    return model.eval().to(device)


def load_any(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> AnyModel:
    """Read a model folder: as a `Decoder` if possible, else with `transformers`."""
    try:
        model_files.read_shape(folder)
    except model_files.OtherModelError:
        return load_transformers(folder, device, dtype)
    return model_files.load_model(folder, device, dtype)


@torch.inference_mode()
def token_logprobs(model: AnyModel, ids: list[int]) -> Tensor:
    """Compute log pi(token | all tokens before it), to check a converted model.

    float32 [T], 0 for the first token.
    """
    ids_T = torch.tensor(ids, device=next(model.parameters()).device)
    if isinstance(model, decoder.Decoder):
        positions = torch.arange(len(ids), device=ids_T.device)
        logits_TV = model.logits(model(ids_T[None], positions[None], decoder.causal_attention))[0]
    else:
        logits_TV = model(ids_T[None]).logits[0]
    logprobs_TV = logits_TV.float().log_softmax(dim=-1)
    return F.pad(logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0], (1, 0))


# ----------------------------------------------------------------------------------------- a server


class ServerPolicy(Policy):
    """`Policy` over a vLLM server. Any number of episodes and event loops may share it."""

    ATTEMPTS = 4
    """Connection attempts, half a second apart.

    A request whose answer has begun is never repeated.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        model: str,
        stop_ids: tuple[int, ...],
        diagnose: Callable[[], str | None] | None = None,
        use_seeds: bool = True,
    ):
        """`diagnose` returns why the server died, or None while it lives (see
        `serve.VllmServer.diagnose`).

        `use_seeds=False` omits the seeds of requests: on a GPU, vLLM samples seeded requests one
        after the other.
        """
        self.use_seeds = use_seeds
        self.url = url
        self.model = model
        self.stop_ids = frozenset(stop_ids)
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._clients: dict[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, int]
        ] = {}  # with its number of users
        self._diagnose = diagnose or (lambda: None)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """See `Policy.generate`.

        Raise AgentR1Error if the server refuses or dies, LostConnection while it lives.
        """
        request = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": None
            if sampling.seed is None or not self.use_seeds
            else sampling.seed % 2**63,  # ours have 64 bits, vLLM's a sign
            "stop_token_ids": sorted(self.stop_ids),
            # Set explicitly: generation_config.json of published models often has a repetition
            # penalty.
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"logprobs": 0, "return_token_ids": True, "stream": self.on_token is not None},
        }
        for attempt in range(self.ATTEMPTS):
            try:
                return await self._ask(request, session)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if self._diagnose() or attempt + 1 == self.ATTEMPTS:
                    raise self._server_error(f"does not answer ({first_line(error)})") from None
                await asyncio.sleep(0.5)
            except (
                httpx.HTTPError,
                httpx.StreamError,
                ValueError,
                KeyError,
                TypeError,
                IndexError,
            ) as error:
                await asyncio.sleep(
                    0.2
                )  # a process that has just closed the connection may take a moment to die
                raise self._server_error(
                    f"broke off ({type(error).__name__}: {first_line(error)})"
                ) from None
        raise AssertionError("unreachable")

    async def _ask(self, request: dict[str, Any], session: str | None) -> Generation:
        token_ids: list[int] = []
        logprobs: list[float] = []
        # Leaving the block aborts the request.
        async with (
            self._client() as client,
            client.stream("POST", f"{self.url}/completions", json=request) as response,
        ):
            if response.status_code != 200:
                raise AgentR1Error(
                    f"the model server refused ({response.status_code}): "
                    f"{_reason(await response.aread())}",
                    code="server_refused",
                )
            async for choice in _choices(response, request["stream"]):
                new = choice["token_ids"] or []
                token_ids += new
                logprobs += choice["logprobs"]["token_logprobs"] if new else []
                if new and self.on_token is not None:
                    self.on_token(session, new)
                if choice["finish_reason"] is not None:
                    if choice["finish_reason"] not in ("stop", "length") or len(token_ids) != len(
                        logprobs
                    ):
                        raise AgentR1Error(
                            f"the model server ended a turn with {choice['finish_reason']!r}; see "
                            "its log",
                            code="server_failed",
                        )
                    return Generation(token_ids, logprobs, choice["finish_reason"])
        raise ValueError("the answer has no end")

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Share one client among an event loop's requests, and close it after the last.

        No client outlives its loop or keeps a connection to a server that has restarted.
        """
        loop = asyncio.get_running_loop()

        # trust_env: the loopback needs no proxy. No read timeout: a turn may queue, and the episode
        # has a deadline. As many connections as episodes; idle ones expire before vLLM drops them
        # (5 s).
        client, users = self._clients.get(loop) or (
            httpx.AsyncClient(
                timeout=httpx.Timeout(5.0, read=None, pool=None), trust_env=False, verify=False,
                headers=self._headers,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            ), 0,
        )  # fmt: skip
        self._clients[loop] = client, users + 1
        try:
            yield client
        finally:
            self._clients[loop] = client, self._clients[loop][1] - 1
            if self._clients[loop][1] == 0:
                del self._clients[loop]
                await client.aclose()

    def release(self, session: str) -> None:
        """Do nothing: the server frees the cache of a conversation by itself."""

    def _server_error(self, what: str) -> AgentR1Error:
        cause = self._diagnose()
        hint = cause or "is it running? its log may say more"
        message = f"the model server at {self.url} {what}; {hint}"
        return (
            AgentR1Error(message, code="server_gone")
            if cause
            else LostConnection(message, code="lost_connection")
        )


async def _choices(response: httpx.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    """Yield the pieces of an answer: server-sent events, or everything at once."""
    if not stream:
        yield json.loads(await response.aread())["choices"][0]
        return
    async for line in response.aiter_lines():
        event_text = line.removeprefix("data:").strip()
        if not line.startswith("data:") or event_text == "[DONE]":
            continue
        event = json.loads(event_text)
        if "error" in event:
            raise AgentR1Error(
                f"the model server failed in mid-answer: {_reason(event_text.encode())}",
                code="server_failed",
            )
        if event["choices"]:
            yield {"logprobs": None} | event["choices"][0]


def _reason(body: bytes) -> str:
    """Extract the message of an error body, in vLLM's or FastAPI's form."""
    try:
        record = json.loads(body)
        error = record.get("error", record)
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = None
    return str(text or body.decode("utf-8", "replace"))[:300]
