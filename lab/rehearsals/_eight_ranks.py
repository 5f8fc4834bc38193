"""Run one rank of `cluster/real_update.py` on a CPU, with a GPU's configuration of verl.

    torchrun --nproc-per-node 8 -m lab.rehearsals._eight_ranks FOLDER

In and out are those of real_update.py. `_as_on_a_gpu.py` lists what a CPU cannot do; the rest of
what verl gets is a GPU run's, such as packed rows and bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agent_r1.cluster import real_update
from agent_r1.cluster.compose import Sources, overrides
from agent_r1.config import Config
from lab.rehearsals._as_on_a_gpu import CANNOT, merge


def overrides_of_a_gpu(config: Config, sources: Sources, device: str) -> dict[str, Any]:
    """Return what verl gets on a GPU, except what a CPU cannot do."""
    return merge(overrides(config, sources, "cuda"), CANNOT)


if __name__ == "__main__":
    real_update.overrides = overrides_of_a_gpu
    real_update.main(Path(sys.argv[1]))
