"""Play six games with the real packages, and write what they answer to recorded.json.

python recipes/alfworld/tests/record.py

In: an environment with recipes/alfworld/requirements.txt. The rehearsal `alfworld` plays the same
commands, and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_r1_recipes.alfworld.demonstrator import expert
from agent_r1_recipes.alfworld.game import Game
from agent_r1_recipes.alfworld.household import KINDS, draw

FILE = Path(__file__).parent / "recorded.json"


def seeds() -> list[int]:
    """Return the first seed of each kind of task."""
    kinds = [draw(seed).kind for seed in range(100)]
    return [kinds.index(kind) for kind in KINDS]


def record(seed: int) -> dict[str, Any]:
    """Play the expert's game of a seed, and one command that is not possible."""
    game = Game(draw(seed))
    row: Any = {"extra_info": {"metadata": {"seed": seed}}}
    begin = game.begin()
    turns = [_turn(game, "open the window")]
    history = [{"role": "user", "content": _shown(begin.split("\n\n", 1)[1], game)}]
    while not game.won:
        shown = expert(row, history, None)  # type: ignore[arg-type]  # it draws nothing
        command = shown.lower()  # names have capitals for the tiny model only
        turn = _turn(game, command)
        turns.append(turn)
        history.append({"role": "assistant", "content": command})
        history.append({"role": "tool", "content": _shown(turn["answer"], game)})
    game.close()
    return {"seed": seed, "problem": draw(seed).problem(), "begin": begin, "turns": turns}


def _turn(game: Game, command: str) -> dict[str, Any]:
    answer = game.do(command)
    return {
        "command": command,
        "answer": answer,
        "possible": ", ".join(sorted(game.actions)),
        "won": game.won,
    }


def _shown(text: str, game: Game) -> str:
    return f"{text}\n{', '.join(sorted(game.actions))}"


if __name__ == "__main__":
    text = json.dumps([record(seed) for seed in seeds()], indent=1)
    FILE.write_text(f"{text}\n", encoding="utf-8")
