"""What a run writes and shows: whole lines whatever kills it, and a screen that model text cannot touch."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import struct
import sys
import termios
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from hypothesis import given
from hypothesis import strategies as st
from letters import LetterEnv, SilentEnv, letters_run
from rich.cells import cell_len
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from agent_r1.config.settings import RolloutConfig
from agent_r1.env.hermes import split_turn
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import read_jsonl
from agent_r1.training import dashboard
from agent_r1.training.dashboard import Dashboard, plain_line, style_turn
from agent_r1.training.log import STEP, MetricsFile, time_to, trackers
from agent_r1.training.run import graceful_interrupt
from agent_r1_recipes.dialects.react import ReAct

RUN = ("laptop-ppo-0", "preset laptop · ppo · 0.52 M parameters", 100)
EVIL = "a[bold red]b[/]\x1b]0;owned\x07\x1b[2J\rc\u202e\x9b1m"


def line(step: int) -> dict:
    return {
        STEP: step, "reward/em": 0.41, "critic/score/mean": 0.38, "tool_calls/mean": 1.62, "actor/entropy": 0.31,
        "actor/ppo_kl": 0.002, "timing_s/step": 0.61, "timing_s/gen": 0.3, "perf/agent_tokens_per_s": 31000.0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- metrics.jsonl


def test_numbers_come_back_and_infinities_are_null(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    file.append({STEP: 1, "a": np.float32(0.5), "b": float("nan"), "c": -np.inf, "d": None, "e": "x", "f": np.int64(3)})
    # A second reader sees the line while the run goes on.
    assert read_jsonl(file.path) == [{STEP: 1, "a": 0.5, "b": None, "c": None, "d": None, "e": "x", "f": 3.0}]


@given(cut=st.integers(0, 200), steps=st.integers(1, 5))
def test_any_cut_loses_at_most_the_line_it_hits(tmp_path_factory, cut, steps):
    file = MetricsFile(tmp_path_factory.mktemp("m") / "metrics.jsonl")
    for step in range(1, steps + 1):
        file.append({STEP: step, "text": "naïve\n"})
    kept = file.path.read_bytes()[:cut]
    file.path.write_bytes(kept)  # what kill -9 leaves behind
    survivors = list(range(1, kept.count(b"\n") + 1))
    assert [record[STEP] for record in file.read()] == survivors
    file.truncate_after(50)  # as every run begins
    file.append({STEP: 99})
    assert [record[STEP] for record in file.read()] == [*survivors, 99]


def test_truncate_after_drops_later_steps_and_is_atomic(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(3)  # no file yet
    for step in range(1, 8):
        file.append(line(step))
    file.truncate_after(5)
    assert file.read() == [line(step) for step in range(1, 6)] and os.listdir(tmp_path) == ["metrics.jsonl"]
    before = file.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        file.truncate_after(0)
    assert file.path.read_bytes() == before


def test_what_it_took_until_validation_reached_a_score_by_hand():
    """Four steps of 2 x 3 episodes; validated after the second, .7, and the fourth, .9. A refill played 9 in the third."""
    lines = [{STEP: step, "timing_s/step": 0.5 * step, "timing_s/testing": 100.0} for step in (1, 2, 3, 4)]
    lines[1]["val-core/tinyhop/acc/mean@1"], lines[3]["val-core/tinyhop/acc/mean@1"] = 0.7, 0.9
    lines[2]["rollout/episodes_played"] = 9
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=3)
    assert time_to(0.9, lines, rollout, "rloo") == {"val": 0.9, "step": 4, "episodes": 27, "seconds": 5.0}
    assert time_to(0.7, lines, rollout, "remax") == {"val": 0.7, "step": 2, "episodes": 16, "seconds": 1.5}
    assert time_to(0.95, lines, rollout, "ppo") == {"val": 0.95, "step": None, "episodes": None, "seconds": None}


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(AgentR1Error, match="line 2"):
        read_jsonl(path)
    path.write_text('{"a": 1}\n{"a": \n')  # the last line, though it got its newline
    assert read_jsonl(path) == [{"a": 1}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_is_one_clear_line():
    with pytest.raises(AgentR1Error, match=r"No space left.*--resume"):
        MetricsFile(Path("/dev/full")).append(line(1))


# ------------------------------------------------------------------------------------------------------ trackers


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """The real packages, without a key, and an empty home directory; wandb's helper process ends with the test."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield tmp_path
    wandb.teardown()


