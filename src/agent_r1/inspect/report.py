"""report.html: one run on one page, for someone who has never seen one.

In: a run directory, finished or interrupted. Out: `runs/<name>/report.html`, a single file without scripts and without
links to anything: it opens offline, today and in ten years. Made at the end of each run, or by `agent-r1 report`.

Everything shown was written by a model or found by a tool, so all of it is cleaned and escaped. A mistake in that would
be silent, so the page also forbids itself scripts and network (Content-Security-Policy).
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import agent_r1
from agent_r1.device import describe_machine
from agent_r1.errors import AgentR1Error
from agent_r1.inspect.charts import CALLS, EM_GREEDY, EM_SAMPLED, Line, em_marks, line_chart, stacked_chart
from agent_r1.inspect.run_files import Record, RunFiles, load_run
from agent_r1.inspect.tokens import TOKEN_CSS, tokens_html
from agent_r1.training.log import STEP, step_times
from agent_r1.ui import clean, duration


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises AgentR1Error when `run_dir` is not a run."""
    run = load_run(run_dir)
    sections = [_title(run), _cards(run), _curves(run), _comparison(run), _training_group(run), _configuration(run)]
    page = _PAGE.format(title=_text(run_dir.resolve().name), css=_CSS + TOKEN_CSS, body="\n".join(sections))
    path, beside = run_dir / "report.html", run_dir / "report.tmp"
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise AgentR1Error(f"cannot write {path} ({error.strerror}); make room or grant access") from None
    return path


# ------------------------------------------------------------------------------------------------------- the head


def _title(run: RunFiles) -> str:
    config = run.config
    seconds = sum(seconds for _, seconds in run.series("timing_s/step"))
    steps = len(run.series("timing_s/step"))
    # A card may carry the machine that it was made on; without it, this one is named as what it is.
    machine = next((card["hardware"] for card in (run.after, run.before) if card and card.get("hardware")), None)
    facts = {
        "preset": config.get("preset"),
        "algorithm": config.get("algorithm"),
        "seed": config.get("seed"),
        "RL": f"{steps} steps in {duration(seconds)}" if steps else "no step",
        "evaluation": _evaluation_time(run),
        "machine" if machine else "report written on": machine or describe_machine(),
    }
    items = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts.items() if v is not None)
    missing = "".join(f"<li>{_text(sentence)}</li>" for sentence in run.missing)
    notice = f'<div class="notice"><b>Not everything is here.</b><ul>{missing}</ul></div>' if missing else ""
    return f"""<header><p class="kicker">Agent-R1 run report</p><h1>{_text(run.path.resolve().name)}</h1>
<p class="lead">{_headline(run)}</p><dl class="facts">{items}</dl>{notice}</header>"""


_PAID = {"em": "exact answers", "reward": "what its environment pays for"}
_MEAN = {"em": "the share that it answers exactly", "reward": "its mean reward"}
_SCORE = {"em": "exact match", "reward": "reward"}


def _headline(run: RunFiles) -> str:
    """Where the agent came from, what taught it, what came of it: in sentences that hold for this run."""
    data, model, env = (run.config.get(name) or {} for name in ("data", "model", "env"))
    start = "A tiny model first learned by imitating a demonstrator"
    if model.get("path"):
        start = f"This agent began as the pretrained model {_text(model['path'])}"
    method = _text(run.config.get("algorithm", "reinforcement learning")).upper()
    tools = _text(", ".join(env.get("tools") or [])) or "none"
    taught = f"{start}. Then {method} let it practise questions with its tools ({tools}) and rewarded {_PAID[run.score_name]}."
    if not (run.before and run.after):
        return taught
    before, after = run.before["score"], run.after["score"]
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    name = data.get("name", "tinyhop")
    kind = "about a world that no training question is about" if name == "tinyhop" else f"of {_text(name)}"
    return (
        f"{taught} On {_text(run.after.get('n', '?'))} held-out questions {kind}, {_MEAN[run.score_name]} "
        f"{verb} from <b>{before:.2f}</b> to <b>{after:.2f}</b>."
    )


