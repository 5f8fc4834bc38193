"""The report: complete for a whole run, honest for a broken one, and safe whatever the model wrote."""

from __future__ import annotations

import html
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.config import load_config, to_yaml
from agent_r1.errors import AgentR1Error
from agent_r1.inspect import report as report_module
from agent_r1.inspect.report import Curve, draw, pick_group, pick_pairs, smooth, write_report
from agent_r1.inspect.tokens import token_cells, token_table, token_text, tokens_html
from agent_r1.ui import clean

EVIL = '</span><script>alert(1)</script>"onmouseover="x\x1b[31m\u202e\ud800&'

# ------------------------------------------------------------------------------------------------ a made-up run


def fake_row(segments: list[tuple[str, int]], advantage: float | None, reward: float) -> dict:
    """Words as tokens; `segments` are (text, mask)."""
    pieces = [
        (token, mask) for text, mask in segments for token in re.findall(r"<\|?\w+\|?>|</\w+>|\n| ?[^\s<]+|<| ", text)
    ]
    mask = [m for _, m in pieces]
    last = max(i for i, m in enumerate(mask) if m)
    step_ids, turn = [], -1
    for i, m in enumerate(mask):
        turn += bool(m and not (i and mask[i - 1]))
        step_ids.append(turn if m else -1)
    return {
        "input_ids": [sum(token.encode()) % 768 for token, _ in pieces],
        "tokens": [token for token, _ in pieces],
        "action_mask": mask,
        "logprobs": [-0.1 * (i % 7) * m for i, m in enumerate(mask)],
        "rewards": [reward if i == last else 0.0 for i in range(len(mask))],
        "advantages": None if advantage is None else [advantage * m for m in mask],
        "step_ids": step_ids,
    }


