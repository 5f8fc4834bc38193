"""Offer ALFWorld's households in Gymnasium's form.

The setting is `env.name=gym:agent_r1_recipes.alfworld.env:Household`.

In: a seed, and commands such as `go to drawer 1`. Out: ALFWorld's answer, and the commands that are
possible now.
"""

from __future__ import annotations

from typing import Any

from agent_r1_recipes.alfworld.game import Game
from agent_r1_recipes.alfworld.household import draw

UNSHOWN = ("examine", "help", "inventory", "look")
"""First words of commands that change nothing: possible, but not listed after an answer."""


class Household:
    """Do the task in the room. Write one command a turn."""

    game: Game | None = None

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.close()
        self.game = Game(draw(seed))
        welcome = self.game.begin()
        # ALFWorld's agents see neither the title nor what is around the task.
        _, room, task = welcome.split("\n\n")
        return self._show(f"{room}\n{task}"), {}

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.game
        answer = self._show(self.game.do(command))
        won = self.game.won
        return answer, float(won), won, False, {"is_success": won}

    def _show(self, text: str) -> str:
        """Add the commands that change something, in the order of the alphabet."""
        assert self.game
        commands = sorted(self.game.actions)
        shown = [command for command in commands if command.split()[0] not in UNSHOWN]
        return f"{text}\n{', '.join(shown)}"

    def close(self) -> None:
        if self.game:
            self.game.close()
            self.game = None