def _evaluation_time(run: RunFiles) -> str | None:
    seconds = [card["wall_seconds"] for card in (run.before, run.after) if card and card.get("wall_seconds")]
    return duration(sum(seconds)) if seconds else None


# ------------------------------------------------------------------------------------------------------ eval cards

_MEASURES = (
    ("sub_em", "contains the answer", "the right answer stands somewhere in what it answered"),
    ("f1", "F1", "overlap of words with the right answer"),
    ("evidence", "evidence found", "share of the titles that an answer takes among all that the searches brought"),
    ("search_rate", "searches at all", "share of questions with at least one tool call"),
    ("mean_tool_calls", "calls per question", "tool calls, mean"),
    ("mean_turns", "turns", "turns of the agent, mean, the answer included"),
    ("invalid_call_rate", "invalid calls", "share of calls that could not be run as written"),
    ("truncated_rate", "cut off", "share of episodes that ended at a limit"),
)


def _cards(run: RunFiles) -> str:
    if not (run.before or run.after):
        return ""
    cards = _big_card("Before RL", run.before, "dim") + _big_card("After RL", run.after, "strong")
    meaning = (
        " <b>Exact match</b> counts an answer only if it equals the right one, letter case, articles and punctuation aside. "
        "The bracket is the 95 % confidence interval."
    )
    meaning = meaning if run.score_name == "em" else " <b>Reward</b> is what its environment paid for an episode, mean."
    return f"""<section><h2>Before and after</h2>
<p>The same held-out questions, decoded greedily (always the likeliest token).{meaning}</p>
<div class="two">{cards}</div>{_fallen(run)}{_measure_table(run)}</section>"""


def _fallen(run: RunFiles) -> str:
    """The kinds of questions that RL made worse: the mean alone would hide them."""
    before, after = ((card or {}).get("by_kind") or {} for card in (run.before, run.after))
    pairs = [
        (kind, *(round(_score(cards[kind]), 2) for cards in (before, after))) for kind in before.keys() & after.keys()
    ]
    fell = [f"{_text(kind)} from {old:.2f} to {new:.2f}" for kind, old, new in sorted(pairs) if new < old]
    return f'<p class="fell">Fell: {", ".join(fell)}.</p>' if fell else ""


def _big_card(title: str, card: Record | None, look: str) -> str:
    if card is None:
        return f'<div class="card {look}"><h3>{title}</h3><p>Not evaluated.</p></div>'
    score = card["score"]
    low, high = card.get("em_ci95") or (score, score)
    sampled = card.get("sampled") and _score(card["sampled"])
    note = "" if sampled is None else f" Sampled at temperature 1: {_number(sampled)}."
    kinds = "".join(_kind_row(kind, part) for kind, part in (card.get("by_kind") or {}).items())
    interval = f"""<div class="interval"><i class="fill" style="width:{_percent(score)}"></i>
<i class="ci" style="left:{_percent(low)};width:{_percent(high - low)}"></i></div>
<p class="small">{low:.3f} to {high:.3f}, """
    interval = interval if "em" in card else '<p class="small">'  # only a share has one
    return f"""<div class="card {look}"><h3>{title}</h3>
<p class="big">{score:.2f}<small>{_SCORE[card["score_name"]]}</small></p>
{interval}n = {_text(card.get("n", "?"))}.{note}</p>
<table class="kinds">{kinds}</table></div>"""


def _kind_row(kind: str, part: Record) -> str:
    score = _score(part)
    bar = f'<div class="bar"><i style="width:{_percent(score)}"></i></div>'
    return _cells("td", _text(kind), bar if "em" in part else "", _number(score), f"n = {_text(part.get('n', '?'))}")


def _score(part: Record) -> float:
    """Of a part of a card. Those of earlier versions say em alone."""
    return part.get("score", part.get("em")) or 0.0


