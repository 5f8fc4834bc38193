"""Gymnasium environments: a class of that shape, an installed id, and what is refused."""

from __future__ import annotations

import asyncio
import enum
import random
from typing import Literal

import numpy as np
import pytest
from building import trust
from conftest import ScriptedPolicy, call, fails_with, make_env_loop

from agent_r1 import EnvConfig, Sampling, StopReason, Task, load_config, make_env, run_episodes
from agent_r1_recipes.gym import play as plays
from agent_r1_recipes.gym.environment import GAMES, Episode, Game, take_action
from agent_r1_recipes.gym.seeds import SEEDS
from agent_r1_recipes.gym.spaces import actions_of, check_observations, text_of

CLOSED: list[str] = []


class Discrete:
    def __init__(self, n, start=0):
        self.n = np.int64(n)
        self.start = np.int64(start)


class Box:
    shape = (4,)


class Pixels(Box):
    shape = (96, 96, 3)


Pixels.__name__ = "Box"


class Dict:
    spaces = {"image": Pixels()}


class Steps:
    """Walk to the third cell."""

    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.cell = np.int64(0)
        return {"cell": self.cell, "map": np.array([1.5, 2.0])}, {}

    def step(self, action):
        if self.seed == 1313:
            raise ValueError("thirteen")
        self.cell += action
        reward = np.float32(1.0) if self.cell == 3 else 0.0
        return {"cell": self.cell}, reward, bool(self.cell == 3), False, {}

    def render(self):
        return None

    def close(self):
        CLOSED.append(f"closed {self.seed}")


class Limited(Steps):
    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, False, True, {"is_success": False}


@pytest.fixture(autouse=True)
def _nothing_closed():
    CLOSED.clear()


def named(cls, monkeypatch=None) -> str:
    name = f"gym:{cls.__module__}:{cls.__name__}"
    trust(name)
    return name


def rows_of(cls, *seeds):
    name = named(cls)
    return [
        {
            "prompt": [{"role": "user", "content": ""}],
            "agent_name": name,
            "reward_model": {"ground_truth": []},
            "extra_info": {"index": index, "metadata": {"seed": seed}},
            "env_kwargs": {},
        }
        for index, seed in enumerate(seeds)
    ]


def episodes(chat, cls, script, *seeds, **settings):
    """Play the script in an environment of `cls` for each seed."""
    config = EnvConfig(**{"name": named(cls), "max_turns": 6, "tool_timeout_s": 20} | settings)
    policy = ScriptedPolicy(chat, script)
    loop = make_env_loop(policy, lambda row: make_env(row, {}, config))
    rows = rows_of(cls, *(seeds or (7,)))
    tasks = [Task(row, str(n), f"s{n}") for n, row in enumerate(rows)]
    return asyncio.run(run_episodes(loop, tasks, Sampling(400)))


def results(trajectory):
    return [c["content"] for step in trajectory.steps for c in step.info.get("tool_calls", ())]


def test_an_episode_by_calls_and_by_plain_text(chat):
    script = [call("step", action=1), "1", "<think>once more</think><answer>1</answer>"]
    [played] = episodes(chat, Steps, script)
    assert results(played) == ["cell: 1", "cell: 2", "cell: 3"]
    assert (played.stop_reason, played.reward) == (StopReason.ANSWERED, 1.0)
    prompt = chat.decode(played.steps[0].observation_ids)
    assert "Walk to the third cell.\ncell: 0\nmap: 1.5, 2" in prompt
    assert CLOSED == ["closed None"] or CLOSED[-1] == "closed 7"


def test_what_is_no_action_is_told_and_does_not_move(chat):
    script = ["go on", call("step", action=2), "1", "1", "1"]
    [played] = episodes(chat, Steps, script, max_invalid_calls=5)
    assert results(played)[0] == "error: there is no action; write one of 0, 1"
    assert results(played)[1].startswith("error: step: argument 'action' must be one of 0, 1")
    assert results(played)[2:] == ["cell: 1", "cell: 2", "cell: 3"]


