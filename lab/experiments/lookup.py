"""Count the tokens that speculative decoding by prompt lookup would accept in recorded episodes.

    python lab/experiments/lookup.py runs/pocket-grpo/rollouts/step_*.jsonl

A draft is what followed the last earlier occurrence of the newest n tokens. One pass verifies it:
the tokens up to the first that differs from the sampled one are accepted, and the pass itself gives
one more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path


def draft(ids: list[int], end: int, n: int, most: int) -> list[int]:
    """Return up to `most` tokens after the last occurrence of ids[end - n:end].

    The occurrence is before `end`.
    """
    newest = ids[end - n : end]
    for start in range(end - 1, n - 1, -1):
        if ids[start - n : start] == newest:
            return ids[start : min(start + most, end)]
    return []


def passes_of(ids: list[int], mask: list[int], n: int, most: int) -> Iterator[int]:
    """Yield the number of sampled tokens that each pass gives."""
    place = 0
    while place < len(ids):
        if not mask[place]:
            place += 1
            continue
        turn_end = place + next((i for i, m in enumerate(mask[place:]) if not m), len(mask) - place)
        guess = draft(ids, place, n, most)
        right = next(
            (i for i, (a, b) in enumerate(zip(guess, ids[place:], strict=False)) if a != b),
            len(guess),
        )
        length = min(right + 1, turn_end - place)
        yield length
        place += length


def main(files: list[Path]) -> None:
    rows = [
        row
        for file in files
        for line in file.read_text().splitlines()
        for row in json.loads(line)["rows"]
    ]
    for n, most in ((2, 2), (2, 3), (2, 5), (3, 3), (3, 5)):
        copies = [
            tokens
            for row in rows
            for tokens in passes_of(row["input_ids"], row["action_mask"], n, most)
        ]
        print(
            f"n {n}, drafts of {most}: {sum(copies) / len(copies):.2f} tokens a pass, "
            f"of {sum(copies)} tokens"
        )


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