def recording(run_dir: Path) -> tuple[str, list[dict[str, float]]]:
    """Id and history of the newest offline run, read from the file that `wandb sync` would upload: LevelDB's log format
    (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven bytes, with a protobuf in each record."""
    wandb.teardown()  # its helper process may still be writing when a run has finished
    (path,) = (run_dir / "wandb" / "latest-run").glob("*.wandb")
    data, at, whole, run_id, history = path.read_bytes(), 7, b"", "", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header at the end of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a record in one piece, or the last piece of one
            record, whole = Record.FromString(whole), b""
            run_id = record.run.run_id or run_id
            if record.HasField("history"):
                items = {(i.nested_key or [i.key])[0]: json.loads(i.value_json) for i in record.history.item}
                history.append({key: value for key, value in items.items() if key not in ("_timestamp", "_runtime")})
    return run_id, history


def test_what_is_not_installed_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for name in ("wandb", "tensorboard"):
        with pytest.raises(ConfigError, match=rf"pip install .agent-r1\[{name}\]"), trackers([name], tmp_path, {}):
            pass


def test_wandb_without_a_key_is_offline_and_never_asks(alone, capsys):
    with trackers(["wandb"], alone, {"seed": 0}) as track:
        track({STEP: 4, "a": 1.0, "b": float("nan"), "c": "text"})
    assert recording(alone)[1] == [{"_step": 4, STEP: 4, "a": 1.0}]
    assert f"offline (no key in WANDB_API_KEY or ~/.netrc); upload with `wandb sync {alone}/wandb/offline-run-*`" in (
        capsys.readouterr().out
    )


