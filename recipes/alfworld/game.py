"""Play a household in TextWorld, with ALFWorld's own rules and grammar.

In: a quest of `household.py`, and commands. Out: ALFWorld's answers. The domain and the grammar are
files of the package `alfworld`. The state is that of `textworld.envs.pddl`, which ALFWorld's games
run in, with the planner Fast Downward below it. The rehearsal `alfworld` compares the answers with
those of `textworld.envs.PddlEnv`, which parses each command's template anew.
"""

from __future__ import annotations

import functools
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_r1 import extra
from agent_r1_recipes.alfworld.household import Quest, identifier

NOTHING = "Nothing happens."
"""ALFWorld's answer to a command that is not possible now."""
TURN = threading.Lock()
"""Held by the game that computes: the translator replaces sys.stdout, and all games share one
parser of templates. Episodes run in threads."""
LIBRARIES: list[Any] = []
"""Copies of the planner that no game uses. A copy plays one game at a time. It is not unloaded: all
copies share a table of their parts, which would then point to nothing, and crash the next game."""


class Game:
    """One game."""

    def __init__(self, quest: Quest):
        self._task = quest.task
        names = [*quest.places, *quest.things]
        self._names = {identifier(name): name for name in names}
        self.actions: dict[str, Any] = {}
        self.won = False
        with TURN:
            fast_downward, pddl, self._logic = load_rules()
            self._library = LIBRARIES.pop() if LIBRARIES else fast_downward.load_lib()
            self._state: Any = pddl.PddlState(self._library, quest.problem(), self._logic)
            self._entities = self._describe_entities()
            self._find_actions()

    def _describe_entities(self) -> dict[str, Any]:
        from textworld.generator.game import EntityInfo

        entities = {}
        for fact in self._state.facts:
            for variable in fact.arguments:
                info = EntityInfo(variable.name, variable.type)
                info.name = self._names.get(variable.name, variable.name)
                info.definite, info.indefinite = "the", "a"
                entities[variable.name] = info
        return entities

    def _find_actions(self) -> None:
        """Set `actions`: what is possible now, by its command."""
        self.actions = {}
        for action in self._state.all_applicable_actions():
            template = action.command_template
            if action.name == "gotolocation":  # the grammar's template asks which place is there
                template = "go to {r}"
            names = {}
            for key, value in action.mapping.items():
                names[key.name] = self._names.get(value.name)
            self.actions[template.format(**names)] = action

    def begin(self) -> str:
        """Return the text that a game begins with: the room, and the task."""
        with TURN:
            return self._derive("#intro#", {}).replace("UNKNOWN GOAL", self._task)

    def do(self, command: str) -> str:
        """Take a command, and return the answer."""
        with TURN:
            action = self.actions.get(command)
            if action is None:
                return NOTHING
            self._state.apply(action)
            answer = self._derive(action.feedback_rule, action.mapping)
            self.won = bool(self._state.check_goal())
            self._find_actions()
        return answer

    def _derive(self, rule: str, mapping: dict[Any, Any]) -> str:
        context = {
            "state": self._state,
            "facts": list(self._state.facts),
            "variables": {key.name: self._entities[value.name] for key, value in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entities,
        }
        return self._logic.grammar.derive(rule, context)

    def plan(self) -> list[str]:
        """Return the planner's own commands from here to the goal."""
        with TURN:
            return self._state.replan(self._entities)

    def close(self) -> None:
        """Give the planner back. A command that comes after a time-out finds no action."""
        with TURN:
            self.actions = {}
            if self._library:
                LIBRARIES.append(self._library)
            self._library = None


@functools.cache
def load_rules() -> tuple[Any, Any, Any]:
    """Return the planner's module, TextWorld's module of states, and ALFWorld's rules."""
    with extra("alfworld", "recipes/alfworld"):
        import fast_downward
        from textworld.envs.pddl import logic as pddl
        from textworld.envs.pddl import textgen
        from textworld.logic import Rule

        # Importing `alfworld` would make a folder in the user's home, for its downloads.
        data = Path(str(metadata.distribution("alfworld").locate_file("alfworld/data")))
    # All samples of a group play one game, and to translate it takes .1 s.
    fast_downward.pddl2sas = functools.lru_cache(maxsize=512)(fast_downward.pddl2sas)
    # The grammar parses its rules for each answer, and copies every object of the room. Without
    # that a turn takes 1.0 ms of CPU instead of 5.7 (311 turns, one core of an AMD EPYC).
    cache = functools.lru_cache(maxsize=None)
    textgen._parse_and_convert = cache(textgen._parse_and_convert)
    Rule.parse_conjunctive_query = cache(Rule.parse_conjunctive_query)
    textgen.copy_context = functools.wraps(textgen.copy_context)(_copy_context)
    texts = [(data / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")]
    return fast_downward, pddl, pddl.GameLogic(domain=texts[0], grammar=texts[1])


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Copy what a rule of the grammar adds to: which variable is which object.

    The objects stay the same. Nothing changes them.
    """
    own = {key: dict(context[key]) for key in ("variables", "mapping")}
    return context | own