def _measure_table(run: RunFiles) -> str:
    before, after = run.before or {}, run.after or {}
    rows = [
        _cells("td", name, _number(before.get(key)), _number(after.get(key)), meaning)
        for key, name, meaning in _MEASURES
        if any(card.get(key) is not None for card in (before, after))
        # Where every right answer is one name, these say the same as exact match.
        and (key not in ("sub_em", "f1") or any(card.get(key) != card.get("em") for card in (before, after)))
    ]
    rows.append(_cells("td", "ended because", _stops(before), _stops(after), "stop reasons of the episodes"))
    head = _cells("th", "", "before", "after", "")
    body = "".join(rows)
    return f'<div class="scroll"><table class="measures"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _stops(card: Record) -> str:
    reasons = card.get("stop_reasons") or {}
    total = sum(reasons.values())
    common = sorted(reasons.items(), key=lambda item: -item[1])
    shares = [(name, count / total) for name, count in common if count]
    return (
        "<br>".join(f"{_text(name)} {'under 1%' if share < 0.005 else f'{share:.0%}'}" for name, share in shares) or "–"
    )


# ---------------------------------------------------------------------------------------------------------- curves


def _curves(run: RunFiles) -> str:
    if not run.metrics:
        return ""
    measures_em = run.score_name == "em"
    em = [
        Line("train, sampled", run.series(EM_SAMPLED if measures_em else "critic/score/mean"), "c1", faint=True),
        Line("validation, greedy", run.series(EM_GREEDY), "c2"),
    ]
    parts = [(line[STEP], step_times(line)) for line in run.metrics if "timing_s/step" in line and STEP in line]
    names = [name for name in (parts[0][1] if parts else []) if any(part[name] for _, part in parts)]
    times = [Line(name, [(step, part[name]) for step, part in parts], f"c{i}") for i, name in enumerate(names, 1)]
    reward = [Line("mean return of a trajectory", run.series("critic/score/mean"), "c1", faint=True)]
    calls = [Line("calls per question", run.series(CALLS), "c5", faint=True)]
    entropy = [Line("entropy", run.series("actor/entropy"), "c3")]
    kl = [Line("KL to the sampling policy", run.series("actor/ppo_kl"), "c4", faint=True)]
    kl += [Line("KL to the start", run.series("actor/kl_loss"), "c2", faint=True)]
    marks = em_marks(run)
    tests = [Line(f"test, {mark.name}: {mark.y:.2f}", [(mark.x, mark.y)], "star") for mark in marks]
    charts = [
        _figure(
            _SCORE[run.score_name].capitalize(),
            "The dots at the ends are the evaluations above. Sampling tries things out, so it stays below greedy "
            "decoding.",
            em + tests,
            line_chart(em, marks, floor=0, top=1),
        ),
        _figure(
            "Reward",
            "What the algorithm maximises: exact match, less the price of a malformed ending.",
            reward if measures_em else [],  # else it is the first picture
            line_chart(reward, floor=0, top=1),
        ),
        _figure(
            "Tool calls per question",
            "Nobody tells the agent how often to search. It finds out what pays.",
            calls,
            line_chart(calls),
        ),
        _figure(
            "Entropy",
            "How undecided the policy is, in nats per token. It falls as the agent settles; at zero, exploring ends.",
            entropy,
            line_chart(entropy, floor=0),
        ),
        _figure(
            "KL divergence",
            "How far one update moves the policy, estimated from the sampled tokens, so it may dip below zero. Small and "
            "steady is healthy; a spike is a step too large.",
            kl,
            line_chart(kl, floor=0),
        ),
        _figure("Seconds per step", "Where the time goes.", times, stacked_chart(times)),
    ]
    shown = "".join(charts)
    return f"""<section><h2>How it learned</h2><p>From left to right: RL steps. In each, the agent attempts a batch of
questions, and the tokens of better attempts become likelier. Point at a curve to read its values.</p>
<div class="two charts">{shown}</div></section>"""


def _figure(title: str, meaning: str, lines: Sequence[Line], chart: str) -> str:
    shown = [line for line in lines if line.points]
    if not shown:
        return ""
    legend = "".join(f'<span class="key {line.look}">{_text(line.name)}</span>' for line in shown)
    return f"""<figure><h3>{title}</h3><div class="legend">{legend}</div>{chart}
<figcaption>{meaning}</figcaption></figure>"""


