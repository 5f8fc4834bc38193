"""Write random weights in the shape of a published model, with a small chat tokenizer.

    python -m benchmarks.gpu.random_model Qwen/Qwen3-1.7B FOLDER

In: the name of a model in `ground/shapes.py`. Out: a folder that verl and vLLM load without a
network; nothing is learned with it. Without a GPU the shape is much smaller, to rehearse.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent_r1.cluster.real_update import write_model
from benchmarks.gpu.common import shape_here


def main(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(shape_here(name), "Qwen3" in name, folder)
    print(f"{folder}: random weights in the shape of {name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
