"""Run a record again, which is a recipe with its hashes: `agent-r1 record FILE`.

In: a JSON file below 4 kB. Out: "the record holds", or one sentence that says what is wrong.

An author chooses nothing but the recipe, whose values lie on a coarse grid. The seeds of its five
runs follow from track, recipe, binary and start weights. The test world of a run follows from the
hash of the run's final weights. No code of a record runs: the file has numbers from the grid,
hashes, and a name. The cost is known before it is computed.

The recipe is still a lottery ticket. Recipes that hardly differ, such as in `clipLow`, have other
seeds at the same cost, so an author may try many and keep the luckiest. The runs of the first
record deviate by .020, so the best of 100 such tries gains about .02 in the mean of five. `tried`
may tell how many there were. Seeds that do not follow from the recipe would be `format` 2.

    track       score of a run                               cost
    episodes    greedy exact match, 1,000 questions          training episodes of a run
    flops       share of 500 questions right in 8 of 8       FLOPs of the five runs together
                attempts at temperature 1 (pass^8)

A record counts if the lower 95 % bound (Wilson) of the score, over all questions of the five runs,
is above .70. FLOPs = 2 x parameters x tokens that were played + 6 x parameters x tokens of the rows
with a gradient.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from agent_r1 import (
    AgentR1Error,
    TooLongError,
    command,
    first_line,
    option,
    read_file,
    say,
    write_whole,
)
from agent_r1_recipes.browser.build import hashes
from agent_r1_recipes.browser.node import run_node
from agent_r1_recipes.browser.page import HERE

RUNS = 5
TRACKS = {"episodes": 1000, "flops": 500}
"""Track -> test questions of each run."""
THRESHOLD = 0.7
LARGEST_FILE = 4096
CPU_SECONDS = 600
PARAMETERS = 425_984
RECORDS = HERE / "records"
KEYS = ("format", "name", "track", "recipe", "binary", "start", "runs", "cost")
MAY_TELL = "tried"
"""How many recipes the author tried, if the author tells. No one can check it."""
GRID: dict[str, tuple[float, ...]] = {
    "steps": tuple(range(1, 401)),
    "questions": (4, 8, 12, 16, 24),
    "samples": (4, 8),
    "minibatches": (1, 2, 4, 8),
    "learningRate": (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3),
    "finalShare": (0.1, 0.3, 1.0),
    "largestNorm": (0.5, 1.0, 2.0),
    "clipLow": (0.1, 0.2, 0.3),
    "clipHigh": (0.2, 0.28, 0.4),
}
"""The values that a recipe may have."""
Record = dict[str, Any]


def refuse(sentence: str) -> AgentR1Error:
    """Return the error that refuses a record."""
    return AgentR1Error(f"the record is refused: {sentence}", code="record_refused")


# ----------------------------------------------------------------------------------------- the file


def read_record(file: Path) -> Record:
    """Read a record and check its form. Raises AgentR1Error for anything that is not in it."""
    record = read_json(file)
    check_form(record)
    return record


def read_json(file: Path) -> Any:
    """Read a small file of JSON without duplicate keys. Raises AgentR1Error."""
    try:
        content = read_file(file, LARGEST_FILE)
    except TooLongError:
        raise refuse(f"it has more than {LARGEST_FILE} bytes") from None
    except (OSError, ValueError) as error:  # ValueError: a pipe, a folder, a device
        raise AgentR1Error(
            f"{file} cannot be read ({first_line(error)}); name a record", code="unreadable_record"
        ) from None
    try:
        return json.loads(content.decode("ascii"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise refuse("it has letters beyond ASCII") from None
    except RecursionError:
        raise refuse("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise refuse(f"bytes follow its end, from number {error.pos} on") from None
        raise refuse(f"it is not JSON ({error.msg})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise refuse(f"the key {key[:40]!r} stands there twice")
        members[key] = value
    return members


def check_form(record: Any) -> None:
    """Check keys, types and grid. Raises AgentR1Error."""
    if not isinstance(record, dict):
        raise refuse("it is not an object")
    _check_keys({key: record[key] for key in record if key != MAY_TELL}, KEYS, "")
    if MAY_TELL in record and not (_is_count(record[MAY_TELL]) and 1 <= record[MAY_TELL] < 1e6):
        raise refuse(f"{MAY_TELL} is not a number of recipes")
    if not _is_count(record["format"]) or record["format"] != 1:
        raise refuse("its format is not 1")
    name = record["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w .,()+-]{1,40}", name, re.ASCII):
        raise refuse("its name is not 1 to 40 letters, digits, blanks or . , ( ) + -")
    if not isinstance(record["track"], str) or record["track"] not in TRACKS:
        raise refuse(f"its track is not one of {', '.join(TRACKS)}")
    check_recipe(record["recipe"])
    for key in ("binary", "start"):
        if not _is_hash(record[key]):
            raise refuse(f"{key} is not a SHA-256 in hexadecimal digits")
    runs = record["runs"]
    if not isinstance(runs, list) or len(runs) != RUNS:
        raise refuse(f"it does not have {RUNS} runs")
    for run in runs:
        if not isinstance(run, dict):
            raise refuse("a run is not an object")
        _check_keys(run, ("weights", "right"), "of a run")
        if not _is_hash(run["weights"]):
            raise refuse(f"the weights of a run are not a SHA-256: {str(run['weights'])[:40]!r}")
        if not _is_count(run["right"]) or run["right"] > TRACKS[record["track"]]:
            raise refuse("the right answers of a run are not a number of its questions")
    if not _is_count(record["cost"]):
        raise refuse("its cost is not a whole number")


OWN = {
    "seed": "seeds follow from the recipe, and no one chooses them",
    "seeds": "seeds follow from the recipe, and no one chooses them",
    "world": "the test world follows from the weights, and no one chooses it",
    "questions": "the test questions follow from the weights, and no one chooses them",
}


def _check_keys(members: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in members:
        if key in keys:
            continue
        reason = OWN.get(key, "a record has no such key")
        fault = f"it has the key {key[:40]!r} {where}".rstrip()
        raise refuse(f"{fault}: {reason}")
    for key in keys:
        if key not in members:
            raise refuse(f"it lacks the key {key!r} {where}".rstrip())


def check_recipe(recipe: Any) -> None:
    """Check that values lie on the grid, and that a check is affordable."""
    if not isinstance(recipe, dict):
        raise refuse("its recipe is not an object")
    for key in recipe:
        if key not in GRID:
            raise refuse(f"its recipe has the key {key[:40]!r}; known are {', '.join(GRID)}")
    for key, values in GRID.items():
        if key not in recipe:
            raise refuse(f"its recipe lacks {key}")
        value = recipe[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in values:
            choices = "1 to 400" if key == "steps" else ", ".join(f"{v:g}" for v in values)
            raise refuse(f"its {key} is off the grid; choose {choices}")
    seconds = cpu_seconds(recipe)
    if seconds > CPU_SECONDS:
        raise refuse(f"a check would take about {seconds:.0f} CPU seconds, above {CPU_SECONDS}")


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def episodes_of(recipe: dict[str, float]) -> int:
    """Return the training episodes of a run."""
    return int(recipe["steps"] * recipe["questions"] * recipe["samples"])


def cpu_seconds(recipe: dict[str, float]) -> float:
    """Estimate the CPU seconds of a check.

    A training episode takes 10 ms, and the test of a run 15 s.
    """
    return RUNS * (0.01 * episodes_of(recipe) + 15)


# ----------------------------------------------------------------------------------------- the runs


def seeds_of(record: Record) -> list[int]:
    """Derive the seeds of the runs from track, recipe, binary and start.

    A recipe has one text: 20 and 20.0 are the same number of steps, and must give the same seeds.
    """
    recipe = {key: values[values.index(record["recipe"][key])] for key, values in GRID.items()}
    made_of = [record["track"], recipe, record["binary"], record["start"]]
    text = json.dumps(made_of, sort_keys=True)
    digests = [hashlib.sha256(f"{text}/{number}".encode()).digest() for number in range(RUNS)]
    return [int.from_bytes(digest[:4], "big") for digest in digests]


TRAIN = """
const { trainer, agent, header } = session;
const { clipLow, clipHigh, ...recipe } = job.recipe;
recipe.loss = { ...LOSS, clipLow, clipHigh };
const learner = new Learner(trainer, agent, header.train, recipe, job.seed);
let [played, learned] = [0, 0];
for (let step = 0; step < recipe.steps; step++) {
  const { figures } = await learner.takeStep();
  played += figures.tokens;
  learned += figures.learned;
}
tell({ hash: trainer.weightsHash(), weights: base64Of(trainer.weights()), played, learned });
"""
START = "tell(session.trainer.weightsHash());"
SCORE = """
const { trainer, agent, header } = session;
trainer.setWeights(numbersOf(job.weights));
const ATTEMPTS = 8;
let right = 0;
if (job.track === "episodes") {
  right = answerGreedily(trainer, agent, header.test).reduce((sum, { em }) => sum + em, 0);
} else {
  const noise = (group, sample, place) => uniformAt(job.seed, 4, first, group, sample, place);
  const each = trainer.slots / ATTEMPTS;
  var first = 0;
  for (; first < header.test.length; first += each) {
    const part = header.test.slice(first, first + each);
    const played = playGroups(trainer, agent, part, { samples: ATTEMPTS, temperature: 1, noise });
    for (const members of groupsOf(played).values()) right += members.every(({ em }) => em) ? 1 : 0;
  }
}
tell(right);
"""


def start_hash(world_bytes: bytes) -> str:
    """Return the hash of the start weights."""
    [digest] = run_node(START, {}, world_bytes)
    return digest


def run_once(record: Record, seed: int, header: dict[str, Any]) -> dict[str, Any]:
    """Train with a seed, and score the weights in the world of their hash."""
    from agent_r1_recipes.browser import world

    job = {"recipe": record["recipe"], "seed": seed}
    [line] = run_node(TRAIN, job, world.pack(header))
    count = TRACKS[record["track"]]
    fresh = world.fresh_questions(header, f"record/{line['hash']}", count)
    job = {"weights": line["weights"], "track": record["track"], "seed": seed}
    [right] = run_node(SCORE, job, world.pack(fresh))
    flops = PARAMETERS * (2 * line["played"] + 6 * line["learned"])
    return {"weights": line["hash"], "right": right, "flops": flops}


def cost_of(record: Record, flops: int) -> int:
    """Return the cost on the record's track."""
    return episodes_of(record["recipe"]) if record["track"] == "episodes" else flops


