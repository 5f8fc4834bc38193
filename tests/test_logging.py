"""What a run writes and shows: whole lines whatever kills it, and a screen that model text cannot
touch."""

from __future__ import annotations

import io
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from conftest import fails_with
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agent_r1.config.settings import RolloutConfig
from agent_r1.ground.files import read_jsonl
from agent_r1.training.run import graceful_interrupt
from agent_r1.watch import dashboard
from agent_r1.watch.dashboard import Dashboard
from agent_r1.watch.log import STEP_KEY, MetricsFile, first_agent_step, time_to, trackers

RUN = ("laptop-ppo-0", "preset laptop · ppo · 0.52 M parameters", 100)
EVIL = "a[bold red]b[/]\x1b]0;owned\x07\x1b[2J\rc\u202e\x9b1m"


def line(step: int) -> dict:
    return {
        STEP_KEY: step,
        "reward/em": 0.41,
        "critic/score/mean": 0.38,
        "tool_calls/mean": 1.62,
        "actor/entropy": 0.31,
        "actor/ppo_kl": 0.002,
        "timing_s/step": 0.61,
        "timing_s/gen": 0.3,
        "perf/agent_tokens_per_s": 31000.0,
    }


# ------------------------------------------------------------------------------------ metrics.jsonl


def test_numbers_come_back_and_infinities_are_null(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    file.append(
        {
            STEP_KEY: 1,
            "a": np.float32(0.5),
            "b": float("nan"),
            "c": -np.inf,
            "d": None,
            "e": "x",
            "f": np.int64(3),
        }
    )
    # A second reader sees the line while the run goes on.
    assert read_jsonl(file.path) == [
        {STEP_KEY: 1, "a": 0.5, "b": None, "c": None, "d": None, "e": "x", "f": 3.0}
    ]


@given(cut=st.integers(0, 200), steps=st.integers(1, 5))
def test_any_cut_loses_at_most_the_line_it_hits(tmp_path_factory, cut, steps):
    file = MetricsFile(tmp_path_factory.mktemp("m") / "metrics.jsonl")
    for step in range(1, steps + 1):
        file.append({STEP_KEY: step, "text": "naïve\n"})
    kept = file.path.read_bytes()[:cut]
    file.path.write_bytes(kept)  # what kill -9 leaves behind
    survivors = list(range(1, kept.count(b"\n") + 1))
    assert [record[STEP_KEY] for record in file.read()] == survivors
    file.truncate_after(50)  # as every run begins
    file.append({STEP_KEY: 99})
    assert [record[STEP_KEY] for record in file.read()] == [*survivors, 99]


def test_truncate_after_drops_later_steps_and_is_atomic(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(3)  # no file yet
    for step in range(1, 8):
        file.append(line(step))
    file.truncate_after(5)
    assert file.read() == [line(step) for step in range(1, 6)] and os.listdir(tmp_path) == [
        "metrics.jsonl"
    ]
    before = file.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        file.truncate_after(0)
    assert file.path.read_bytes() == before


def test_what_it_took_until_validation_reached_a_score_by_hand():
    """Four steps of 2 x 3 episodes; validated after the second, .7, and the fourth, .9. A refill
    played 9 in the third."""
    lines = [
        {STEP_KEY: step, "timing_s/step": 0.5 * step, "timing_s/testing": 100.0}
        for step in (1, 2, 3, 4)
    ]
    lines[1]["val-core/tinyhop/acc/mean@1"], lines[3]["val-core/tinyhop/acc/mean@1"] = 0.7, 0.9
    lines[2]["rollout/episodes_played"] = 9
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=3)
    assert time_to(0.9, lines, rollout, "rloo") == {
        "val": 0.9,
        "step": 4,
        "episodes": 27,
        "seconds": 5.0,
    }
    assert time_to(0.7, lines, rollout, "remax") == {
        "val": 0.7,
        "step": 2,
        "episodes": 16,
        "seconds": 1.5,
    }
    assert time_to(0.95, lines, rollout, "ppo") == {
        "val": 0.95,
        "step": None,
        "episodes": None,
        "seconds": None,
    }


def test_the_first_agent_is_the_first_validation_of_nine_tenths():
    key = "val-core/tinyhop/acc/mean@1"
    scores = [{}, {key: 0.895}, {}, {key: 0.9}, {}, {key: 0.95}]
    lines = [{STEP_KEY: step} | score for step, score in enumerate(scores, 1)]
    assert [first_agent_step(lines[:n]) for n in range(7)] == [None] * 4 + [4] * 3


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with fails_with("damaged_file"):
        read_jsonl(path)
    path.write_text('{"a": 1}\n{"a": \n')  # the last line, though it got its newline
    assert read_jsonl(path) == [{"a": 1}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_is_one_clear_line():
    with fails_with("cannot_write"):
        MetricsFile(Path("/dev/full")).append(line(1))


# ----------------------------------------------------------------------------------------- trackers


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """The real packages, without a key, and an empty home directory; wandb's helper process ends
    with the test."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield tmp_path
    wandb.teardown()


def test_wandb_without_a_key_is_offline_and_never_asks(alone, capsys):
    with trackers(["wandb"], alone, {"seed": 0}) as track:
        track({STEP_KEY: 4, "a": 1.0, "b": float("nan"), "c": "text"})
    assert (
        list((alone / "wandb").glob("offline-run-*/*.wandb"))
        and "wandb sync" in capsys.readouterr().out
    )


class Server:
    """Stands in for W&B's server, which takes an account: how `wandb.init` was called, and what a
    run was sent."""

    def __init__(self, monkeypatch):
        self.url, self.seen = "https://wandb.example/run", []
        monkeypatch.setattr(wandb, "init", self.init)

    def init(self, *, mode, **settings):
        self.mode, self.settings, self.disabled = mode, settings, mode == "disabled"
        return self

    def log(self, numbers, step):
        self.seen.append(step)

    def finish(self):
        self.seen.append("end")


KEY = "5ec1e7" * 8


def test_a_server_that_cannot_be_used_costs_no_run_and_no_key(alone, monkeypatch, capsys):
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    asked, server = [], ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with trackers(["wandb"], alone, {}) as track:
        track({STEP_KEY: 1, "a": 2.0})
    server.shutdown()
    said = "".join(capsys.readouterr())
    assert asked and "the server cannot be used: " in said and KEY not in said


def go_on(run_dir: Path, names=("wandb",)) -> None:
    """A run that had logged five steps and goes on from its checkpoint of step 3."""
    with trackers(names, run_dir, {}, 4) as track:
        for step in (4, 5, 6):
            track({STEP_KEY: step, "a": step})


def test_online_a_resumed_run_is_the_same_run(alone, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    first, again = Server(monkeypatch), Server(monkeypatch)
    go_on(alone)
    assert again.seen == [4, 5, 6, "end"] and again.settings["resume"] == "allow"
    monkeypatch.setattr(wandb, "init", first.init)
    go_on(alone)
    assert first.settings["id"] == again.settings["id"]


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path):
    with trackers(["tensorboard"], tmp_path, {}):
        pass  # killed before its first step
    with trackers(["tensorboard"], tmp_path, {}) as track:
        for step in range(1, 6):
            track({STEP_KEY: step, "a": -step, "b": float("nan")})
    go_on(tmp_path, ["tensorboard"])
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("a")] == [
        (1, -1), (2, -2), (3, -3), (4, 4), (5, 5), (6, 6)
    ]  # fmt: skip
    assert board.Tags()["scalars"] == [STEP_KEY, "a"]


# -------------------------------------------------------------------------------------- plain lines


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    time = [100.0]
    monkeypatch.setattr(dashboard, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def test_pipe_gets_one_line_a_step_and_no_control_characters(now):
    out = io.StringIO()
    with Dashboard(*RUN, console=Console(file=out, get_time=lambda: now[0])) as board:
        assert board.plain
        for step in (90, 91, 92):
            now[0] += 2.0
            board.step(line(step))
        board.transcript(EVIL, [{"text": EVIL, "info": {}}], 1.0)
        board.note(f"saved {EVIL}")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("step  92/100") and lines[2].endswith(
        "eta 16 s"
    )  # 2 s a step, 8 to go
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for text in lines for c in text)


def test_ctrl_c_is_acknowledged_before_the_step_ends(now):
    out = io.StringIO()
    with (
        Dashboard(*RUN, console=Console(file=out)) as board,
        graceful_interrupt(board.finishing) as interrupted,
    ):
        board.step(line(8) | {"timing_s/step": 90.0})
        now[0] += 20.0
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted and "finishing step 9, about 70 s" in out.getvalue().splitlines()[-1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


# ---------------------------------------------------------------------------------------- live view


def live(width: int, height: int = 40) -> tuple[Dashboard, io.StringIO]:
    out = Tty()
    console = Console(
        file=out, force_terminal=True, width=width, height=height, color_system="truecolor"
    )
    return Dashboard(*RUN, console=console), out


def view_lines(board: Dashboard) -> list[str]:
    return [
        "".join(piece.text for piece in line).rstrip()
        for line in board.console.render_lines(board._view())
    ]


def test_model_text_cannot_style_or_command_the_terminal():
    board, out = live(120)
    with board:
        board.step(line(1))
        board.transcript(EVIL, [{"text": EVIL, "info": {"tool_calls": [{"content": EVIL}]}}], 1.0)
        board.note(EVIL)
        lines = view_lines(board)
    assert (
        sum("a[bold red]b[/]␛]0;owned" in text for text in lines) == 4
    )  # markup and commands stay visible text
    assert not any(
        bad in out.getvalue() for bad in ("\x1b]0;", "\x1b[2J\r", "\x07", "\x9b", "\u202e")
    )