# ----------------------------------------------------------------------------------------------------- transcripts

_LEGEND = """<p class="explain"><span class="t s">sampled</span> chosen by the policy: mask 1, these tokens
carry the loss &nbsp; <span class="t r">not sampled</span> read by it (prompt, tool results): mask 0 &nbsp; <span
class="t r c">&lt;|control|&gt;</span> control token &nbsp; <span class="t s up">advantage &gt; 0</span> made likelier
&nbsp; <span class="t s down">advantage &lt; 0</span> made less likely &nbsp; <span class="t s paid">reward</span> paid
here. Point at a token for its id, log-probability and advantage.</p>"""


def _comparison(run: RunFiles) -> str:
    pairs = pick_pairs(run.rollouts_before, run.rollouts_after)
    if not pairs:
        return ""
    blocks = "".join(
        f'<article><h3>{_text(after.get("question"))}</h3><p class="small">right answer: {_answers(after)} · '
        f'{_text(after.get("kind", ""))} · {why}</p><div class="two">{_transcript("Before RL", before)}'
        f"{_transcript('After RL', after)}</div></article>"
        for why, before, after in pairs
    )
    return f"""<section><h2>The same questions before and after, token by token</h2>
<p>This is all the model sees and says. The mask is what makes agent RL work: documents are in the context, but the
agent did not write them, so it must not be rewarded or punished for them.</p>{_LEGEND}{blocks}</section>"""


def pick_pairs(before: Iterable[Record], after: Iterable[Record]) -> list[tuple[str, Record, Record]]:
    """(why it is shown, before, after): two questions that were learned, one that was known, one still wrong."""
    earlier: dict[str, Record] = {}
    for record in before:
        earlier.setdefault(str(record.get("question")), record)
    wanted = {"learned: wrong before, right now": 2, "right before and after": 1, "still wrong": 1, "lost": 1}
    chosen: list[tuple[str, Record, Record]] = []
    for record in after:
        old = earlier.pop(str(record.get("question")), None)
        if old is None:
            continue
        was, now = _right(old), _right(record)
        names = list(wanted)
        why = names[0] if now and not was else names[1] if now else names[3] if was else names[2]
        if wanted[why]:
            wanted[why] -= 1
            chosen.append((why, old, record))
    return sorted(chosen, key=lambda item: list(wanted).index(item[0]))


def _training_group(run: RunFiles) -> str:
    chosen = pick_group(run.rollouts_train)
    if not chosen:
        return ""
    best, worst = chosen
    step = _text(best.get("step", "?"))
    titles = (f"Reward {_number(best.get('reward'))}", f"Reward {_number(worst.get('reward'))}")
    # Without a comparison above, nobody has explained the colours yet.
    legend = "" if pick_pairs(run.rollouts_before, run.rollouts_after) else _LEGEND
    pair = _transcript(titles[0], best) + (_transcript(titles[1], worst) if worst is not best else "")
    return f"""<section><h2>What one update learned from: step {step}</h2>
<p>Attempts at one question, sampled during training. The underlines are the <b>advantages</b>: how much better or worse
than expected it went after each token. That is all the teaching there is.</p>{legend}
<article><h3>{_text(best.get("question"))}</h3><p class="small">right answer: {_answers(best)}</p>
<div class="two">{pair}</div></article></section>"""


def pick_group(rollouts: Iterable[Record]) -> tuple[Record, Record] | None:
    """The best and the worst attempt of the group whose rewards differ most; None without rollouts."""
    groups: dict[str, list[Record]] = {}
    for record in rollouts:
        groups.setdefault(str(record.get("group_id")), []).append(record)

    def ends(records: list[Record]) -> tuple[Record, Record]:
        return max(records, key=_reward), min(records, key=_reward)

    pairs = [ends(records) for records in groups.values()]
    best, worst = max(pairs, key=lambda pair: _reward(pair[0]) - _reward(pair[1]), default=(None, None))
    if best is not None and best is not worst and _reward(best) == _reward(worst):
        return best, best
    return (best, worst) if best is not None else None


