"""Check recipes/alfworld with ALFWorld's packages: the tables, the record, the answers, the games.

Run by the rehearsal `alfworld`, in an environment with these packages. It prints figures as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1_recipes.alfworld import demonstrator, household
from agent_r1_recipes.alfworld.env import Household
from agent_r1_recipes.alfworld.game import Game, load_rules
from agent_r1_recipes.alfworld.household import Quest, draw, identifier

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "recipes" / "alfworld" / "tests"
GAMES = range(200)
"""Seeds of the games that are played."""
MAX_TURNS = 20
IDLE = ("examine", "help", "inventory", "look")
"""First words of commands that change nothing. Random play takes the others."""


def load(name: str, path: Path) -> ModuleType:
    """Load a module from its file. ALFWorld's own package makes folders when it is imported."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_tables() -> None:
    """Compare what fits where, and what can be done to what, with ALFWorld's tables."""
    place = metadata.distribution("alfworld").locate_file("alfworld/gen/constants.py")
    theirs = load("constants", Path(str(place)))
    ours = {*household.KITCHEN, *household.BEDROOM}
    for kind, names in household.FITS.items():
        fitting = sorted(theirs.VAL_RECEPTACLE_OBJECTS[kind] & ours)
        assert sorted(names) == fitting, (kind, fitting)
    for word, names in (
        ("Cleanable", household.CLEANABLE),
        ("Heatable", household.HEATABLE),
        ("Coolable", household.COOLABLE),
    ):
        assert sorted(names) == sorted(set(theirs.VAL_ACTION_OBJECTS[word]) & ours), word
    assert set(household.OPENABLE) == set(theirs.OPENABLE_CLASS_LIST) - {"Box"}
    place = metadata.distribution("alfworld").locate_file("alfworld/gen/goal_library.py")
    goals = load("goal_library", Path(str(place))).gdict
    for kind, spec in household.KINDS.items():
        assert goals[kind]["templates"] == list(spec.texts), kind


def check_record() -> None:
    """Play the recorded games again."""
    recorder = load("record", TESTS / "record.py")
    record = json.loads((TESTS / "recorded.json").read_text(encoding="utf-8"))
    assert [recorder.record(seed) for seed in recorder.seeds()] == record


def their_game(quest: Quest) -> Any:
    """Return TextWorld's own environment of ALFWorld's games, with the names of our things."""
    from textworld.core import EnvInfos
    from textworld.envs.pddl import PddlEnv

    _, _, logic = load_rules()
    place = metadata.distribution("alfworld").locate_file("alfworld/data/alfred.twl2")
    grammar = Path(str(place)).read_text(encoding="utf-8").replace("UNKNOWN GOAL", quest.task)
    env = PddlEnv(EnvInfos(admissible_commands=True))
    env.load({"pddl_domain": logic.domain, "grammar": grammar, "pddl_problem": quest.problem()})
    names = {identifier(name): name for name in [*quest.places, *quest.things]}
    for entity in env._entity_infos.values():
        entity.name = names.get(entity.id, entity.id)
    return env


@contextlib.contextmanager
def as_published() -> Iterator[None]:
    """Take back what `load_rules` changed in TextWorld to be faster."""
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule

    load_rules()
    places: list[tuple[Any, str]] = [
        (textgen, "copy_context"),
        (textgen, "_parse_and_convert"),
        (Rule, "parse_conjunctive_query"),
    ]
    fast = [getattr(*place) for place in places]
    for place, function in zip(places, fast, strict=True):
        setattr(*place, function.__wrapped__)
    try:
        yield
    finally:
        for place, function in zip(places, fast, strict=True):
            setattr(*place, function)


def check_answers(seeds: range) -> int:
    """Take the same random commands in our game and in theirs; return how many."""
    rng = random.Random(0)
    count = 0
    for seed in seeds:
        quest = draw(seed)
        ours = Game(quest)
        with as_published():
            theirs = their_game(quest)
            state = theirs.reset()
        assert ours.begin() == state.feedback, state.feedback
        for _ in range(12):
            assert sorted(ours.actions) == state["admissible_commands"]
            command = rng.choice([*ours.actions, "open the window"])
            with as_published():
                state, _, done = theirs.step(command)
            assert ours.do(command) == state.feedback, (seed, command)
            assert ours.won == done
            count += 1
            if done:
                break
        ours.close()
    return count


def play(name: str) -> float:
    """Return the share of games that an agent of `demonstrator.py`, or random play, solves."""
    world = Household()
    successes = 0
    for seed in GAMES:
        rng = random.Random(seed)
        row: Any = {"extra_info": {"metadata": {"seed": seed}}}
        text, _ = world.reset(seed=seed)
        history: list[Any] = [{"role": "user", "content": text}]
        for _ in range(MAX_TURNS):
            if name == "random":
                assert world.game
                possible = sorted(world.game.actions)
                command = rng.choice([name for name in possible if name.split()[0] not in IDLE])
            else:
                command = getattr(demonstrator, name)(row, history, rng)
            text, _, done, _, _ = world.step(command)
            history.append({"role": "assistant", "content": command})
            history.append({"role": "tool", "content": text})
            if done:
                successes += 1
                break
    world.close()
    return successes / len(GAMES)


def play_plans() -> tuple[float, float]:
    """Play the planner's own walkthroughs; return the share solved, and their mean length."""
    successes, steps = 0, 0
    for seed in GAMES:
        game = Game(draw(seed))
        plan = game.plan()
        for command in plan:
            game.do(command)
        successes += game.won
        steps += len(plan)
        game.close()
    return successes / len(GAMES), steps / len(GAMES)


def main() -> None:
    check_tables()
    check_record()
    walkthroughs, steps = play_plans()
    figures = {
        "commands_compared": check_answers(range(20)),
        "walkthroughs_solved": walkthroughs,
        "walkthrough_steps": round(steps, 1),
        "expert": play("expert"),
        "demonstrations": play("demonstrate"),
        "random": play("random"),
    }
    print(json.dumps(figures))
    if walkthroughs < 0.98 or figures["expert"] < 0.98 or figures["random"] >= 0.2:
        sys.exit("the expert or the walkthroughs solve less than .98, or random play .2 or more")


if __name__ == "__main__":
    main()