def fake_rollout(question: str, gold: str, answer: str, calls: list[tuple], *, step=None, advantage=None) -> dict:
    prompt = (
        "<|im_start|>system\nAnswer with the search tool. Call it inside <tool_call> tags and give the final answer "
        f"inside <answer> tags.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    segments, steps = [(prompt, 0)], []
    for query, found in calls:
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        text = f"<think>I look up {query}.</think>\n<tool_call>\n{call}\n</tool_call>"
        segments += [(text + "<|im_end|>", 1)]
        reply = f"\n<|im_start|>user\n<tool_response>\n{found}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        segments += [(reply, 0)]
        record = {"name": "search", "arguments": {"query": query}, "ok": True, "error": None, "content": found}
        steps.append({"text": text, "reward": 0.0, "finish_reason": "stop", "info": {"tool_calls": [record]}})
    reward = float(answer == gold)
    segments += [(f"<answer>{answer}</answer><|im_end|>", 1)]
    steps.append({"text": f"<answer>{answer}</answer>", "reward": reward, "finish_reason": "stop", "info": {}})
    return {
        "step": step,
        "group_id": question,
        "question": question,
        "ground_truth": [gold],
        "kind": "2-hop",
        "stop_reason": "answered",
        "reward": reward,
        "reward_parts": {"em": reward, "format": 0.0},
        "metrics": {"tool_calls": len(calls)},
        "rows": [fake_row(segments, advantage, reward)],
        "steps": steps,
    }


def fake_card(em: float, n: int = 500) -> dict:
    half = 1.96 * math.sqrt(em * (1 - em) / n)
    return {
        "model": "checkpoints/step_000040/model", "dataset": "tinyhop", "split": "test", "n": n, "seed": 0,
        "em": em, "em_ci95": [em - half, em + half], "sub_em": em + 0.01, "f1": em + 0.03, "search_rate": 0.98,
        "mean_turns": 1.9 + em, "mean_tool_calls": 0.9 + em, "invalid_call_rate": 0.01, "truncated_rate": 0.02,
        "stop_reasons": {"answered": n - 12, "max_turns": 8, "max_tokens": 4}, "retriever": "ngram",
        "prompt_hash": "ab12", "wall_seconds": 4.2, "sampled": {"em": em - 0.06},
        "by_kind": {
            kind: {"n": n // 5, "em": min(1.0, em + d)}
            for kind, d in (("1-hop", 0.08), ("2-hop", 0.02), ("3-hop", -0.15), ("yes-no", 0.05), ("which", 0.0))
        },
    }  # fmt: skip


def fake_metrics(step: int, steps: int) -> dict:
    learned = 1 - math.exp(-3 * step / steps)
    wobble = (step * 7919 % 101 / 101 - 0.5) * 0.12
    line = {
        "training/global_step": step, "reward/em": 0.3 + 0.55 * learned + wobble,
        "critic/score/mean": 0.25 + 0.6 * learned + wobble, "tool_calls/mean": 1.3 + 0.7 * learned + wobble,
        "actor/entropy": 0.5 - 0.35 * learned + wobble / 4, "actor/ppo_kl": 0.002 + wobble / 50, "actor/kl_loss": None,
        "timing_s/step": 0.61, "timing_s/gen": 0.27 + wobble / 4, "timing_s/env": 0.03, "timing_s/update_actor": 0.2,
        "timing_s/update_critic": 0.08, "timing_s/other": 0.03, "perf/agent_tokens_per_s": 31000.0,
    }  # fmt: skip
    if step % 10 == 0:
        line["val-core/tinyhop/acc/mean@1"] = 0.38 + 0.52 * learned
    return line


def make_fake_run(run: Path, steps: int = 60) -> Path:
    """A run directory as the trainer leaves it."""
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("preset: laptop\nalgorithm: grpo\nseed: 0\ntrainer:\n  steps: 60\n")
    (run / "eval_before.json").write_text(json.dumps(fake_card(0.38)))
    (run / "eval.json").write_text(json.dumps(fake_card(0.91)))
    write_lines(run / "metrics.jsonl", [fake_metrics(step, steps) for step in range(1, steps + 1)])
    q1, q2 = "In which country was the founder of Vexlor born?", "Who directed the film that Orrin Tal wrote?"
    founder = ("founder of Vexlor", "[1] Vexlor is a company in Karvel. It was founded by Mira Dolan.")
    born = ("Mira Dolan", "[1] Mira Dolan was born in Karvel, a city of Norrland.")
    film = ("Orrin Tal", "[1] Orrin Tal wrote The Pale Harbour, directed by Sela Quist.")
    write_lines(
        run / "rollouts/eval_before.jsonl",
        [fake_rollout(q1, "Norrland", "Karvel", [founder]), fake_rollout(q2, "Sela Quist", "Sela Quist", [film])],
    )
    write_lines(
        run / "rollouts/eval.jsonl",
        [
            fake_rollout(q1, "Norrland", "Norrland", [founder, born]),
            fake_rollout(q2, "Sela Quist", "Sela Quist", [film]),
        ],
    )
    write_lines(
        run / "rollouts/step_000060.jsonl",
        [
            fake_rollout(q1, "Norrland", "Norrland", [founder, born], step=60, advantage=0.9),
            fake_rollout(q1, "Norrland", "Karvel", [founder], step=60, advantage=-1.1),
            fake_rollout(q2, "Sela Quist", "Sela Quist", [film], step=60, advantage=0.0),
        ],
    )
    return run


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


class Page(HTMLParser):
    """Checks nesting and collects the tags, attributes and visible text."""

    VOID = frozenset({"meta", "br", "circle", "path"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

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

    @property
    def text(self) -> str:
        return " ".join(self.words)


def report(run: Path) -> tuple[str, Page]:
    text = write_report(run).read_text(encoding="utf-8")
    return text, Page(text)


# ------------------------------------------------------------------------------------------------------- tests


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    return make_fake_run(tmp_path / "laptop-grpo-0")


def forms(run: Path) -> dict[str, set[str]]:
    """Every path of keys in the files of a run, those of lists' items too, and no data set's or agent's own words."""

    def paths(value, above: str) -> Iterator[str]:
        if isinstance(value, list):
            for item in value:
                yield from paths(item, above)
        elif isinstance(value, dict):
            for key, inner in value.items():
                own_words = above.endswith(("arguments", "by_kind", "stop_reasons", "reward_parts", "metrics"))
                yield (here := above if own_words else f"{above}/{key}")
                yield from paths(inner, here)

    def found(*files: Path) -> set[str]:
        return {
            path for file in files for line in file.read_text().splitlines() for path in paths(json.loads(line), "")
        }

    steps, evaluated = (run / "rollouts").glob("step_*.jsonl"), (run / "rollouts").glob("eval*.jsonl")
    cards = {
        path for name in ("eval_before", "eval") for path in paths(json.loads((run / f"{name}.json").read_text()), "")
    }
    return {"metrics": found(run / "metrics.jsonl"), "card": cards, "train": found(*steps), "eval": found(*evaluated)}


def test_the_made_up_run_has_nothing_that_no_run_writes(run, produced):
    """What is drawn from a made-up run must be there in a real one."""
    real = [forms(produced / "runs" / name) for name in ("grpo", "ppo")]
    for file, keys in forms(run).items():
        assert keys <= set.union(*(form[file] for form in real)), file


def test_whole_run_shows_everything(run):
    _, page = report(run)
    for words in ("laptop-grpo-0", "0.38", "0.91", "0.885 to 0.935", "answered 98%", "How it learned", "seed"):
        assert words in page.text
    assert "Not everything is here" not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 6
    assert sum(tag == "article" for tag, _ in page.tags) == 3  # one learned, one known, one training group


def test_the_table_holds_what_was_measured_and_rounds_nothing_away(run):
    card = fake_card(0.9) | {"stop_reasons": {"answered": 499, "max_turns": 1}}
    (run / "eval.json").write_text(json.dumps(card))
    text, page = report(run)
    assert "answered 100%<br>max_turns under 1%" in text and "searches at all" in page.text
    assert "evidence found" not in page.text  # this data set names no supporting titles
    (run / "eval.json").write_text(json.dumps(card | {"evidence": 0.75}))
    assert "evidence found" in report(run)[1].text


def test_page_needs_no_network_and_runs_no_script(run):
    text, page = report(run)
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"src", "href", "xlink:href"} & {name for _, attrs in page.tags for name in attrs}


def test_every_token_is_shown_with_its_mask(run):
    text, page = report(run)
    spans = [attrs for tag, attrs in page.tags if tag == "span" and "data-tip" in attrs]
    shown = ["s" in attrs["class"].split() for attrs in spans]
    before, after, train = (
        [json.loads(line) for line in (run / f"rollouts/{name}.jsonl").read_text().splitlines()]
        for name in ("eval_before", "eval", "step_000060")
    )
    order = [before[0], after[0], before[1], after[1], train[0], train[1]]
    assert shown == [bool(m) for record in order for row in record["rows"] for m in row["action_mask"]]


@pytest.mark.parametrize("gone", ["eval.json", "eval_before.json", "metrics.jsonl", "rollouts/eval.jsonl"])
def test_missing_piece_becomes_a_sentence(run, gone):
    (run / gone).unlink()
    _, page = report(run)
    assert "Not everything is here" in page.text
    assert f"{gone} is missing" in page.text


def test_bare_and_damaged_runs(run, tmp_path):
    for name in ("metrics.jsonl", "eval.json", "rollouts/eval.jsonl"):
        (run / name).write_text("{not json\n[1]\n{}\n")
    assert "cannot be read as an eval card" in report(run)[1].text
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(
        AgentR1Error, match=rf"no readable config.yaml; name a run with --run \(there are: {run.name}\)"
    ):
        write_report(bare)
    (bare / "config.yaml").write_text("preset: smoke\n")
    assert "there are no learning curves" in report(bare)[1].text


def test_hostile_text_stays_text(run):
    record = fake_rollout("q", "a", "b", [("x", "y")], step=60, advantage=1.0)
    record |= {"question": EVIL, "group_id": EVIL, "kind": EVIL, "stop_reason": EVIL, "ground_truth": [EVIL]}
    record["rows"][0]["tokens"][-3:] = [EVIL] * 3
    for name in ("eval_before", "eval", "step_000060"):
        write_lines(run / f"rollouts/{name}.jsonl", [record])
    (run / "eval.json").write_text(json.dumps(fake_card(0.9) | {"hardware": EVIL, "stop_reasons": {EVIL: 3}}))
    (run / "config.yaml").write_text(f"preset: {json.dumps(EVIL)}\nalgorithm: grpo\n")
    text, page = report(run)
    assert "<script" not in text
    assert "\x1b" not in text and "\u202e" not in text
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.text.count("alert(1)") > 5  # still there to be read


def test_row_of_unequal_lists_is_refused_and_the_report_survives(run):
    record = fake_rollout("q", "a", "b", [], step=60, advantage=1.0)
    record["rows"][0]["logprobs"].pop()
    with pytest.raises(AgentR1Error, match="logprobs"):
        token_cells(record["rows"][0])
    write_lines(run / "rollouts/step_000060.jsonl", [record])
    assert "cannot be shown" in report(run)[1].text


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


def test_clean_keeps_words_and_disarms_the_rest():
    assert clean("naïve 日本 👩\n\t") == "naïve 日本 👩\n\t"
    assert clean("a\rb\x07\x9b1m\u202e\ud800") == "a␍b␇\ufffd1m\ufffd\ufffd"


def test_pairs_and_groups_are_picked_for_what_they_teach():
    def made(question, right):
        return fake_rollout(question, "a", "a" if right else "b", [])

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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 2.0), (2, 2.0)], [(1, -1e-9), (2, 1e9)]])
def test_charts_survive_odd_data(points):
    for stacked in (False, True):
        svg = draw([Curve("x", points, "c1", noisy=True)], stacked=stacked).svg
        assert "nan" not in svg and "inf" not in svg
        assert svg.startswith("<svg") and svg.endswith("</svg>\n")
    assert draw([Curve("x", [], "c1")]) is None


