#!/usr/bin/env python3
"""In the place of vLLM (by AGENT_R1_VLLM): the same command line, health check and completions, and
faults on demand.

FAKE_VLLM is a comma-separated list:
    die          a traceback, and exit code 1, before anything is served
    deaf         never healthy
    slow         not healthy in the first second
    stubborn     ignores SIGTERM
    family       has a child process, as vLLM has its engine
    cut          dies after the first two tokens of an answer
    garbage      streams what is no JSON
    refuse       answers 400 with vLLM's error body
    broken       answers 500 with a page
    midway       an error event after the first token
    endless      never sends the end of an answer, and closes
    keep         keeps connections open, as vLLM does
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = set(os.environ.get("FAKE_VLLM", "").split(","))
BORN = time.monotonic()
IDS = json.loads(os.environ.get("FAKE_VLLM_IDS", "[11, 12, 13, 14]"))


def sampled(request):
    """What is left of IDS where vLLM would end: at a stop token of the request's or of the model's,
    or at the limit."""
    settings = Path(sys.argv[sys.argv.index("--model") + 1], "generation_config.json")
    ends = json.loads(settings.read_text())["eos_token_id"] if settings.is_file() else []
    ends = {*request.get("stop_token_ids", ()), *(ends if isinstance(ends, list) else [ends])}
    ids = IDS[: request.get("max_tokens")]
    ids = ids[: next((n for n, i in enumerate(ids, 1) if i in ends), len(ids))]
    return ids, "length" if len(ids) == request.get("max_tokens") and ids[
        -1
    ] not in ends else "stop"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1" if "keep" in MODE else "HTTP/1.0"

    def do_GET(self):
        ready = "deaf" not in MODE and ("slow" not in MODE or time.monotonic() - BORN > 1.5)
        self.answer(200 if ready else 503, "text/plain", b"")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("request", json.dumps(request), flush=True)
        os.write(
            1, f"connection {self.client_address[1]}\n".encode()
        )  # whole, whatever other threads print
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.answer(401, "application/json", b'{"error": "Unauthorized"}')
        if "refuse" in MODE:
            return self.answer(
                400, "application/json", b'{"error": {"message": "too long, says the server"}}'
            )
        if "broken" in MODE:
            return self.answer(500, "text/html", b"<h1>Internal Server Error</h1>")
        ids, finish_reason = sampled(request)
        logprobs = [-0.5 * i for i in ids]
        if not request["stream"]:
            whole = {
                "token_ids": ids,
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": finish_reason,
            }
            return self.answer(200, "application/json", json.dumps({"choices": [whole]}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if "cut" in MODE and index == 2:
                print("RuntimeError: the engine core has died", flush=True)
                os._exit(7)
            if "garbage" in MODE:
                self.event("no JSON")
            if "midway" in MODE and index:
                return self.event('{"error": {"message": "engine trouble"}}')
            piece = {
                "token_ids": [token],
                "logprobs": {"token_logprobs": [logprob]},
                "finish_reason": None,
            }
            self.event(json.dumps({"choices": [piece]}))
        if "endless" not in MODE:
            # The end may come by itself: without tokens, and without log-probabilities.
            self.event(json.dumps({"choices": [{"token_ids": [], "finish_reason": finish_reason}]}))
            self.event("[DONE]")

    def event(self, data):
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def answer(self, code, kind, body):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def main():
    if "stubborn" in MODE:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "family" in MODE:
        print("child", subprocess.Popen(["sleep", "300"]).pid, flush=True)
    if "die" in MODE:
        print("Traceback (most recent call last):\nValueError: no such model architecture")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    ThreadingHTTPServer.request_queue_size = 128
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("arguments", " ".join(sys.argv), flush=True)
    print("compiles", "TORCHDYNAMO_DISABLE" not in os.environ, flush=True)
    ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()


main()
