"""The report: complete for a whole run, honest for a broken one, and safe whatever the model wrote.

The runs are those that the commands made (`produced`): what is drawn here is what a run writes."""

from __future__ import annotations

import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.ground.clean import clean
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import read_jsonl
from agent_r1.watch import report as report_module
from agent_r1.watch.report import charts, load_run, pick_group, pick_pairs, smooth, write_report
from agent_r1.watch.tokens import token_cells, token_table, token_text, tokens_html

EVIL = '</span><script>alert(1)</script>"onmouseover="x\x1b[31m\u202e\ud800&'


class Page(HTMLParser):
    """Checks nesting and collects the tags, attributes and visible text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.source = text
        self.feed(text)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def report(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def whole(request, produced, tmp_path_factory) -> tuple[Path, Page]:
    """A run that the commands have made, and its page. Read it, never change it."""
    run = tmp_path_factory.mktemp("whole") / request.param
    shutil.copytree(produced / "runs" / request.param, run)
    return run, report(run)


@pytest.fixture
def run(produced, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(produced / "runs" / "grpo", tmp_path / "mine"))


def change_card(run: Path, name: str = "eval", **changes) -> None:
    file = run / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ----------------------------------------------------------------------------------------- the page


def test_whole_run_shows_everything(whole):
    run, page = whole
    for name in ("eval_before", "eval"):
        card = json.loads((run / f"{name}.json").read_text())
        low, high = card["em_ci95"]
        assert f"{card['em']:.2f}" in page.text and f"{low:.3f} to {high:.3f}, n = 12." in page.text
        assert f"Sampled at temperature 1: {card['sampled']['em']:.2f}." in page.text
        part = card["reliability"]
        low, high = part["pass^2_ci95"]
        assert f"{part['pass^2']:.2f} ({low:.2f} to {high:.2f})" in page.text
        assert "2 samples of each of 12 questions at temperature 1" in page.text
        assert (
            all(reason in page.text for reason in card["stop_reasons"])
            and card["hardware"] in page.text
        )
    assert "learned by imitating a demonstrator. Then " + run.name.upper() in page.text
    assert "On 12 held-out questions about a world that no training question mentions" in page.text
    assert "Parts of this report are missing" not in page.text and "evidence found" not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 7
    kinds = json.loads((run / "eval.json").read_text())["by_kind"]
    assert len(kinds) > 1 and "by kind of question" in page.text


def test_page_needs_no_network_and_runs_no_script(whole):
    _, page = whole
    assert not re.search(r"https?:|//|url\(|@import", page.source)
    assert "script" not in {tag for tag, _ in page.tags}
    links = {
        attrs[name]
        for _, attrs in page.tags
        for name in ("src", "href", "xlink:href")
        if name in attrs
    }
    assert links <= {"page.html"}  # of recipes/page, next to it


def test_every_token_is_shown_with_its_mask(whole):
    run, page = whole
    files = load_run(run)
    shown = [
        r for _, *pair in pick_pairs(files.rollouts_before, files.rollouts_after) for r in pair
    ]
    best, worst = pick_group(files.rollouts_train)
    shown += [best, worst] if best["reward"] != worst["reward"] else [best]
    spans = [attrs for tag, attrs in page.tags if tag == "span" and "data-tip" in attrs]
    masks = [bool(m) for record in shown for row in record["rows"] for m in row["action_mask"]]
    assert len(shown) >= 3 and ["s" in attrs["class"].split() for attrs in spans] == masks


def test_stacked_times_add_up_to_the_step(whole):
    run, _ = whole
    written = read_jsonl(run / "metrics.jsonl")
    curves = charts(load_run(run))["times"].curves
    totals = {x: sum(dict(curve.points)[x] for curve in curves) for x, _ in curves[0].points}
    assert totals == {m["training/global_step"]: pytest.approx(m["timing_s/step"]) for m in written}
    # Nor is the remainder a cover: it is what the loop measured as such.
    other = next(curve for curve in curves if curve.name == "other")
    assert [y for _, y in other.points] == [
        pytest.approx(m["timing_s/other"], abs=1e-9) for m in written
    ]


def test_an_answer_is_right_by_the_score_of_its_environment():
    """A partial reward was shown as a right answer."""
    record = {"metrics": {"right": 0.0}, "reward_parts": {}, "reward": 0.3, "score_name": "right"}
    assert not report_module._right(record) and report_module._right(record | {"score_name": None})


@pytest.mark.parametrize(("right", "falls"), [(72, False), (60, True)])
def test_a_kind_fell_only_beyond_chance(run, right, falls):
    """One of 75 questions is no fall. A share below 100 % is never shown as 100 %."""
    for name, count in (("eval_before", 73), ("eval", right)):
        kinds = {"1-hop": {"score": count / 75, "em": count / 75, "n": 75}}
        change_card(run, name, by_kind=kinds, stop_reasons={"answered": 299, "no_answer": 1})
    page = report(run)
    assert (f"Fell: 1-hop from 0.97 to {right / 75:.2f}." in page.text) == falls
    assert ("Fell" in page.text) == falls
    assert "answered 99.7%" in page.text and "no_answer under 1%" in page.text


def test_what_is_missing_becomes_a_sentence_and_what_is_damaged_is_refused(run, tmp_path):
    gone = ("eval.json", "eval_before.json", "metrics.jsonl", "rollouts/eval.jsonl")
    for name in gone:
        (run / name).rename(run / f"{name}.bak")
    page = report(run)
    assert "Parts of this report are missing" in page.text and all(
        f"{name} is missing" in page.text for name in gone
    )
    for name in ("eval.json", "metrics.jsonl"):
        (run / name).write_text("{not json\n[1]\n{}\n")
        with pytest.raises(AgentR1Error, match=name):
            write_report(run)
        (run / name).unlink()
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.yaml").write_text("preset: small\n")
    assert "there are no learning curves" in report(bare).text


def test_hostile_text_stays_text(run):
    for file in (run / "rollouts").iterdir():
        record = read_jsonl(file)[0]
        record |= {
            "question": EVIL,
            "group_id": EVIL,
            "kind": EVIL,
            "stop_reason": EVIL,
            "ground_truth": [EVIL],
        }
        record["rows"][0]["tokens"][-3:] = [EVIL] * 3
        file.write_text(json.dumps(record) + "\n")
    change_card(run, hardware=EVIL, stop_reasons={EVIL: 3})
    (run / "config.yaml").write_text(f"preset: {json.dumps(EVIL[:-2])}\nalgorithm: grpo\n")
    page = report(run)
    assert (
        "<script" not in page.source and "\x1b" not in page.source and "\u202e" not in page.source
    )
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.text.count("alert(1)") > 5  # still there to be read


# ------------------------------------------------------------------------------- tokens and choices


def test_tokens_one_path_for_terminal_and_html():
    row = {
        "input_ids": [5, 6, 7, 8],
        "tokens": ["hi", "<|im_end|>", "\n", "[red]x\x1b"],
        "action_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -1.0],
        "rewards": [0, 0, 0, 1.0],
        "advantages": [0, 0, 0.25, -0.25],
        "step_ids": [-1, -1, 0, 0],
    }
    cells = token_cells(row)
    assert [c.sampled for c in cells] == [False, False, True, True]
    assert [c.control for c in cells] == [False, True, False, False]
    assert [c.advantage for c in cells] == [None, None, 0.25, -0.25]
    assert token_text(row).plain == "hi<|im_end|>\n[red]x␛"
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(token_table(row, start=1))
    lines = console.export_text().splitlines()
    assert lines[3].split() == ["3", "8", "[red]x␛", "1", "0", "-1.000", "+1.000", "-0.250"]
    assert (
        lines[4] == lines[0] and "log-prob" in lines[0]
    )  # also where the screen is shorter than the episode
    page = Page(tokens_html(row))
    assert [attrs["class"] for tag, attrs in page.tags if tag == "span"] == [
        "t r",
        "t r c",
        "t s up",
        "t s down paid",
    ]
    assert "log-prob -0.500 (p = 0.607) · advantage +0.250" in page.tags[2][1]["data-tip"]
    assert "[red]x␛" in page.text
    row["logprobs"].pop()
    with pytest.raises(AgentR1Error, match="logprobs"):
        token_cells(row)


def test_clean_keeps_words_and_disarms_the_rest():
    assert clean("naïve 日本 👩\n\t") == "naïve 日本 👩\n\t"
    assert clean("a\rb\x07\x9b1m\u202e\ud800") == "a␍b␇\ufffd1m\ufffd\ufffd"


def test_pairs_and_groups_are_picked_for_what_they_teach():
    def made(question, right):
        facts = {"metrics": {}, "reward_parts": {"em": float(right)}, "reward": float(right)}
        return {"question": question, "group_id": question} | facts

    before = [
        made("learned", False),
        made("known", True),
        made("hard", False),
        made("lost", True),
        made("only", True),
    ]
    after = [
        made("lost", False),
        made("known", True),
        made("hard", False),
        made("learned", True),
        made("new", True),
    ]
    picked = pick_pairs(before, after)
    assert [after["question"] for _, _, after in picked] == ["learned", "known", "hard", "lost"]
    best, worst = pick_group([made("x", True), made("y", True), made("y", False), made("x", True)])
    assert (best["question"], best["reward"], worst["reward"]) == ("y", 1.0, 0.0)
    assert pick_group([]) is None


def test_smooth_by_hand():
    assert smooth([0.0, 3.0, 0.0], share=0.1).tolist() == [1.5, 1.0, 1.5]
    assert smooth([2.0]).tolist() == [2.0] and smooth([1.0, 2.0]).tolist() == [1.0, 2.0]


# ------------------------------------------------------------------ keys, here and on the dashboard


def test_every_key_that_is_shown_is_written(produced, tmp_path, monkeypatch):
    from agent_r1.watch import dashboard

    asked = set()

    class Asked(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

    runs = [produced / "runs" / name for name in ("grpo", "ppo")]
    lines = [line for run in runs for line in read_jsonl(run / "metrics.jsonl")]
    for module in (report_module, dashboard):
        monkeypatch.setattr(
            module,
            "with_val_em",
            lambda metrics, wrapped=module.with_val_em: Asked(wrapped(metrics)),
        )
    for run in runs:
        charts(load_run(run))
    for plain in (True, False):
        console = Console(file=io.StringIO(), width=120, height=60)
        board = dashboard.Dashboard("a", "b", 8, plain=plain, console=console)
        for metrics in lines:
            board.step(metrics)
        lines_shown = board.console.render_lines(board._view())
        screen = "\n".join("".join(piece.text for piece in line) for line in lines_shown)
        missing = [gauge.label for gauge in dashboard.GAUGES if gauge.label not in screen]
        assert missing == [
            "evidence found"
        ]  # TinyHop names no supporting titles; tests/test_published.py measures it
        assert "Ctrl-C finishes the step and saves" in screen
    # verl alone computes these; tests/test_verl_train.py finds them there.
    unwritten = asked - {"val/em", "episode/evidence"} - {key for line in lines for key in line}
    assert unwritten == {"timing_s/old_log_prob", "timing_s/ref"}
