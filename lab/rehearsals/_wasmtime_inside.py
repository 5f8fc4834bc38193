"""Run the calls of a training run in Wasmtime.

browser.py runs this in an environment of its own. In: on standard input, lines of JSON. Each is a
call of the module by Node, with its results. The argument is the path of trainer.wasm. Out: the
SHA-256 of the final weights. Sampled tokens and log-probabilities must be equal to Node's, or the
program ends with an AssertionError.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from pathlib import Path
from typing import Any

from wasmtime import Instance, Module, Store

SLOTS = 128


class Trainer:
    """What js/trainer.js does, in Wasmtime."""

    def __init__(self, file: Path):
        self.store = Store()
        module = Module(self.store.engine, file.read_bytes())
        self.exports = Instance(self.store, module, []).exports(self.store)
        self.memory = self.exports["memory"]
        self.gradients: list[bytearray] = []
        assert self.call("setup") and self.call("open_cache", SLOTS)
        self.size = 4 * self.call("parameters")

    def call(self, name: str, *values: float) -> Any:
        return self.exports[name](self.store, *values)

    def put(self, kind: str, values: list[float]) -> int:
        pointer = self.call("allocate", 4 * max(len(values), 1))
        self.memory.write(self.store, array(kind, values).tobytes(), pointer)
        return pointer

    def take(self, kind: str, pointer: int, count: int) -> list[float]:
        values = array(kind)
        values.frombytes(bytes(self.memory.read(self.store, pointer, pointer + 4 * count)))
        return values.tolist()

    def reset(self, weights: str) -> None:
        self.call("forget")
        self.memory.write(self.store, base64.b64decode(weights), self.call("weights"))
        self.call("pack_weights")

    def read(self, batch: dict[str, list[float]], temperature: float, in_node: Any) -> None:
        top = self.call("mark")
        inputs = [self.put("i", batch[name]) for name in ("ids", "slots", "positions")]
        rows, count = self.put("i", batch["rows"]), len(batch["rows"])
        noise = self.put("f", batch["uniforms"])
        temperature = float(temperature)
        tokens, logprobs = (self.call("allocate", 4 * count) for _ in range(2))
        self.call(
            "read", len(batch["ids"]), *inputs, count, rows, noise, temperature, tokens, logprobs
        )
        assert self.take("i", tokens, count) == in_node["tokens"], "another token"
        assert self.take("f", logprobs, count) == in_node["logprobs"], "another log-probability"
        self.call("release", top)

    def differentiate(self, call: dict[str, Any], in_node: Any) -> None:
        top = self.call("mark")
        lists = [self.put("i", call[name]) for name in ("starts", "ids", "positions")]
        places = [self.put("i", call[name]) for name in ("at", "targets")]
        numbers = [self.put("f", call[n]) for n in ("advantage", "old", "reference", "weight")]
        count, loss = len(call["at"]), call["loss"]
        logprobs = self.call("allocate", 4 * count + 4)
        names = ("clipLow", "clipHigh", "clipDual", "temperature", "kl")
        settings = [float(loss[name]) for name in names]  # JSON writes 1.0 as 1
        value = self.call(
            "differentiate", len(call["starts"]) - 1, *lists, count, *places, *numbers, *settings,
            int(loss["imitate"]), 1, logprobs,
        )  # fmt: skip
        assert value == in_node["loss"], "another loss"
        assert self.take("f", logprobs, count) == in_node["logprobs"], "another log-probability"
        self.call("release", top)
        # As Trainer.takeGradient does: a copy, and zeros in its place.
        place = self.call("gradient")
        self.gradients.append(self.memory.read(self.store, place, place + self.size))
        self.memory.write(self.store, bytes(self.size), place)

    def add_shard(self) -> None:
        self.memory.write(self.store, self.gradients.pop(0), self.call("gradient"))
        self.call("add_shard")

    def weights_hash(self) -> str:
        digest = self.call("allocate", 32)
        self.call("sha256", self.call("weights"), self.size, digest)
        return bytes(self.memory.read(self.store, digest, digest + 32)).hex()


def main() -> None:
    """Repeat the calls, in order."""
    trainer = Trainer(Path(sys.argv[1]))
    for line in sys.stdin:
        name, *facts = json.loads(line)
        match name:
            case "reset":
                trainer.reset(facts[0])
            case "read":
                trainer.read(*facts)
            case "copyCache":
                trainer.call("copy_cache", *facts)
            case "differentiate":
                trainer.differentiate(*facts)
            case "addShard":
                trainer.add_shard()
            case "update":
                trainer.call("update", *map(float, facts))
            case _:
                raise ValueError(f"no such call: {name!r}")
    print(trainer.weights_hash())


if __name__ == "__main__":
    main()