# ------------------------------------------------------------------------------------- runs that the code itself made


@pytest.fixture(params=["grpo", "ppo"])
def made(request, produced, tmp_path) -> Path:
    """A copy of a run that the commands have made."""
    return Path(shutil.copytree(produced / "runs" / request.param, tmp_path / request.param))


def written(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_stacked_times_add_up_to_the_step(made):
    lines = report_module.charts(report_module.load_run(made))["times"].curves
    totals = {x: sum(dict(line.points)[x] for line in lines) for x, _ in lines[0].points}
    assert totals == {m["training/global_step"]: pytest.approx(m["timing_s/step"]) for m in written(made)}
    # Nor is the remainder a cover: it is what the loop measured as such.
    other = next(line for line in lines if line.name == "other")
    assert [y for _, y in other.points] == [pytest.approx(m["timing_s/other"], abs=1e-9) for m in written(made)]


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

    lines = written(produced / "runs/grpo") + written(produced / "runs/ppo")
    for module in (report_module, dashboard):
        monkeypatch.setattr(module, "with_val_em", lambda metrics, wrapped=module.with_val_em: Asked(wrapped(metrics)))
    for name in ("grpo", "ppo"):
        write_report(Path(shutil.copytree(produced / "runs" / name, tmp_path / name)))
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


def test_headline_says_what_this_run_was(made):
    def lead() -> str:
        return " ".join(re.search(r'<p class="lead">(.*?)</p>', report(made)[0], re.DOTALL)[1].split())

    assert "learned by imitating a demonstrator. Then " + made.name.upper() in lead()
    assert "12 held-out questions about a world that no training question is about" in lead()
    config = load_config("hotpotqa-1x24gb", algorithm=made.name)
    (made / "config.yaml").write_text(to_yaml(config))
    assert f"began as the pretrained model {config.model.path}" in lead() and "of hotpotqa, the share" in lead()
    assert "world" not in lead() and "imitat" not in lead()


def test_a_kind_that_fell_is_named(run):
    assert "Fell:" not in report(run)[1].text
    card = fake_card(0.91)
    card["by_kind"]["1-hop"]["em"] = 0.31  # 0.46 before
    (run / "eval.json").write_text(json.dumps(card))
    assert "Fell: 1-hop from 0.46 to 0.31." in " ".join(report(run)[1].text.split())


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_phone_shows_the_after_column(run, tmp_path):
    write_report(run)
    script = """const d = frame.contentDocument, cells = [...d.querySelectorAll(".measures td:nth-child(3)")];
        document.title = cells.length + " " + Math.max(...cells.map(c => c.getBoundingClientRect().right));"""
    page = f"<iframe id=frame src='{run}/report.html' width=390 onload='{html.escape(script)}'></iframe>"
    (tmp_path / "phone.html").write_text(page)
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    dom = subprocess.run([*browser, tmp_path / "phone.html"], capture_output=True, text=True, timeout=100).stdout
    cells, right = map(float, re.search(r"<title>(\S+) (\S+)</title>", dom).groups())
    assert cells >= 6 and right <= 390
