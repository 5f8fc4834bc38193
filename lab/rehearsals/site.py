"""Open the book in headless Chromium at 390 and 1300 pixels, and search it.

There must be no console error. Needs `make install`, and Debian's chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "index.html",
    "lessons/*.html",
    "metrics.html",
    "code/src/agent_r1/training/*.html",
    "code/notebooks/*.html",
]


def run() -> dict[str, int]:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: apt-get install chromium"
    with tempfile.TemporaryDirectory() as place:
        site = Path(place) / "site"
        command = [
            f"{sys.prefix}/bin/mkdocs",
            "--quiet",
            "build",
            "-f",
            "docs/site/mkdocs.yml",
            "-d",
            site,
        ]
        subprocess.run(command, cwd=ROOT, check=True)

        def open_page(address: str, width: int) -> str:
            """Return the page's tree after its scripts ran.

            Raises AssertionError for a console message.
            """
            done = subprocess.run(
                [
                    chromium,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--enable-logging=stderr",
                    "--dump-dom",
                    "--host-resolver-rules=MAP * ~NOTFOUND",
                    "--virtual-time-budget=4000",
                    f"--window-size={width},900",
                    f"--user-data-dir={place}/profile",
                    f"file://{site}/{address}",
                ],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            messages = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
            assert not messages, f"{address}: {messages[0]}"
            return done.stdout

        pages = sorted({page for pattern in PAGES for page in site.glob(pattern)})
        for page in pages:
            for width in (390, 1300):
                assert "</html>" in open_page(str(page.relative_to(site)), width)
        match = re.search(r"(\d+) matching documents", open_page("index.html?q=advantage", 1300))
        assert match, "the search shows no number"
        documents = int(match[1])
        assert documents > 5
        return {
            "pages": len(pages),
            "formulas": open_page("lessons/06-losses.html", 1300).count("<math"),
            "found": documents,
        }
