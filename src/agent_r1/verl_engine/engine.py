"""verl's FSDP engine with the local loop's learning rate: verl itself knows constant and cosine, and no line.

In: verl's optimiser settings. Out: the engine that verl chooses before its own, as it is registered for a vendor. The
platform of a CPU calls itself the vendor "cpu" (platform.py); its device is looked up as "cuda" (`VERL_ENGINE_DEVICE`).
"""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import agent_r1.verl_engine.algorithms  # noqa: F401  verl imports one module by name, this one: our loss comes with it
from agent_r1.training.learner import linear_decay


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor=["cpu", "nvidia"])
class ActorEngine(FSDPEngineWithLMHead):
    """The critic keeps verl's engine: its learning rate is constant."""

    def _build_lr_scheduler(self, optimizer) -> LambdaLR:
        o = self.optimizer_config
        first = int(o.num_cycles) + 1  # RL step of the first update: compose.py puts the critic's warm-up there
        return LambdaLR(
            optimizer,
            lambda done: linear_decay(first + done, o.total_training_steps, o.lr_warmup_steps, o.min_lr_ratio),
        )

    def lr_scheduler_step(self) -> float:
        """The rate of the update that is over, for the log; verl's own returns the next one's."""
        used = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        return used