def _transcript(title: str, record: Record) -> str:
    calls = (record.get("metrics") or {}).get("tool_calls")
    facts = [f"ended: {record.get('stop_reason', '?')}", f"reward {_number(record.get('reward'))}"]
    if calls is not None:
        facts.append(f"{calls:g} call{'' if calls == 1 else 's'}")
    mark = "✓" if _right(record) else "✗"
    try:
        body = "".join(_row_html(row) for row in record.get("rows") or [])
    except (AgentR1Error, TypeError, AttributeError) as error:
        body = f'<p class="small">This transcript cannot be shown: {_text(error)}.</p>'
    return f"""<div class="card transcript"><h4>{title} <b class="{"good" if mark == "✓" else "bad"}">{mark}</b></h4>
<p class="small">{_text(" · ".join(facts))}</p>{body or '<p class="small">No tokens were recorded.</p>'}</div>"""


def _row_html(row: Record) -> str:
    """The prompt folded away (it is long, and the same each time), the episode open."""
    mask = row.get("action_mask") or []
    start = mask.index(1) if 1 in mask else len(mask)
    prompt = f"<details><summary>prompt: {start} tokens, not sampled</summary>{tokens_html(row, 0, start)}</details>"
    return f'<div class="tokens">{prompt}{tokens_html(row, start)}</div>'


def _right(record: Record) -> bool:
    parts = {**(record.get("metrics") or {}), **(record.get("reward_parts") or {})}
    return bool(parts["em"] > 0 if "em" in parts else _reward(record) > 0)


def _reward(record: Record) -> float:
    return record.get("reward") or 0.0


def _answers(record: Record) -> str:
    return " or ".join(f"<b>{_text(answer)}</b>" for answer in record.get("ground_truth") or ["?"])


# ------------------------------------------------------------------------------------------------------ small parts


def _configuration(run: RunFiles) -> str:
    return f"""<section><h2>Configuration</h2><details><summary>config.yaml: everything this run depended on</summary>
<pre>{_text(run.config_text)}</pre></details></section><footer>Agent-R1 {agent_r1.__version__}</footer>"""


def _text(value: Any) -> str:
    return html.escape(clean(str(value)))


def _cells(tag: str, *contents: str) -> str:
    """A table row; `contents` are HTML already."""
    return "<tr>" + "".join(f"<{tag}>{content}</{tag}>" for content in contents) + "</tr>"


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.1f}%"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · Agent-R1</title><style>{css}</style></head><body><main>
{body}
</main></body></html>
"""

_CSS = """
:root { color-scheme: light dark; --page: #fbfaf7; --card: #ffffff; --ink: #1d2327; --read: #7b8388; --rule: #e4e1d8;
  --accent: #0f766e; --sampled: #d3efe6; --up: #1a9c5b; --down: #d6453d; --star: #c47f00;
  --c1: #0f766e; --c2: #2563eb; --c3: #c2570c; --c4: #be185d; --c5: #7c3aed; --c6: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #14181b; --card: #1c2226; --ink: #e6eaec; --read: #8b959b;
  --rule: #30383d; --accent: #4fd1bd; --sampled: #17453d; --up: #3ecf83; --down: #ff7b72; --star: #f0b429;
  --c1: #4fd1bd; --c2: #7aa7ff; --c3: #f59e5b; --c4: #f472b6; --c5: #b392f0; --c6: #9ca3af; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 80px; }
h1 { font-size: 40px; line-height: 1.15; margin: 0 0 12px; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 24px; margin: 64px 0 8px; letter-spacing: -.01em; }
h3 { font-size: 17px; margin: 0 0 4px; } h4 { margin: 0; font-size: 15px; }
p { max-width: 74ch; margin: 0 0 16px; text-wrap: pretty; }
.kicker { color: var(--accent); font-weight: 600; margin: 0 0 4px; }
.lead { font-size: 19px; }
.small, figcaption, footer { font-size: 14px; color: var(--read); margin: 0 0 8px; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 36px; margin: 24px 0 0; }
.facts dt { font-size: 13px; color: var(--read); } .facts dd { margin: 0; font-weight: 600; }
.notice { border-left: 4px solid var(--star); background: var(--card); padding: 12px 18px; margin: 24px 0 0; }
.notice ul { margin: 4px 0 0; padding-left: 20px; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 20px;
  align-items: start; }
.card, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 20px 24px;
  margin: 0; min-width: 0; }