def test_a_whole_run_is_in_wandbs_recording_and_in_tensorboards(alone, produced):
    metrics = read_jsonl(produced / "runs" / "ppo" / "metrics.jsonl")
    with trackers(["wandb", "tensorboard"], alone, {}) as track:
        for record in metrics:
            track(record)
    assert line(1).keys() <= set().union(*metrics)  # what the other tests here show is what a run writes
    numbers = [{k: v for k, v in m.items() if isinstance(v, int | float)} for m in metrics]
    assert [{k: v for k, v in line.items() if k != "_step"} for line in recording(alone)[1]] == numbers
    board = EventAccumulator(str(alone / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert set(board.Tags()["scalars"]) == {key for line in numbers for key in line}
    for key in ("reward/em", "actor/entropy", "timing_s/step"):
        drawn = [(event.step, event.value) for event in board.Scalars(key)]
        assert drawn == [(line[STEP], pytest.approx(line[key], rel=1e-6)) for line in numbers if key in line]


class Server:
    """Stands in for W&B's server, which takes an account: how `wandb.init` was called, and what a run was sent."""

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


@pytest.mark.parametrize(
    ("variables", "login", "mode"),
    [
        ({"WANDB_API_KEY": KEY}, "", "online"),
        ({"WANDB_API_KEY": ""}, "", "offline"),
        ({}, f"machine api.wandb.ai login user password {KEY}", "online"),
        ({}, f"machine elsewhere.org login user password {KEY}", "offline"),
        ({"WANDB_BASE_URL": "https://mine.org"}, f"machine mine.org login user password {KEY}", "online"),
        ({}, f"machine api.wandb.ai nonsense {KEY}", "offline"),
        ({"WANDB_API_KEY": "too short"}, "", "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "", "offline"),
        ({"WANDB_MODE": "disabled"}, "", "disabled"),
    ],
)
def test_wandb_is_online_where_there_is_a_key(alone, monkeypatch, capsys, variables, login, mode):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (alone / ".netrc").write_text(f"{login}\n")
    (alone / ".netrc").chmod(0o600)
    server = Server(monkeypatch)
    with trackers(["wandb"], alone, {"seed": 0}):
        pass
    said = "".join(capsys.readouterr())
    assert server.mode == mode and server.settings["config"] == {"seed": 0}
    assert KEY not in said + str(server.settings) and "too short" not in said
    assert ("offline" in said) == (mode == "offline") and ("wandb.example" in said) == (mode == "online")


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
        track({STEP: 1, "a": 2.0})
    server.shutdown()
    said = "".join(capsys.readouterr())
    assert asked and "the server cannot be used: " in said and KEY not in said
    assert recording(alone)[1] == [{"_step": 1, STEP: 1, "a": 2.0}]


def go_on(run_dir: Path, names=("wandb",)) -> None:
    """A run that had logged five steps and goes on from its checkpoint of step 3."""
    with trackers(names, run_dir, {}, 4) as track:
        for step in (4, 5, 6):
            track({STEP: step, "a": step})


def test_a_resumed_run_keeps_its_id_and_another_run_has_another(alone):
    with trackers(["wandb"], alone, {}) as track:
        for step in range(1, 6):
            track({STEP: step, "a": -step})
    first = recording(alone)[0]
    os.unlink(alone / "wandb" / "latest-run")
    go_on(alone)
    again, history = recording(alone)
    assert [(line[STEP], line["a"]) for line in history] == [(4, 4), (5, 5), (6, 6)]
    other = alone / "other"
    other.mkdir()
    with trackers(["wandb"], other, {}):
        pass
    assert first == again != recording(other)[0]


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
            track({STEP: step, "a": -step, "b": float("nan")})
    go_on(tmp_path, ["tensorboard"])
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("a")] == [
        (1, -1), (2, -2), (3, -3), (4, 4), (5, 5), (6, 6)
    ]  # fmt: skip
    assert board.Tags()["scalars"] == [STEP, "a"]


# ----------------------------------------------------------------------------------------------------- plain lines


def test_plain_line_reads_as_documented():
    expected = "step  12/100  em 0.41  reward 0.38  calls 1.62  entropy 0.31  kl 0.0020  s 0.61  eta 54 s"
    assert plain_line(line(12), 100, 54.2) == expected
    assert plain_line({STEP: 3, "actor/ppo_kl": -1e-9}, 100, None) == "step   3/100  kl 0.0000"


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
    assert lines[2].startswith("step  92/100") and lines[2].endswith("eta 16 s")  # 2 s a step, 8 to go
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for text in lines for c in text)


def test_ctrl_c_is_acknowledged_before_the_step_ends(now):
    out = io.StringIO()
    with Dashboard(*RUN, console=Console(file=out)) as board, graceful_interrupt(board.finishing) as interrupted:
        board.step(line(8) | {"timing_s/step": 90.0})
        now[0] += 20.0
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted and out.getvalue().splitlines()[-1] == (
            "finishing step 9, about 70 s; press Ctrl-C again to stop now"
        )
        now[0] += 80.0  # it takes longer than the one before: how much is not known
        board.finishing()
        assert out.getvalue().splitlines()[-1] == "finishing step 9; press Ctrl-C again to stop now"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_echoes_no_mark_that_would_draw_the_dashboard_twice(monkeypatch):
    """`^C` wrapped the last line, and from then on the frame was drawn below itself."""
    monkeypatch.setenv("TERM", "xterm")
    child, terminal = pty.fork()
    if not child:  # its terminal is the other end
        with suppress(BaseException), os.fdopen(1, "w") as screen:
            console = Console(file=screen, force_terminal=True, width=80, height=24)
            with Dashboard(*RUN, console=console) as board, graceful_interrupt(board.finishing) as interrupted:
                board.note("ready")
                while not interrupted:
                    time.sleep(0.01)
            board._say("over")
        os._exit(0)
    seen = b""
    for word in (b"ready", b"over"):
        while word not in seen:
            seen += os.read(terminal, 4096)
        if word == b"ready":
            os.write(terminal, b"\x03")
    os.waitpid(child, 0)
    assert b"finishing step 1" in seen and b"^C" not in seen
    assert termios.tcgetattr(terminal)[3] & termios.ECHOCTL  # as it was before
    os.close(terminal)


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("file", "variables", "encoding", "plain"),
    [
        (Tty, {}, "utf-8", False),
        (Tty, {"NO_COLOR": "1"}, "utf-8", True),
        (Tty, {"TERM": "dumb"}, "utf-8", True),
        (Tty, {}, "ascii", True),
        (io.StringIO, {"FORCE_COLOR": "1"}, "utf-8", True),
    ],
)
def test_terminal_decides_between_live_and_plain(monkeypatch, file, variables, encoding, plain):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Tty, "encoding", encoding)
    assert Dashboard(*RUN, console=Console(file=file())).plain == plain
    assert Dashboard(*RUN, console=Console(file=file()), plain=True).plain


# ------------------------------------------------------------------------------------------------------- live view


