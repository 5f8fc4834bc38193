"""The report: complete for a whole run, honest for a broken one, and safe whatever the model wrote.

The runs are those that the commands made (`produced`): what is drawn here is what a run writes."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.config import load_config, to_yaml
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import read_jsonl
from agent_r1.ground.ui import clean
from agent_r1.viewer import report as report_module
from agent_r1.viewer.report import Curve, charts, draw, load_run, pick_group, pick_pairs, smooth, write_report
from agent_r1.viewer.tokens import token_cells, token_table, token_text, tokens_html

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


# ------------------------------------------------------------------------------------------------------- the page


def test_whole_run_shows_everything(whole):
    run, page = whole
    for name in ("eval_before", "eval"):
        card = json.loads((run / f"{name}.json").read_text())
        low, high = card["em_ci95"]
        assert f"{card['em']:.2f}" in page.text and f"{low:.3f} to {high:.3f}, n = 12." in page.text
        assert f"Sampled at temperature 1: {card['sampled']['em']:.2f}." in page.text
        assert all(reason in page.text for reason in card["stop_reasons"]) and card["hardware"] in page.text
    assert "learned by imitating a demonstrator. Then " + run.name.upper() in page.text
    assert "On 12 held-out questions about a world that no training question is about" in page.text
    assert "Not everything is here" not in page.text and "evidence found" not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 6


def test_page_needs_no_network_and_runs_no_script(whole):
    _, page = whole
    assert not re.search(r"https?:|//|url\(|@import", page.source)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"src", "href", "xlink:href"} & {name for _, attrs in page.tags for name in attrs}


def test_every_token_is_shown_with_its_mask(whole):
    run, page = whole
    files = load_run(run)
    shown = [r for _, *pair in pick_pairs(files.rollouts_before, files.rollouts_after) for r in pair]
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
    assert [y for _, y in other.points] == [pytest.approx(m["timing_s/other"], abs=1e-9) for m in written]


def test_what_the_cards_say_is_not_rounded_away(run):
    before = json.loads((run / "eval_before.json").read_text())
    kinds = {kind: part | {"score": 0.46} for kind, part in before["by_kind"].items()}
    change_card(run, "eval_before", by_kind=kinds)
    fallen = kinds | {"1-hop": kinds["1-hop"] | {"score": 0.31}}
    change_card(run, stop_reasons={"answered": 499, "max_turns": 1}, evidence=0.75, by_kind=fallen)
    (run / "config.yaml").write_text(to_yaml(config := load_config("hotpotqa-1x24gb")))
    page = report(run)
    assert "answered 100%<br>max_turns under 1%" in page.source and "evidence found 0.75" in page.text.replace("– ", "")
    assert "Fell: 1-hop from 0.46 to 0.31." in page.text
    # Another data set and start model have another headline.
    assert f"began as the pretrained model {config.model.path}" in page.text and "of hotpotqa, the share" in page.text
    assert "a world that" not in page.text and "imitating" not in page.text


def test_a_world_of_methods_with_a_score_of_its_own(run):
    """It said "its tools (none)", "Reward is what ..." above figures that are not the reward, and a path of this machine."""
    config = load_config("smoke", ["env.tools=[]", "trainer.steps=8"])
    config.data.name = "/home/somebody/a-long-folder/desk.py:questions"
    (run / "config.yaml").write_text(to_yaml(config))
    lines = [m | {"episode/calls/loan": 1.0, "episode/calls/shelf": 0.5} for m in read_jsonl(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    for name, score, low, high in (("eval_before", 0.6, 0.423, 0.754), ("eval", 0.8, 0.627, 0.902)):
        reward = {"reward": score - 0.05, "reward_ci95": [low - 0.05, high - 0.05]}
        change_card(run, name, score=score, score_name="right", score_ci95=[low, high], n=30, **reward)
    text = report(run).text.partition("Agent-R1 run report")[2]
    assert "with its tools (loan, shelf, search) and" in text
    assert "On 30 held-out questions of desk, its mean score (right) rose from 0.60 to 0.80" in text
    assert "The 95 % intervals overlap, so the difference may be chance." in text
    assert "right is the score that the environment reports" in text and "Reward is what" not in text
    assert "0.423 to 0.754, n = 30." in text and "reward 0.55 (0.37 to 0.70) 0.75 (0.58 to 0.85)" in text
    change_card(run, score_ci95=[0.76, 0.83])
    assert "may be chance" not in report(run).text
    change_card(run, score=0.6, score_ci95=[0.423, 0.754])
    assert "its mean score (right) stayed at 0.60" in (text := report(run).text) and "may be chance" not in text


def test_an_answer_is_right_by_the_score_of_its_environment():
    """A partial reward was shown as a right answer."""
    record = {"metrics": {"right": 0.0}, "reward_parts": {}, "reward": 0.3, "score_name": "right"}
    assert not report_module._right(record) and report_module._right(record | {"score_name": None})


def test_what_is_missing_becomes_a_sentence_and_what_is_damaged_is_refused(run, tmp_path):
    gone = ("eval.json", "eval_before.json", "metrics.jsonl", "rollouts/eval.jsonl")
    for name in gone:
        (run / name).rename(run / f"{name}.bak")
    page = report(run)
    assert "Not everything is here" in page.text and all(f"{name} is missing" in page.text for name in gone)
    for name in ("eval.json", "metrics.jsonl"):
        (run / name).write_text("{not json\n[1]\n{}\n")
        with pytest.raises(AgentR1Error, match=name):
            write_report(run)
        (run / name).unlink()
    (bare := tmp_path / "bare").mkdir()
    with pytest.raises(AgentR1Error, match=r"no readable config.yaml; name a run with --run \(there are: mine\)"):
        write_report(bare)
    (bare / "config.yaml").write_text("preset: smoke\n")
    assert "there are no learning curves" in report(bare).text


def test_hostile_text_stays_text(run):
    for file in (run / "rollouts").iterdir():
        record = read_jsonl(file)[0]
        record |= {"question": EVIL, "group_id": EVIL, "kind": EVIL, "stop_reason": EVIL, "ground_truth": [EVIL]}
        record["rows"][0]["tokens"][-3:] = [EVIL] * 3
        file.write_text(json.dumps(record) + "\n")
    change_card(run, hardware=EVIL, stop_reasons={EVIL: 3})
    (run / "config.yaml").write_text(f"preset: {json.dumps(EVIL)}\nalgorithm: grpo\n")
    page = report(run)
    assert "<script" not in page.source and "\x1b" not in page.source and "\u202e" not in page.source
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.text.count("alert(1)") > 5  # still there to be read


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_phone_shows_the_after_column(produced, tmp_path):
    script = """const d = frame.contentDocument, cells = [...d.querySelectorAll(".measures td:nth-child(3)")];
        document.title = cells.length + " " + Math.max(...cells.map(c => c.getBoundingClientRect().right));"""
    page = f"<iframe id=frame src='{produced}/runs/grpo/report.html' width=390 onload='{html.escape(script)}'></iframe>"
    (tmp_path / "phone.html").write_text(page)
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom")
    browser = ["chromium", *options, tmp_path / "phone.html"]
    dom = subprocess.run(browser, capture_output=True, text=True, timeout=100).stdout
    cells, right = map(float, re.search(r"<title>(\S+) (\S+)</title>", dom).groups())
    assert cells >= 6 and right <= 390


# -------------------------------------------------------------------------------------------------- tokens and choices


def test_tokens_one_path_for_terminal_and_html():
    row = {
        "input_ids": [5, 6, 7, 8], "tokens": ["hi", "<|im_end|>", "\n", "[red]x\x1b"], "action_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -1.0], "rewards": [0, 0, 0, 1.0], "advantages": [0, 0, 0.25, -0.25],
        "step_ids": [-1, -1, 0, 0],
    }  # fmt: skip
    cells = token_cells(row)
    assert [c.sampled for c in cells] == [False, False, True, True]
    assert [c.control for c in cells] == [False, True, False, False]
    assert [c.advantage for c in cells] == [None, None, 0.25, -0.25]
    assert token_text(row).plain == "hi<|im_end|>\n[red]x␛"
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(token_table(row, start=1))
    lines = console.export_text().splitlines()
    assert lines[3].split() == ["3", "8", "[red]x␛", "1", "0", "-1.000", "+1.000", "-0.250"]
    assert lines[4] == lines[0] and "log-prob" in lines[0]  # also where the screen is shorter than the episode
    page = Page(tokens_html(row))
    assert [attrs["class"] for tag, attrs in page.tags if tag == "span"] == ["t r", "t r c", "t s up", "t s down paid"]
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

    before = [made("learned", False), made("known", True), made("hard", False), made("lost", True), made("only", True)]
    after = [made("lost", False), made("known", True), made("hard", False), made("learned", True), made("new", True)]
    picked = pick_pairs(before, after)
    assert [after["question"] for _, _, after in picked] == ["learned", "known", "hard", "lost"]
    best, worst = pick_group([made("x", True), made("y", True), made("y", False), made("x", True)])
    assert (best["question"], best["reward"], worst["reward"]) == ("y", 1.0, 0.0)
    assert pick_group([]) is None


def test_smooth_by_hand():
    assert smooth([0.0, 3.0, 0.0], share=0.1).tolist() == [1.5, 1.0, 1.5]
    assert smooth([2.0]).tolist() == [2.0] and smooth([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_calls_by_tool_have_a_chart_where_there_is_a_choice(run):
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps(line | {"episode/calls/search": 1.5, "episode/calls/<b>": i}) + "\n"
            for i, line in enumerate(read_jsonl(run / "metrics.jsonl"))
        )
    )
    drawn = charts(load_run(run))["by_tool"]
    assert [curve.name for curve in drawn.curves] == ["<b>", "search"]
    assert [y for _, y in drawn.curves[0].points] == list(range(len(drawn.curves[0].points)))
    page = report(run)
    assert (
        "Calls per question, by tool" in page.text
        and "<b>" in page.words
        and sum(t == "svg" for t, _ in page.tags) == 7
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 2.0), (2, 2.0)], [(1, -1e-9), (2, 1e9)]])
def test_charts_survive_odd_data(points):
    for stacked in (False, True):
        svg = draw([Curve("x", points, "c1", noisy=True)], stacked=stacked).svg
        assert "nan" not in svg and "inf" not in svg
        assert svg.startswith("<svg") and svg.endswith("</svg>\n")
    assert draw([Curve("x", [], "c1")]) is None


# --------------------------------------------------------------------------------------- keys, here and on the dashboard


def test_every_key_that_is_shown_is_written(produced, tmp_path, monkeypatch):
    from agent_r1.training import dashboard

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
        monkeypatch.setattr(module, "with_val_em", lambda metrics, wrapped=module.with_val_em: Asked(wrapped(metrics)))
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
        assert missing == ["evidence found"]  # TinyHop names no supporting titles; tests/test_published.py measures it
        assert "Ctrl-C finishes the step and saves" in screen
    # verl alone computes these; tests/test_verl_train.py finds them there.
    unwritten = asked - {"val/em", "episode/evidence"} - {key for line in lines for key in line}
    assert unwritten == {"timing_s/old_log_prob", "timing_s/ref"}
