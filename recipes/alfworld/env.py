"""Offer ALFWorld's households in Gymnasium's form.

The setting is `env.name=gym:agent_r1_recipes.alfworld.env:Household`.

In: a seed, and commands such as `go to drawer 1`. Out: ALFWorld's answer, and the commands that are
possible now.
"""

from __future__ import annotations

from typing import Any

from agent_r1_recipes.alfworld.game import Game
from agent_r1_recipes.alfworld.household import draw
from agent_r1_recipes.alfworld.memory import Memory, capitalise

UNSHOWN = ("examine", "go", "help", "inventory", "look")
"""First words of commands that are possible, but not listed after an answer. All but `go` change
nothing, and the first text lists where one can go."""


class Household:
    """Do the task in the room. Write one command a turn."""

    game: Game | None = None

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.close()
        self.quest = draw(seed)
        self.memory = Memory(list(self.quest.places))
        self.game = Game(self.quest)
        welcome = self.game.begin()
        # ALFWorld's agents see neither the title nor what is around the task.
        _, room, task = welcome.split("\n\n")
        return capitalise(f"{room}\n{task}", self.quest), {}

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.game
        answer = self.game.do(command.lower())
        commands = [name for name in sorted(self.game.actions) if name.split()[0] not in UNSHOWN]
        shown = ", ".join(commands)
        self.memory.read(f"{answer}\n{shown}")
        won = self.game.won
        text = f"{answer}\n{self.memory.notes(self.quest)}\n{shown}"
        return capitalise(text, self.quest), float(won), won, False, {"is_success": won}

    def close(self) -> None:
        if self.game:
            self.game.close()
            self.game = None
