"""Worlds that misbehave, each in its own way, once the agent calls `act`."""

import os
import random
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


def write_events(*lines: bytes) -> None:
    """Write to whatever descriptor has the check's events."""
    for number in range(3, 64):
        try:
            os.write(number, b"".join(line + b"\n" for line in lines))
        except OSError:
            continue


class ForgesEnd(World):
    def reset(self, seed: int, **row) -> str:
        write_events(b'{"ready": true}', b'{"end": true}')
        os._exit(0)


class ForgesLate(World):
    def reset(self, seed: int, **row) -> str:
        write_events(b'{"ready": true}', b'{"late": 0}', b'{"end": true}')
        os._exit(0)


class ForgesRefusal(World):
    def reset(self, seed: int, **row) -> str:
        write_events(b'{"refused": "all is well", "exit_code": 0}')
        os._exit(0)


class WritesJunk(World):
    def go_wrong(self) -> str:
        """Write what is no JSON."""
        write_events(b"junk")
        return "junk"


class LeavesDaemon(World):
    def go_wrong(self) -> str:
        """Start a process in a session of its own, whose parent has ended."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(os.environ["DAEMON_FILE"], "a") as file:
                    file.write(f"{os.getpid()}\n")
                os.closerange(0, 64)
                time.sleep(600)
            os._exit(0)
        return "left"


class SharesRandom(World):
    def reset(self, seed: int, **row) -> str:
        random.seed(seed)
        return super().reset(seed, **row)

    def go_wrong(self) -> str:
        """Draw from the numbers that all episodes of the process share."""
        return str(random.random())


class Escapes(World):
    def get_reward(self) -> float:
        raise ValueError("\x1b]0;owned\x07")
