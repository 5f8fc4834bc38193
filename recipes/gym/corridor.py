"""An example: a class in Gymnasium's form, without the package."""

import random
from typing import Any


class Corridor:
    """Two treasures lie in a corridor: a small one near, a large one far away."""

    action_space = ("left", "right", "take")
    floor = 0.65
    floor_reason = "each step costs .05, so doing nothing earns more than walking about"

    def reset(self, *, seed: int | None = None, options: Any = None):
        rng = random.Random(seed)
        side = rng.choice([-1, 1])
        self.cell = 0
        self.small = side
        self.large = -side * rng.choice([3, 4])
        return self.look(), {}

    def look(self):
        return {"small": self.direction(self.small), "large": self.direction(self.large)}

    def direction(self, cell: int):
        if cell == self.cell:
            return "here"
        return "left" if cell < self.cell else "right"

    def step(self, action: str):
        if action == "take":
            value = {self.small: 0.3, self.large: 1.0}.get(self.cell, 0.0)
            return self.look(), value, True, False, {"is_success": value == 1.0}
        self.cell += {"left": -1, "right": 1}[action]
        return self.look(), -0.05, False, False, {}

    def close(self):
        pass
