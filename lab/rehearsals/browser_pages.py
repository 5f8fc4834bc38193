"""Train in the page of recipes/browser in two browsers: Node's weights, to the bit.

Three seeds in each, two with two workers and one with one. Workers are ended in the middle of a
run. Hostile questions stay text. Needs Debian's chromium and firefox-esr.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_r1_recipes.browser import world
from lab.rehearsals._chromium import chromium
from lab.rehearsals._firefox import firefox
from lab.rehearsals.browser import HASHES, LONG, SEEDS, SHORT, in_node
from lab.rehearsals.page import LOOKS, PAYLOADS

FILE = Path(__file__).parents[2] / "docs" / "train.html"


def run() -> dict[str, Any]:
    short = in_node(world.pack(world.header()), {})
    figures: dict[str, Any] = {"megabytes": round(FILE.stat().st_size / 1e6, 2)}
    figures |= _in_chromium(short) | _in_firefox()
    return figures


READY = "document.querySelector('#score').innerText || !document.querySelector('#problem').hidden"
DONE = "page.run.done || !document.querySelector('#problem').hidden"
FRAMES = """(() => {
  window.gaps = [];
  let last = performance.now();
  const look = (now) => { gaps.push(now - last); last = now; requestAnimationFrame(look); };
  requestAnimationFrame(look);
  return true;
})()"""
GAP = "gaps.sort((a, b) => a - b)[Math.floor(0.99 * gaps.length)]"


def open_page(browser: Any) -> None:
    """Open the page, and wait until it is ready."""
    browser.open(f"file://{FILE}")
    browser.wait(READY, 300)
    _no_problem(browser)
    assert browser.js("page.workers.length") == 2, "this part needs two cores"


def _no_problem(browser: Any) -> None:
    problem = browser.js("document.querySelector('#problem').innerText")
    assert not problem, problem
    notice = browser.js("document.querySelector('#notice').innerText")
    assert not notice, notice


def train(browser: Any, seed: int, workers: int) -> dict[str, Any]:
    """Press Train. Return hash, seconds until the final weights, and the frames' gap."""
    for name, value in {"seed": seed, "workers": workers, "steps": LONG}.items():
        browser.js(f"(document.querySelector('#{name}').value = '{value}')")
    browser.js(FRAMES)
    browser.js("(document.querySelector('#train').click(), true)")
    stale = browser.js("document.querySelector('#same').innerText + page.run.hash")
    assert stale == "undefined", "the page still speaks of the run before"
    browser.wait(DONE, 900)
    _no_problem(browser)
    record = browser.js("({ hash: page.run.hash, seconds: page.run.wall })")
    record["frame_gap_p99_ms"] = browser.js(GAP)
    browser.wait("document.querySelector('#score').dataset.after", 300)
    return record


def _three_seeds(browser: Any) -> list[float]:
    """Train each seed, with two workers and with one. Return the gaps between frames."""
    gaps = []
    for seed in SEEDS:
        open_page(browser)
        record = train(browser, seed, 1 if seed == SEEDS[-1] else 2)
        assert record["hash"] == HASHES[seed], (seed, record)
        print(f"  {type(browser).__name__}, seed {seed}: {record}", flush=True)
        gaps.append(record["frame_gap_p99_ms"])
    return gaps


def _kill_workers(browser: Any, right_hash: str) -> None:
    """End a helper, then the worker that decides: no step is lost."""
    browser.js(f"(document.querySelector('#steps').append(new Option({SHORT})), true)")
    ends = {
        "A helper stopped": "page.workers[1].onerror({ preventDefault() {} })",
        "Another one goes on after step": "page.workers[0].onerror({ preventDefault() {} })",
    }
    for sentence, end in ends.items():
        for name, value in {"seed": 1, "workers": 2, "steps": SHORT}.items():
            browser.js(f"(document.querySelector('#{name}').value = '{value}')")
        browser.js("(document.querySelector('#train').click(), true)")
        browser.wait("page.run.figures.length >= 2", 300)
        browser.js(f"({end}, true)")
        browser.wait(DONE, 300)
        assert sentence in browser.js("document.querySelector('#notice').innerText")
        assert browser.js("page.run.hash") == right_hash
    print("  dead workers: the same bits", flush=True)


def _in_chromium(short: str) -> dict[str, Any]:
    """Train, ask hostile questions, and look at the page in four looks."""
    with chromium() as browser:
        gaps = _three_seeds(browser)
        _kill_workers(browser, short)
        for text in PAYLOADS:
            _ask(browser, text)
        for width, dark in LOOKS:
            browser.open(f"file://{FILE}", width, dark)
            browser.wait(READY, 300)
            widths = browser.js("[document.documentElement.scrollWidth, innerWidth]")
            assert widths[0] <= widths[1], widths
        assert not browser.console, browser.console[0]
    return {"hostile_questions": len(PAYLOADS), "frame_gap_p99_ms_chromium": round(max(gaps))}


def _ask(browser: Any, text: str) -> None:
    """Ask a question. It must stay text: no element, no title, no request of its own."""
    browser.js("document.querySelector('#answer').replaceChildren()")
    browser.js(f"document.querySelector('#question').value = {json.dumps(text)}")
    browser.js("ask()")
    browser.wait("document.querySelector('.verdict') !== null")
    tags = browser.js("[...document.querySelectorAll('body *')].map((one) => one.localName)")
    assert not set(tags) & {"img", "iframe", "base", "link", "math", "meta"}, text
    assert browser.js("document.title") == "Train an agent in this page", text


def _in_firefox() -> dict[str, Any]:
    """Train, and ask hostile questions."""
    with firefox() as browser:
        gaps = _three_seeds(browser)
        for text in PAYLOADS:
            _ask(browser, text)
        version = browser.version
    gap = round(max(gaps))
    return {"frame_gap_p99_ms_firefox": gap, "firefox": version}