def lower_bound(right: int, count: int) -> float:
    """Return the lower end of Wilson's 95 % interval of a share."""
    z = 1.959963985
    share = right / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - spread) / (1 + z * z / count)


def check(record: Record, header: dict[str, Any]) -> str:
    """Run a record again. Return a sentence with its score; raise AgentR1Error if it differs."""
    from agent_r1_recipes.browser import world

    if record["binary"] != hashes()["binary"]:
        raise refuse("it was made with another binary; the one here has another SHA-256")
    if record["start"] != start_hash(world.pack(header)):
        raise refuse("it began with other start weights")
    if record["track"] == "episodes" and record["cost"] != episodes_of(record["recipe"]):
        claim = f"it claims {record['cost']} episodes"
        raise refuse(f"{claim}, and its recipe plays {episodes_of(record['recipe'])}")
    flops = right = 0
    runs = zip(seeds_of(record), record["runs"], strict=True)
    for number, (seed, own) in enumerate(runs, 1):
        run = run_once(record, seed, header)
        if run["weights"] != own["weights"]:
            raise refuse(
                f"run {number} ends with the weights {run['weights']}, not {own['weights']}"
            )
        if run["right"] != own["right"]:
            claim = f"run {number} claims {own['right']} right answers"
            raise refuse(f"{claim}, and has {run['right']}")
        right += run["right"]
        flops += run["flops"]
    if record["cost"] != cost_of(record, flops):
        raise refuse(f"it claims {record['cost']} FLOPs, and its runs need {flops}")
    questions = RUNS * TRACKS[record["track"]]
    bound = lower_bound(right, questions)
    if bound <= THRESHOLD:
        share = f"{right / questions:.3f} (lower bound {bound:.3f})"
        raise refuse(f"its score {share} is not above {THRESHOLD:g}")
    return f"{right / questions:.3f} right (lower bound {bound:.3f}) at a cost of {record['cost']}"


