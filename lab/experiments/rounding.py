"""Measure how sampler and trainer differ in a step's sampled tokens, all of them.

    .venv/bin/python -m lab.experiments.rounding --preset pocket --steps 1 --warmup 0

It needs data, index and cold start of the preset. The metric `training/rollout_logprobs_diff_mean`
reads some rows only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.common import load_setting, make_parser, run

from agent_r1.env import make_env
from agent_r1.ground.device import resolve_device
from agent_r1.model import files as model_files
from agent_r1.model.decoder import Decoder
from agent_r1.rollout.training_rows import Batch
from agent_r1.training import loop
from agent_r1.training.forward import batch_logprobs
from agent_r1.training.learner import Learner, make_learner
from agent_r1.training.parts import make_parts


def main() -> None:
    setting = load_setting(make_parser((__doc__ or "").partition("\n")[0]).parse_args())
    c = setting.config
    learner = make_learner(model_files.load_model(setting.model), c.actor, None)
    real_predict = loop.predict

    def predict(learner: Learner, reference: Decoder | None, batch: Batch, *rest: Any):
        dtype = resolve_device(c.trainer.device, c.trainer.dtype)[1]
        now_BT = batch_logprobs(
            learner.actor, batch, c.rollout.temperature, c.trainer.max_tokens_per_microbatch, dtype
        )
        assert batch.logprobs_BT is not None  # recorded while sampling
        apart = (now_BT - batch.logprobs_BT)[batch.mask_BT.bool()]
        weights = apart.exp()
        outside = (weights < 1 - c.actor.clip_low) | (weights > 1 + c.actor.clip_high)
        print(
            f"{dtype}, {len(apart)} tokens: mean |difference| {apart.abs().mean():.4f} nats; "
            f"weight {weights.mean():.4f} in the mean, {weights.min():.3f} to {weights.max():.3f}; "
            f"outside the clip {outside.float().mean():.2%}"
        )
        return real_predict(learner, reference, batch, *rest)

    loop.predict = predict
    env_of = partial(make_env, tools=setting.tools, config=c.env)
    parts = make_parts(c, learner.actor, setting.chat, env_of, setting.questions)
    loop.train(
        c,
        parts,
        learner,
        on_step=lambda metrics, trajectories, batch: None,
        evaluate=lambda policy: {},
        save=lambda learner: None,
    )


if __name__ == "__main__":
    run(main)