def test_truncated_is_an_end_by_a_limit(chat):
    [played] = episodes(chat, Limited, ["1"])
    assert played.stop_reason is StopReason.MAX_TURNS and played.metrics["success"] == 0.0


def test_close_is_called_once_also_after_an_exception(chat):
    episodes(chat, Steps, ["1"] * 6, 7)
    assert CLOSED.count("closed 7") == 1
    episodes(chat, Steps, ["1"] * 3 + ["no"] * 2, 1313)  # every step raises, which the agent reads
    assert CLOSED.count("closed 1313") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("seen", "seen"),
        (None, ""),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.array([1, 2]), "1, 2"),
        ({"a": np.bool_(True), "b": (1, 2.0)}, "a: True\nb: 1, 2"),
        ([np.array([1.25])], "1.25"),
        (b"seen", "seen"),
        (["word"] * 65, ", ".join(["word"] * 65)),
    ],
)
def test_values_as_text(value, text):
    assert text_of(value, "it") == text


def test_pixels_boxes_and_continuous_actions_are_refused_by_name():
    for image in (np.zeros((9, 9)), [[0] * 9] * 9):
        with fails_with("unsupported_space"):
            text_of(image, "it")
    for space, words in ((Box(), "Box of shape"), (Pixels(), "pixels"), (Dict(), "pixels")):
        with pytest.raises(Exception, match=words):
            check_observations(space, "it")
    moving = type("Moving", (), {"action_space": Box()})()
    with pytest.raises(Exception, match="Box of continuous actions"):
        actions_of(moving, "it")


def test_the_forms_of_actions():
    def form(**members):
        return actions_of(type("It", (), members)(), "it")

    named_ones = form(action_space=Discrete(2, start=5), action_names=["left", "right"])
    assert named_ones.choices == ["left", "right"] and named_ones.value("right") == 6
    assert named_ones.read(" left ") == "left" and named_ones.read("up") is None

    def step(self, action: Literal["a", "b"]):
        return None

    def count(self, action: int):
        return None

    def untyped(self, action):
        return None

    assert form(step=step).choices == ["a", "b"]
    assert form(step=count).read("-3") == -3 and form(step=count).read("9" * 5000) is None
    with fails_with("unsupported_space"):
        form(step=untyped)


class Move(enum.Enum):
    LEFT = 0
    RIGHT = 1


def test_enums_and_numbers_of_numpy_are_actions():
    def step(self, action: Move):
        return None

    for members in ({"action_space": Move}, {"action_space": list(Move)}, {"step": step}):
        actions = actions_of(type("It", (), members)(), "it")
        assert actions.choices == ["LEFT", "RIGHT"] and actions.value("RIGHT") is Move.RIGHT
    numbers = actions_of(type("It", (), {"action_space": [np.int64(4), np.int64(7)]})(), "it")
    assert [type(choice) for choice in numbers.choices] == [int, int] and numbers.read("7") == 7
    with fails_with("unsupported_space"):
        actions_of(type("It", (), {"action_space": ()})(), "it")


class WithoutSeed(Steps):
    def reset(self):
        return "", {}


class WithoutAction(Steps):
    def step(self):
        return "", 0.0, True, False, {}


class Later(Steps):
    async def reset(self, seed=None, options=None):
        return "", {}


class Screen(Steps):
    def __init__(self):
        raise OSError("no display")


@pytest.mark.parametrize(
    ("cls", "code"),
    [(WithoutSeed, "wrong_signature"), (WithoutAction, "wrong_signature"),
     (Later, "wrong_signature"), (Screen, "broken_code")],
)  # fmt: skip
def test_a_class_that_cannot_be_played_is_refused_before_the_run(cls, code):
    with fails_with(code):
        Game("gym:test:It", cls)