def fill(record: Record, header: dict[str, Any]) -> Record:
    """Run a recipe, and return its record with what it gave."""
    from agent_r1_recipes.browser import world

    keys = ("format", "name", "track", "recipe", MAY_TELL)
    own_part = {key: record[key] for key in keys if key in record}
    own_part["binary"] = hashes()["binary"]
    own_part["start"] = start_hash(world.pack(header))
    runs = [run_once(own_part, seed, header) for seed in seeds_of(own_part)]
    own_part["runs"] = [{"weights": run["weights"], "right": run["right"]} for run in runs]
    own_part["cost"] = cost_of(own_part, sum(run["flops"] for run in runs))
    return own_part


def same_recipe(record: Record, other: Record) -> bool:
    return all(record[key] == other[key] for key in ("track", "recipe"))


def copies_of(record: Record, folder: Path = RECORDS) -> list[str]:
    """Name records with the same track and recipe under another name."""
    others = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    names = [other["name"] for other in others if same_recipe(record, other)]
    return [name for name in names if name != record["name"]]


@command(
    "record", "run a record of the browser's board again: are its hashes right?",
    ["my-record.json", "my-record.json --make"],
    option("file", type=Path, metavar="FILE", help="a record (recipes/browser/README.md)"),
    option("--make", action="store_true", help="write hashes, scores and cost into the file"),
)  # fmt: skip
def run_record(a: Namespace) -> None:
    """Check a record, or fill it."""
    if a.make:
        record = read_json(a.file)
        if not isinstance(record, dict):
            raise refuse("it is not an object")
        blank = {"weights": "0" * 64, "right": 0}
        record |= {"binary": "0" * 64, "start": "0" * 64, "runs": [blank] * RUNS, "cost": 0}
        check_form(record)
    else:
        record = read_record(a.file)
    from agent_r1_recipes.browser import world  # PyTorch comes with it

    header = world.header()
    if a.make:
        record = fill(record, header)
        write_whole(a.file, json.dumps(record, indent=1) + "\n")
        say(f"record: {a.file} has hashes, scores and cost now; check it without --make")
        return
    sentence = check(record, header)
    say(f"record: {record['name']} holds: {sentence}")
    for name in copies_of(record):
        say(f"record: it is a copy of the record {name!r}, which has the same recipe")
