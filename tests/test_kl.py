"""The KL, wherever it is put, pulls the policy to its reference: exact expectations over a small
vocabulary.

The functions are those of the loop (and of verl's trainer): KL into the reward, advantages, the
actor's update.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import trajectory_of

from agent_r1.config import Config, apply_overrides, load_config, preset_names
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.training_rows import collate, trajectory_rows
from agent_r1.training.learner import Learner
from agent_r1.training.loop import update_actor
from agent_r1.training.losses import token_ratios
from agent_r1.training.parts import get_estimator, reward_less_kl
from agent_r1_recipes.credit.settings import CreditAdvantage

PI = torch.tensor([1.0, 2, 5, 8]) / 16
AWAY = torch.tensor([0.4, -0.3, 0.3, -0.2])


class Categorical(torch.nn.Module):
    """A policy that knows one distribution over four tokens, whatever came before."""

    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(PI.log())
        self.shape = SimpleNamespace(vocab_size=len(PI))

    def forward(self, ids_BT, positions_BT, attention, at_BA):
        return torch.zeros(*at_BA.shape, 1)

    def logits(self, hidden_AD):
        return self.theta.expand(len(hidden_AD), -1)


def pull(config: Config, sign: int) -> float:
    """The share of grad KL(pi || ref) that one step of the actor goes down, when nothing but the KL
    is paid.

    The batch holds each token as often as pi expects it, so its mean is the expectation. `sign`:
    which of the tokens the reference finds likelier.
    """
    a, actor = config.actor, Categorical()
    a.kl_coef, a.entropy_coef, a.lr, a.lr_final, a.warmup_steps = 1.0, 0.0, 1.0, 1.0, 0
    a.minibatches, a.epochs, a.grad_clip = 1, 1, 1e9
    tokens = [token for token, p in enumerate(PI) for _ in range(int(16 * p))]
    episodes = [trajectory_of(([0], [token], 0.0)) for token in tokens]
    rows = [row for i, episode in enumerate(episodes) for row in trajectory_rows(episode, i)]
    batch, ref = collate(rows), torch.log_softmax(PI.log() + sign * AWAY, dim=0)
    batch.logprobs_BT[:, 1] = PI.log()[tokens]
    batch.ref_logprobs_BT, batch.values_BT = (
        torch.zeros_like(batch.rewards_BT),
        torch.zeros_like(batch.rewards_BT),
    )
    batch.ref_logprobs_BT[:, 1] = ref[tokens]
    if a.kl_in == "reward":
        batch.rewards_BT, _ = reward_less_kl(
            batch.rewards_BT, batch.logprobs_BT, batch.ref_logprobs_BT, batch.mask_BT, a
        )
    batch.advantages_BT, _ = get_estimator(config.algorithm)(
        batch, CreditAdvantage(normalize_std=False)
    )
    learner = Learner(actor, torch.optim.SGD(actor.parameters(), lr=1.0))
    update_actor(learner, batch, config, 1, torch.float32, token_ratios)
    step = PI.log() - actor.theta.detach()

    theta = PI.log().requires_grad_()
    logpi = torch.log_softmax(theta, dim=0)
    (right,) = torch.autograd.grad((logpi.exp() * (logpi - ref)).sum(), theta)
    return (step @ right / (right @ right)).item()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("place", "estimator"), itertools.product(["reward", "loss"], ["k1", "k2", "k3"])
)
def test_a_pairing_is_accepted_if_and_only_if_it_pulls_to_the_reference(
    algorithm, place, estimator
):
    config = load_config("small", algorithm=algorithm)
    try:
        apply_overrides(config, [f"actor.kl_in={place}", f"actor.kl_estimator={estimator}"])
        accepted = True
    except ConfigError as error:
        accepted, remedy = False, {"reward": "k1", "loss": "k3"}[place]
        assert str(error).endswith(f"set actor.kl_estimator={remedy}") and "\n" not in str(error)
    config.actor.kl_in, config.actor.kl_estimator = place, estimator
    pulls = [pull(config, sign) for sign in (1, -1)]
    assert (
        all(share > 0.7 for share in pulls) if accepted else all(share < 0.3 for share in pulls)
    ), pulls


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("preset", preset_names())
def test_in_every_preset_the_kl_pulls_to_the_reference(preset, algorithm):
    assert all(pull(load_config(preset, algorithm=algorithm), sign) > 0.7 for sign in (1, -1))