def test_rows_are_seeds_and_no_seed_is_in_two_splits():
    config = load_config("smoke", ["data.name=seeds", "data.train=48", "data.val=9", "data.test=9",
                                   "rollout.prompts_per_step=12"]).data  # fmt: skip
    made = SEEDS.make(config, 0)
    numbers = [entry.extra["metadata"]["seed"] for split in made.splits.values() for entry in split]
    assert len(set(numbers)) == len(numbers) == 66
    assert [len(split) for split in made.splits.values()] == [48, 9, 9]
    assert SEEDS.make(config, 0).splits == made.splits != SEEDS.make(config, 1).splits


def test_the_name_implies_what_such_an_environment_needs(tmp_path):
    (tmp_path / "mine.py").write_text("class It: ...")
    config = load_config("smoke", [f"env.name=gym:{tmp_path}/mine.py:It", "env.max_turns=5"])
    assert config.data.name == "seeds" and config.env.tools == [] and config.env.max_turns == 5
    assert config.cold_start.demonstrator == "agent_r1_recipes.gym.play:demonstrate"
    assert load_config("smoke", []).data.name != "seeds"


class Expert(Steps):
    def expert(self, observation):
        return 1 if observation["cell"] < 3 else 0


class Hopeless(Steps):
    def step(self, action):
        return {"cell": 0}, 0.0, True, False, {}


def game(cls) -> str:
    name = f"gym:test:{cls.__name__}"
    GAMES[name] = Game(name, cls)
    return name


def test_random_play_and_experts_demonstrate():
    for cls in (Steps, Expert):
        name = game(cls)
        for seed in range(5):
            episode = type("Replay", (Episode,), {"game": GAMES[name]})()
            episode.reset(seed)
            for action in plays.plan(name, seed):
                take_action(episode, action)
            assert episode.total == 1.0
    row = {"agent_name": game(Steps), "extra_info": {"metadata": {"seed": 3}}}
    assert plays.demonstrate(row, [], random.Random(0)).startswith("<think>")


def test_random_play_that_never_succeeds_is_refused():
    with fails_with("no_expert"):
        plays.plan(game(Hopeless), 0)


def test_an_installed_environment_by_its_id(chat):
    pytest.importorskip("gymnasium")
    name = "gym:FrozenLake-v1"
    trust(name)
    row = rows_of(Steps, 7)[0] | {"agent_name": name}
    config = EnvConfig(name=name, max_turns=4)
    loop = make_env_loop(ScriptedPolicy(chat, ["0"] * 4), lambda row: make_env(row, {}, config))
    [played] = asyncio.run(run_episodes(loop, [Task(row, "0", "s0")], Sampling(99)))
    assert "FrozenLake-v1\n0" in chat.decode(played.steps[0].observation_ids)
    for bad, code in (("gym:CartPole-v1", "unsupported_space"), ("gym:NoSuch-v0", "unknown_name")):
        trust(bad)
        with fails_with(code):
            make_env(row | {"agent_name": bad}, {}, EnvConfig(name=bad))


class Naive:
    """Its spaces are set in the constructor, and nothing but its methods tells its shape."""

    def __init__(self):
        self.action_space = ("left", "right")

    def reset(self, seed=None):
        return "", {}

    def step(self, action: str):
        """Act.

        Args:
            action: What to do.
        """
        return "", 0.0, True, False, {}


class Plain(Naive):
    """A class in our form, one of whose tools is named `step`."""

    def reset(self, seed, **row):
        self.reward = 0.0
        return ""


@pytest.mark.parametrize("cls", [Steps, Naive])
def test_a_naive_class_is_told_the_name(cls):
    name = named(cls).removeprefix("gym:")
    trust(name)
    with fails_with("gymnasium_class"):
        make_env(rows_of(cls, 1)[0] | {"agent_name": name}, {}, EnvConfig(name=name))
    plain = named(Plain).removeprefix("gym:")
    trust(plain)
    make_env(rows_of(Plain, 1)[0] | {"agent_name": plain}, {}, EnvConfig(name=plain))