.charts { align-items: stretch; }
.card.strong { border-color: var(--accent); }
.big { font-size: 60px; line-height: 1; font-weight: 700; letter-spacing: -.03em; margin: 8px 0 16px; }
.big small { font-size: 15px; font-weight: 400; letter-spacing: 0; color: var(--read); margin-left: 10px; }
.strong .big { color: var(--accent); }
.interval, .bar { position: relative; height: 8px; border-radius: 4px; background: var(--rule); }
.interval { margin: 0 0 10px; } .bar { min-width: 90px; height: 6px; }
.interval i, .bar i { position: absolute; top: 0; height: 100%; border-radius: 4px; left: 0; }
.fill, .bar i { background: var(--read); } .strong .fill, .strong .bar i { background: var(--accent); }
.interval .ci { top: -4px; height: 16px; border: 2px solid var(--ink); border-width: 0 2px; border-radius: 0; }
.interval .ci::after { content: ""; position: absolute; left: 0; right: 0; top: 7px; border-top: 2px solid var(--ink); }
table { border-collapse: collapse; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }
.kinds { margin-top: 14px; font-size: 14px; } .kinds td { padding: 3px 10px 3px 0; white-space: nowrap; }
.kinds td:nth-child(2) { width: 60%; } .kinds td:last-child { color: var(--read); padding-right: 0; }
.scroll { overflow-x: auto; margin-top: 20px; }
.fell { margin: 16px 0 0; font-weight: 600; }
.measures th, .measures td { text-align: left; padding: 7px 24px 7px 0; border-bottom: 1px solid var(--rule);
  font-weight: 400; vertical-align: top; white-space: nowrap; }
.measures td:nth-child(3) { font-weight: 600; } .measures td:last-child, .measures thead th { color: var(--read); }
.measures td:last-child { width: 99%; white-space: normal; min-width: 200px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; color: var(--read); margin-bottom: 6px; }
.key::before { content: ""; display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 7px;
  vertical-align: middle; background: var(--line); }
.c1 { --line: var(--c1); } .c2 { --line: var(--c2); } .c3 { --line: var(--c3); } .c4 { --line: var(--c4); }
.c5 { --line: var(--c5); } .c6 { --line: var(--c6); } .star { --line: var(--star); }
.chart { width: 100%; height: auto; display: block; overflow: visible; }
.chart text { font-size: 12px; fill: var(--read); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--line); stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-width: 1.2; opacity: .35; }
.area { fill: var(--line); opacity: .8; stroke: var(--card); stroke-width: 1; }
.dot { fill: var(--line); opacity: 0; } .dot:hover { opacity: 1; }
.mark path { stroke: var(--star); stroke-width: 2; fill: none; } .mark circle { fill: var(--star); }
figcaption { margin: 8px 0 0; }
article { margin: 32px 0 0; } article + article { margin-top: 48px; }
.good { color: var(--up); } .bad { color: var(--down); }
.explain { max-width: none; font-size: 14px; line-height: 2; color: var(--read); }
.explain .t { font: 13px ui-monospace, Menlo, Consolas, monospace; padding: 1px 4px; }
details summary { cursor: pointer; color: var(--read); font: 14px system-ui, sans-serif; margin: 0 0 8px; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 20px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 64px; }
@media (max-width: 600px) { .chart text { font-size: 19px; } .card, figure { padding: 16px; }
  .measures tr { display: grid; grid-template-columns: 1.3fr 1fr 1fr; border-bottom: 1px solid var(--rule); }
  .measures th, .measures td { border: 0; padding: 6px 8px 0 0; white-space: normal; overflow-wrap: anywhere; }
  .measures td:last-child { grid-column: 1 / -1; min-width: 0; width: auto; padding-bottom: 6px; font-size: 14px; }
  .measures th:last-child { display: none; } }
"""
