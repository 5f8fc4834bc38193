"""An example: a class in Gymnasium's form, without the package."""

import random
from typing import Any


class Corridor:
    """A treasure lies in a corridor of nine cells."""

    action_space = ("left", "right", "take")
    floor = 0.65
    floor_reason = "each step costs .05, so doing nothing earns more than walking about"

    def reset(self, *, seed: int | None = None, options: Any = None):
        rng = random.Random(seed)
        self.cell = 4
        self.treasure = rng.choice([0, 1, 2, 3, 5, 6, 7, 8])
        return self.look(), {}

    def look(self):
        side = "left" if self.treasure < self.cell else "right"
        if self.treasure == self.cell:
            side = "here"
        return {"treasure": side}

    def step(self, action: str):
        if action == "take":
            is_at_treasure = self.cell == self.treasure
            return self.look(), float(is_at_treasure), True, False, {"is_success": is_at_treasure}
        self.cell += {"left": -1, "right": 1}[action]
        return self.look(), -0.05, False, False, {}

    def close(self):
        pass
