"""Room 1: downloads over a real connection that breaks, lies and changes its mind."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_r1.data import corpora, downloads
from agent_r1.data.corpora import beir_hotpotqa
from agent_r1.data.downloads import download
from agent_r1.errors import AgentR1Error

CONTENT = random.Random(0).randbytes(3_000_000)
SHA = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Site(ThreadingHTTPServer):
    """Serves `content` with ranges, as a web server does, and does to each request what `trouble` says, in turn."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag, self.trouble = CONTENT, '"v1"', []
        self.requests: list[tuple[str | None, int, int]] = []
        """Range asked for, status, bytes sent."""
        self.url = f"http://127.0.0.1:{self.server_port}/file"

    def handle_error(self, request, client_address):
        """A client that was killed, or hung up: what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        site: Site = self.server
        trouble = site.trouble.pop(0) if site.trouble else None
        wanted, content, status = self.headers["Range"], site.content, 200
        if isinstance(trouble, int) and trouble >= 400:
            site.requests.append((wanted, trouble, 0))  # noted before the answer, as the client may look at once
            self.send_response(trouble)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if wanted and self.headers["If-Range"] == site.tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            status = 206 if start < len(content) else 416
            content = content[start:]
        self.send_response(status)
        if status == 206:
            where = 7 if trouble == "wrong range" else start
            self.send_header("Content-Range", f"bytes {where}-{len(site.content) - 1}/{len(site.content)}")
        if site.tag:
            self.send_header("ETag", site.tag)
        self.send_header("Content-Length", str(len(content) if status != 416 else 0))
        sent = content[: trouble[1]] if isinstance(trouble, tuple) else content
        site.requests.append((wanted, status, len(sent)))
        self.end_headers()
        if status != 416:
            self.wfile.write(sent)
        if isinstance(trouble, tuple) and trouble[0] == "hang":
            time.sleep(60)
        if isinstance(trouble, tuple):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def site():
    with Site() as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.shutdown()


def test_a_whole_file_under_its_name_and_nothing_beside_it(site, tmp_path):
    path = download(site.url, tmp_path / "new" / "file.zip", SHA)
    assert path.read_bytes() == CONTENT and [p.name for p in path.parent.iterdir()] == ["file.zip"]
    download(site.url, path, SHA)
    assert len(site.requests) == 1  # what is there is not fetched again


def test_a_connection_that_drops_twice_costs_no_byte_twice(site, tmp_path):
    site.trouble = [("drop", 1_000_000), ("drop", 500_000)]
    assert download(site.url, tmp_path / "file", SHA, pause=0).read_bytes() == CONTENT
    assert [r[0] for r in site.requests] == [None, "bytes=1000000-", "bytes=1500000-"]
    assert sum(sent for _, _, sent in site.requests) == len(CONTENT)


def test_another_run_goes_on_where_the_last_gave_up(site, tmp_path):
    site.trouble = [("drop", 1_000_000)] + [503] * downloads.ATTEMPTS
    with pytest.raises(AgentR1Error, match="says 503.*1000000 bytes are kept in .*run the same command again"):
        download(site.url, tmp_path / "file", SHA, pause=0)
    assert not (tmp_path / "file").exists()
    assert download(site.url, tmp_path / "file", SHA).read_bytes() == CONTENT
    assert site.requests[-1] == ("bytes=1000000-", 206, 2_000_000)


def test_a_process_killed_in_the_middle_loses_nothing(site, tmp_path):
    site.trouble = [("hang", 2_000_000)]
    code = "import sys; from pathlib import Path; from agent_r1.data.downloads import *; download(sys.argv[1], Path(sys.argv[2]))"
    process = subprocess.Popen([sys.executable, "-c", code, site.url, tmp_path / "file"], stdout=subprocess.DEVNULL)
    part, deadline = tmp_path / "file.part", time.monotonic() + 100
    while not (part.exists() and part.stat().st_size > 1_000_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    assert kept >= 1_000_000 and not (tmp_path / "file").exists()
    assert download(site.url, tmp_path / "file", SHA).read_bytes() == CONTENT
    assert site.requests[-1] == (f"bytes={kept}-", 206, len(CONTENT) - kept)


def test_two_versions_are_never_glued_together(site, tmp_path):
    site.trouble = [("drop", 1_000_000)] + [500] * downloads.ATTEMPTS
    with pytest.raises(AgentR1Error):
        download(site.url, tmp_path / "file", pause=0)
    site.content, site.tag = CONTENT[::-1], '"v2"'
    assert download(site.url, tmp_path / "file").read_bytes() == CONTENT[::-1]
    assert site.requests[-1] == ("bytes=1000000-", 200, len(CONTENT))


@pytest.mark.parametrize("tag", ["", 'W/"weak"'])
def test_a_server_that_names_no_version_sends_everything_again(site, tmp_path, tag):
    site.tag, site.trouble = tag, [("drop", 1_000_000)]
    assert download(site.url, tmp_path / "file", SHA, pause=0).read_bytes() == CONTENT
    assert [request[0] for request in site.requests] == [None, None]


def test_a_part_longer_than_the_file_and_a_wrong_range_begin_anew(site, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT + b"more")
    (tmp_path / "file.part.version").write_text('"v1"')
    assert download(site.url, tmp_path / "file", SHA, pause=0).read_bytes() == CONTENT
    assert [request[1] for request in site.requests] == [416, 200]
    site.trouble = [("drop", 1_000_000), "wrong range"]
    assert download(site.url, tmp_path / "again", SHA, pause=0).read_bytes() == CONTENT


def test_a_wrong_checksum_is_not_kept(site, tmp_path):
    with pytest.raises(AgentR1Error, match="the sha256 is .* and should be 00; it was deleted"):
        download(site.url, tmp_path / "file", "sha256:00")
    assert not [p for p in tmp_path.iterdir() if p.name in ("file", "file.part")]


def test_what_will_not_get_better_is_not_tried_again(site, tmp_path):
    site.trouble = [404]
    with pytest.raises(AgentR1Error, match="404.*check the address"):
        download(site.url, tmp_path / "file", pause=0)
    assert len(site.requests) == 1


def test_nobody_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(AgentR1Error, match="0 bytes are kept"):
        download(url, tmp_path / "file", pause=0)


def test_no_room_is_said_before_the_first_byte(site, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(AgentR1Error, match="needs 0.0 GB on the disk .*free space"):
        download(site.url, tmp_path / "file")


# ------------------------------------------------------------------------------------------------------ BEIR's archive


def archive(tmp_path: Path, lines: list[str]) -> bytes:
    with zipfile.ZipFile(tmp_path / "made.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("hotpotqa/corpus.jsonl", "\n".join(lines) + "\n")
        file.writestr("hotpotqa/queries.jsonl", "{}\n")
    return (tmp_path / "made.zip").read_bytes()


def beir(site, tmp_path, count: int):
    checksum = f"md5:{hashlib.md5(site.content).hexdigest()}"
    return list(beir_hotpotqa(tmp_path / "downloads", site.url, checksum, count))


def test_beirs_archive_is_fetched_checked_and_counted(site, tmp_path):
    lines = [json.dumps({"_id": str(i), "title": f"T{i}", "text": "x", "metadata": {}}) for i in range(50)]
    site.content = archive(tmp_path, lines)
    site.trouble = [("drop", 200)]
    passages = beir(site, tmp_path, 50)
    assert [(p.id, p.title) for p in passages] == [(str(i), f"T{i}") for i in range(50)]
    with pytest.raises(AgentR1Error, match="has 50 passages and 51 are published; delete it"):
        beir(site, tmp_path, 51)
    assert len(site.requests) == 2


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """The hub's copy of BEIR's corpus: 50 passages in two files, in the form and under the names that it has there."""
    place = tmp_path / "server" / "corpus" / "corpus"
    place.mkdir(parents=True)
    for number, start in enumerate((0, 30)):
        rows = [{"_id": str(i), "title": f"T{i}", "text": "" if i == 7 else "x"} for i in range(start, 50)[:30]]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{number:04d}.parquet")
    asked = []

    def snapshot_download(repo_id, *, repo_type, revision, allow_patterns) -> str:
        asked.append((repo_id, repo_type, revision, allow_patterns))
        return str(tmp_path / "server")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return SimpleNamespace(place=place, asked=asked)


def test_beirs_corpus_comes_from_the_hub_where_its_server_does_not_answer(site, tmp_path, parquet, capsys):
    lines = [json.dumps({"_id": str(i), "title": f"T{i}", "text": "" if i == 7 else "x"}) for i in range(50)]
    site.content = archive(tmp_path, lines)
    from_archive = beir(site, tmp_path / "a", 50)
    assert parquet.asked == []
    site.trouble = [404]
    assert beir(site, tmp_path / "b", 50) == from_archive
    ((name, kind, revision, patterns),) = parquet.asked
    assert (name, kind, revision) == ("BeIR/hotpotqa", "dataset", "refs/convert/parquet")
    assert all(fnmatch.fnmatch(str(p.relative_to(tmp_path / "server")), patterns[0]) for p in parquet.place.iterdir())
    assert "404" in capsys.readouterr().out


def test_a_copy_on_the_hub_that_is_not_whole(site, tmp_path, parquet, monkeypatch):
    site.trouble = [404] * 3
    with pytest.raises(AgentR1Error, match="has 50 passages and 51 are published; delete it"):
        beir(site, tmp_path, 51)
    second = parquet.place / "0001.parquet"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(AgentR1Error, match="server cannot be read .*delete it"):
        beir(site, tmp_path, 50)

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(AgentR1Error, match=r"ConnectionError: no route.*put BEIR's archive at .*beir-hotpotqa.zip"):
        beir(site, tmp_path, 50)


def test_kilts_pages_are_fetched_and_counted(site, tmp_path, monkeypatch):
    pages = [{"wikipedia_id": i, "wikipedia_title": f"T{i}", "text": [f"T{i}\n", "A city.\n"]} for i in range(40)]
    site.content = "".join(json.dumps(page) + "\n" for page in pages).encode()
    site.trouble = [("drop", 500)]
    monkeypatch.setattr(corpora, "KILT_URL", f"{site.url}/kilt.json")

    def kilt(count: int, skipped: list, skip_bad: bool = False):
        monkeypatch.setattr(corpora, "KILT_PAGES", count)
        return [p.id for p in corpora.passages("kilt", [], tmp_path, skip_bad, skipped)]

    assert kilt(40, []) == [f"{i}-0" for i in range(40)]
    with pytest.raises(AgentR1Error, match="kilt.json has 40 lines and 41 are published; delete it"):
        kilt(41, [])
    path = tmp_path / "kilt.json"
    path.write_bytes(path.read_bytes().replace(b'{"wikipedia_id": 7,', b'{"wikipedia_id: 7,'))
    with pytest.raises(AgentR1Error, match=r"1 of 40 records are corrupt: line 8 \(no JSON\).*data.skip_bad=true"):
        kilt(40, [])
    skipped: list[str] = []
    assert len(kilt(40, skipped, skip_bad=True)) == 39 and skipped == [f"{path}: line 8 (no JSON)"]


def test_an_archive_of_something_else(site, tmp_path):
    site.content = b"PK nonsense"
    with pytest.raises(AgentR1Error, match="is no archive of BEIR"):
        beir(site, tmp_path, 1)
