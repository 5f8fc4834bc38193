"""Train PPO in the GPU's own configuration on four gloo ranks.

The critic runs on packed rows, with its warm-up and the KL in the reward. Like gpu_config, which
runs grpo: preset hotpotqa-4xh100, scaled down.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lab.rehearsals.gpu_config import agent, machine, small, sound

STEPS = ["trainer.steps=2", "trainer.save_every=2", "trainer.eval_every=0", "critic.warmup_steps=1"]


def run() -> dict[str, Any]:
    """Return figures of two steps; the second also trains the actor. Raises if one is wrong."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-gpu-") as folder:
        home = Path(folder)
        environment = machine(home)
        words = ["--preset=hotpotqa-4xh100", *small(home, environment)]
        for stage in ("data", "index"):
            agent(environment, stage, *words)
        agent(environment, "train", "ppo", *words, *STEPS, "--run=ppo", "--plain")
        first, second = sound(home / "runs" / "ppo", steps=2)
    if "actor/pg_loss" in first or "actor/pg_loss" not in second:
        raise RuntimeError("the critic's warm-up is not one step long")
    return {
        "critic_loss": round(second["critic/vf_loss"], 4),
        "reward_kl_penalty": second["actor/reward_kl_penalty"],
        "parity_mean": round(second["checkpoint/logprob_diff_mean"], 5),
        "probs_diff_mean": round(
            max(line["training/rollout_probs_diff_mean"] for line in (first, second)), 5
        ),
    }
