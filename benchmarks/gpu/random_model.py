"""Write random weights in the shape of a published model, with a small chat tokenizer.

    python -m benchmarks.gpu.random_model Qwen/Qwen3-1.7B FOLDER

In: the name of a model in `ground/shapes.py`. Out: a folder that verl and vLLM load without a
network; nothing is learned with it. Without a GPU the shape is much smaller, to rehearse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agent_r1.cluster.real_update import write_model
from benchmarks.gpu.common import shape_here


def main(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_here(name)
    write_model(shape, "Qwen3" in name, folder)
    fill_vocabulary(folder, shape.vocab)
    print(f"{folder}: random weights in the shape of {name}")


def fill_vocabulary(folder: Path, rows: int) -> None:
    """Give the tokenizer a token for each of the embedding's `rows`, which no text uses.

    verl lets vLLM sample only ids that the tokenizer has; the trainer's softmax runs over all rows.
    A trained model gives the other rows no probability. Random weights give each row about the
    same, so with 300 of 1,024 ids the two differ by log(1024 / 300) = 1.2 in log-probability.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    pieces, controls = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    first_control = rows - len(controls)
    pieces.update({f"<unused {i}>": i for i in range(len(pieces), first_control)})
    for i, control in enumerate(controls, first_control):
        control["id"] = i
    path.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
