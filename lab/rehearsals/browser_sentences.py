"""Provoke what can go wrong for the page of recipes/browser, and read its sentences.

A tab is hidden while it trains, a worker dies without a word, and the page is loaded again during a
run. A browser has no SIMD, and another one no memory. The runs must end with Node's weights, to the
bit. Needs Debian's chromium and firefox-esr.
"""

from __future__ import annotations

import time
from typing import Any

from agent_r1_recipes.browser import world
from lab.rehearsals._chromium import chromium
from lab.rehearsals._firefox import Firefox, firefox
from lab.rehearsals.browser import SHORT, in_node
from lab.rehearsals.browser_pages import DONE, FILE, READY, open_page

HIDDEN = "This tab was hidden while it trained. Browsers slow hidden tabs, and no step is lost."
NO_SIMD = (
    "Something is wrong: this browser cannot run WebAssembly with SIMD; update it (since 2023 all "
    "have it)."
)
NO_MEMORY = (
    "Something is wrong: this device gave the page too little memory (300 MB); close other tabs "
    "and reload."
)
DEAD = (
    "The worker stopped (it was silent for 60 seconds). Another one goes on after step {}, and no "
    "step is lost."
)
AFTER_CLOSING = (
    "When this page was closed, a run of seed 1 had taken {} of 5 steps. They went with the page; "
    "press Train to take the same steps again."
)
# Chromium needs SSE 4.1 for SIMD. A page of WebAssembly's memory has 64 kB.
WITHOUT_SIMD = "--js-flags=--no-enable-sse4-1"
WITHOUT_MEMORY = "--js-flags=--wasm-max-mem-pages=200"
# Firefox has no setting for SIMD alone, and none for memory.
WITHOUT_WEBASSEMBLY = 'user_pref("javascript.options.wasm", false);\n'


def run() -> dict[str, Any]:
    hash_in_node = in_node(world.pack(world.header()), {})
    sentences_of = {}
    for name, start in {"chromium": chromium, "firefox": firefox}.items():
        with start() as browser:
            sentences = [
                provoke(browser, hash_in_node) for provoke in (_hide, _end_worker, _reopen)
            ]
        sentences_of[name] = sentences
        print(f"  {name}: a hidden tab, a dead worker, a reopened page", flush=True)
    refusals = {
        "chromium without SIMD": (lambda: chromium(WITHOUT_SIMD), NO_SIMD),
        "chromium without memory": (lambda: chromium(WITHOUT_MEMORY), NO_MEMORY),
        "firefox without WebAssembly": (lambda: firefox(WITHOUT_WEBASSEMBLY), NO_SIMD),
    }
    for name, (start, sentence) in refusals.items():
        with start() as browser:
            sentences_of[name] = [_refuse(browser, sentence)]
        print(f"  {name}: {sentence}", flush=True)
    return {
        "sentences_seen": sum(map(len, sentences_of.values())),
        "hash": hash_in_node[:16],
        "seen": sentences_of,
    }


def _text(browser: Any, name: str) -> str:
    return browser.js(f"document.querySelector('#{name}').innerText")


def _press_train(browser: Any) -> None:
    """Begin a short run, and wait for its first steps."""
    browser.js(f"document.querySelector('#steps').append(new Option({SHORT}))")
    browser.js(f"(document.querySelector('#steps').value = '{SHORT}')")
    browser.js("(document.querySelector('#train').click(), true)")
    browser.wait("page.run && !page.run.done && page.run.figures.length >= 2", 300)


def _finish(browser: Any, right_hash: str) -> None:
    browser.wait(DONE, 300)
    assert browser.js("page.run.hash") == right_hash, "other weights"


def _hide(browser: Any, right_hash: str) -> str:
    """Open another tab in front of the page, and come back."""
    open_page(browser)
    _press_train(browser)
    if isinstance(browser, Firefox):
        browser.send("browsingContext.create", type="tab")
        back = ("browsingContext.activate", {"context": browser.tab})
    else:
        browser.send("Target.createTarget", url="about:blank")
        back = ("Page.bringToFront", {})
    browser.wait("document.visibilityState === 'hidden'", 30)
    _finish(browser, right_hash)  # while no one looks
    browser.send(back[0], **back[1])
    browser.wait("document.visibilityState === 'visible'", 30)
    assert _text(browser, "hidden") == HIDDEN
    return HIDDEN


def _end_worker(browser: Any, right_hash: str) -> str:
    """End the worker that decides: it sends no message, and no error."""
    open_page(browser)
    _press_train(browser)
    steps = browser.js("(page.workers[0].terminate(), page.run.figures.length)")
    browser.wait("!document.querySelector('#notice').hidden", 120)
    sentence = _text(browser, "notice")
    assert sentence in (DEAD.format(steps), DEAD.format(steps + 1)), sentence
    _finish(browser, right_hash)
    return sentence


def _reopen(browser: Any, right_hash: str) -> str:
    """Load the page again during a run. The browser asks first, where a person has clicked."""
    open_page(browser)
    _press_train(browser)
    steps = browser.js("page.run.figures.length")
    browser.open(f"file://{FILE}")
    browser.wait(READY, 300)
    sentence = _text(browser, "notice")
    assert sentence in [AFTER_CLOSING.format(steps + more) for more in range(SHORT - steps)], (
        sentence
    )
    _press_train(browser)
    _finish(browser, right_hash)
    return sentence


def _refuse(browser: Any, sentence: str) -> str:
    """Open the page where it cannot train. It says why, and no button does anything."""
    browser.open(f"file://{FILE}")
    browser.wait(READY, 120)
    time.sleep(2)  # for messages of the helper, which fails too
    assert _text(browser, "problem") == sentence, _text(browser, "problem")
    assert not browser.js("[...document.querySelectorAll('main button')].some((b) => !b.disabled)")
    assert browser.js("document.querySelector('#notice').hidden")
    return sentence