def live(width: int, height: int = 40, **options) -> tuple[Dashboard, io.StringIO]:
    out = Tty()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system="truecolor")
    return Dashboard(*RUN, console=console, **options), out


def view_lines(board: Dashboard) -> list[str]:
    return ["".join(piece.text for piece in line).rstrip() for line in board.console.render_lines(board._view())]


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (50, 24), (20, 10)])
def test_view_fits_the_terminal_and_shows_the_essentials(monkeypatch, width, height):
    monkeypatch.setenv("TERM", "xterm")
    board, _ = live(width, height)
    board.transcript("日本 " * 50, [{"text": "word " * 500, "info": {"tool_calls": [{"content": "x" * 9999}]}}], 0.0)
    with board:
        for step in range(1, 31):
            board.step(line(step) | ({"val-core/hotpotqa/acc/mean@1": 0.6} if step == 10 else {}))
        lines = view_lines(board)
    text = "\n".join(lines)
    assert all(cell_len(text) <= width for text in lines) and "EM, tr" in text
    if width > 20:
        assert len(lines) <= height and "step 30/100" in text and "val, greedy" in text and "10 ago" in text
    if width >= 80:
        assert "0.52 M parameters" in text and "to go" in text


def test_model_text_cannot_style_or_command_the_terminal():
    board, out = live(120)
    with board:
        board.step(line(1))
        board.transcript(EVIL, [{"text": EVIL, "info": {"tool_calls": [{"content": EVIL}]}}], 1.0)
        board.note(EVIL)
        lines = view_lines(board)
    assert sum("a[bold red]b[/]␛]0;owned" in text for text in lines) == 4  # markup and commands stay visible text
    assert not any(bad in out.getvalue() for bad in ("\x1b]0;", "\x1b[2J\r", "\x07", "\x9b", "\u202e"))


def test_a_resumed_run_goes_on_from_its_history():
    board, _ = live(120, history=[line(i) | {"reward/em": i / 100} for i in range(1, 21)])
    board.step(line(21) | {"reward/em": 0.9})
    row = next(text for text in view_lines(board) if text.startswith("EM, train"))
    assert row.split()[3:6] == ["0.90", "0.01", "0.11"]  # now, at the start, ten steps ago


def test_diverged_run_is_shown_not_crashed():
    board, _ = live(100)
    with board:
        board.step(line(1))
        board.step(line(2) | {"actor/entropy": float("nan"), "actor/ppo_kl": float("inf"), "reward/em": None})
        assert any("entropy" in text for text in view_lines(board))


# ------------------------------------------------------------------------------------------------------ small parts


def test_calls_answers_and_thoughts_look_different():
    text = style_turn(split_turn("<think>hm</think> <tool_call>{}</tool_call> <answer>Oslo"))
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"hm": "dim italic", "{}": "cyan", "Oslo": "bold green"}


def test_a_turn_is_shown_as_its_dialect_reads_it():
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="truecolor")
    board = Dashboard(*RUN, parts=ReAct().parts, console=console)
    board.transcript("Where?", [{"text": "Thought: hm\nFinal Answer: Oslo", "info": {}}], 1.0)
    (_, turn) = board._transcript[-1]
    assert {turn.plain[span.start : span.end]: span.style for span in turn.spans} == {
        "hm": "dim italic",
        "Oslo": "bold green",
    }


def test_steps_that_teach_nothing_are_said_once(chat, monkeypatch):
    """Metrics of two real runs: one whose environment pays every sample alike, one in which groups differ."""

    def printed(env, steps) -> str:
        console = Console(file=io.StringIO())
        board = Dashboard(*RUN, console=console)
        run = letters_run(chat, monkeypatch, "grpo", f"trainer.steps={steps}", env=env)
        for number, metrics in enumerate(run.metrics):
            board.step({STEP: number} | metrics)
        return console.file.getvalue()

    note = "3 steps in a row no group had a better and a worse sample: nothing was learnt"
    lines = printed(SilentEnv, 5).splitlines()  # three steps; why nothing was paid, and the note; two steps
    assert [line.startswith(note) for line in lines] == [0, 0, 0, 0, 1, 0, 0]
    assert note not in printed(SilentEnv, 2) and note not in printed(LetterEnv, 4)


def test_under_nohup_a_terminal_that_goes_away_is_nothing():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        with graceful_interrupt() as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupted == []
    finally:
        signal.signal(signal.SIGHUP, previous)
