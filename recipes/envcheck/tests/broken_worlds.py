"""Worlds that misbehave, each in its own way, once the agent calls `act`."""

import os
import sys
import time


class World:
    """Nothing goes wrong."""

    def reset(self, seed: int, **row) -> str:
        self.seed, self.acts, self.done = seed, 0, False
        return "Act."

    def act(self, word: str) -> str:
        """Act.

        Args:
            word: Any word.
        """
        self.acts += 1
        return self.go_wrong()

    def go_wrong(self) -> str:
        """Ignore this."""
        return "nothing"

    def get_reward(self) -> float:
        return 0.0


class Hangs(World):
    def go_wrong(self) -> str:
        """Never return, also not for a deadline: the thread holds the interpreter's lock."""
        return str("a" * 30).isalpha() and str(max(map(hash, range(10**12))))


class Exits(World):
    def go_wrong(self) -> str:
        """End the process."""
        os._exit(3)


class SysExits(World):
    def get_reward(self) -> float:
        sys.exit("no reward today")


class Prints(World):
    def go_wrong(self) -> str:
        """Print a gigabyte."""
        for _ in range(1000):
            print("x" * 10**6)
        return "printed"


class NotANumber(World):
    def get_reward(self) -> float:
        return float("nan") if self.acts else 0.0


class Eats(World):
    def go_wrong(self) -> str:
        """Take all memory."""
        World.food = bytearray(10**11)
        return "eaten"


class Drifts(World):
    def reset(self, seed: int, **row) -> str:
        super().reset(seed)
        return f"It is {time.time_ns()}."


def demonstrate(row, history):
    from agent_r1 import Hermes

    return Hermes.call("act", word="now") if len(history) < 3 else Hermes.answer("done")
