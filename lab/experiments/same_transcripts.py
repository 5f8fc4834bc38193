"""Compare two evaluations of one model, question by question.

python lab/experiments/same_transcripts.py A.jsonl B.jsonl      files that `eval --out` wrote

Prints how many transcripts are equal in their text, and how many in reward and stop reason. Blanks
and line ends are left out of the text, because a server returns none at the ends of a message.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from agent_r1.ground.files import read_jsonl


def text_of(episode: dict[str, Any]) -> str:
    """Return the whole conversation without blanks."""
    tokens = [token for row in episode["rows"] for token in row["tokens"]]
    return re.sub(r"\s", "", "".join(tokens))


def main(first_folder: str, right: str) -> None:
    files = [read_jsonl(Path(name)) for name in (first_folder, right)]
    ours, theirs = ({episode["question"]: episode for episode in file} for file in files)
    if ours.keys() != theirs.keys():
        sys.exit("the files have different questions")
    same_text = sum(text_of(ours[question]) == text_of(theirs[question]) for question in ours)
    same_end = sum(
        all(ours[question][key] == theirs[question][key] for key in ("reward", "stop_reason"))
        for question in ours
    )
    print(f"{len(ours)} questions: {same_text} equal transcripts, {same_end} equal ends")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
