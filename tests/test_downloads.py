"""Downloads from a hub on the loopback, through the hub's real client: too many requests, and a connection that breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from runs import ROOT

CORPUS, COMMIT = b'{"_id": "1", "title": "T", "text": "x"}\n' * 100_000, "ab518f4d6fcca38d87c25209f94beba119d02014"


class Hub(BaseHTTPRequestHandler):
    """Says 429 to the first two requests, and hangs up in the middle of the first file that it sends."""

    asked: list[str] = []
    torn = False

    def do_GET(self):
        Hub.asked.append(f"{self.command} {self.path}")
        if len(Hub.asked) <= 2:
            return self.answer(429, b'{"error": "rate limited"}', {"Retry-After": "0"})
        if "/api/" in self.path:
            kind = f'"type": "file", "path": "corpus.jsonl", "size": {len(CORPUS)}, "oid": "{COMMIT}"'
            if "/tree/" in self.path:
                return self.answer(200, f"[{{{kind}}}]".encode())
            info = f'{{"id": "mteb/hotpotqa", "sha": "{COMMIT}", "siblings": [{{"rfilename": "corpus.jsonl"}}]}}'
            return self.answer(200, info.encode())
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        ends = {"ETag": '"abc"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            ends["Content-Range"] = f"bytes {start}-{len(CORPUS) - 1}/{len(CORPUS)}"
        if self.command == "GET" and not Hub.torn:
            Hub.torn = True
            self.answer(200, CORPUS[: len(CORPUS) // 2], ends | {"Content-Length": str(len(CORPUS))})
            self.close_connection = True
            return self.connection.close()
        self.answer(206 if start else 200, CORPUS[start:], ends)

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


FETCH = """
from agent_r1.ground import hub
from agent_r1.data.corpora import read_folder
hub.PAUSES_S = (0.1, 0.1, 0.1)
folder = hub.fetch("mteb/hotpotqa", ["corpus.jsonl"], kind="dataset")
print(sum(1 for _ in read_folder(folder)), "passages")
"""


@pytest.mark.slow
def test_a_download_outlives_429_and_a_broken_connection(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    variables |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", FETCH], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    server.shutdown()
    assert done.stdout.splitlines()[-1] == "100000 passages", (done.stdout, done.stderr[-2000:], Hub.asked)
    assert Hub.torn and "429" in done.stdout
