"""Prepare what the page trains on: start weights, questions, passages, tokenizer.

In: start.bin and the preset `smoke`. Out: a header (JSON) and weights, as recipes/page packs
them. Next: js/worker.js reads both.

`start.bin` has the weights of smoke's cold start with seed 0, which no agent was trained from by RL
yet: whole numbers from -127 to 127 and a scale for each row, zlib-compressed. `write_start` makes
it from a cold start on this machine; another CPU gives other last bits, so the file is committed.
The tokenizer is that of the shipped agent of `discover`, since both presets make the same one.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from agent_r1 import (
    ChatFormat,
    Config,
    Decoder,
    Row,
    TrainingRow,
    Workspace,
    load_any,
    load_chat,
    load_config,
    make_loop,
)
from agent_r1_recipes.laptop.demonstrator import (
    RENAMES,
    Demonstrator,
    demonstrate_rows,
    mixture_questions,
)
from agent_r1_recipes.laptop.settings import DEMO_AGENT
from agent_r1_recipes.laptop.tinyhop import HEADS, TAILS, make_questions, make_world
from agent_r1_recipes.page import export

HERE = Path(__file__).parent
START = HERE / "start.bin"


def preset() -> Config:
    """Return the preset whose world, limits and start the page uses."""
    return load_config("smoke", [], algorithm="grpo")


def write_start(cold_start: Path) -> None:
    """Round the weights of a cold start to 8 bits, and write them to start.bin."""
    checkpoints = export.pack([_decoder(cold_start)])
    START.write_bytes(zlib.compress(b"".join(checkpoints.sections()), 9))


def read_start() -> export.Packed:
    """Read start.bin."""
    content = zlib.decompress(START.read_bytes())
    place = 0

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal place
        array = np.frombuffer(content, dtype, int(np.prod(shape)), place).reshape(shape).copy()
        place += array.nbytes
        return array

    # The demo agent has the same shape, whose names and sizes order the sections.
    shapes = {name: tuple(w.shape) for name, w in _decoder(DEMO_AGENT).named_parameters()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    scales = {name: take(np.float32, shape[0], 1) for name, shape in matrices.items()}
    levels = {name: take(np.int8, *shape) for name, shape in matrices.items()}
    vectors = {n: take(np.float32, *shape) for n, shape in shapes.items() if len(shape) == 1}
    return export.Packed(scales, [levels], [vectors])


def start_model() -> Decoder:
    """Return the start model, in PyTorch."""
    model = _decoder(DEMO_AGENT)
    weights: dict[str, Tensor] = read_start().state(0)
    model.load_state_dict(weights, strict=True)
    return model


def _decoder(folder: Path) -> Decoder:
    return load_any(folder)


def header(config: Config | None = None) -> dict[str, Any]:
    """Describe the world: passages, training, validation and test questions, tokenizer, limits.

    Makes the data of `config` (default: the preset's) in AGENT_R1_HOME, if they are not there.
    """
    config = config or preset()
    workspace = Workspace(config)
    workspace.make_task()
    model = _decoder(DEMO_AGENT)
    header = export.header_of(config, DEMO_AGENT, [0], model, read_start())
    for split in ("train", "val", "test"):
        header[split] = [_question(row) for row in workspace.load_rows(split)]
    del header["questions"], header["first"]
    return header


def _question(row: Any) -> dict[str, Any]:
    return {
        "question": row["prompt"][-1]["content"],
        "answers": list(row["reward_model"]["ground_truth"]),
        "kind": row["extra_info"].get("kind", ""),
    }


def fresh_questions(header: dict[str, Any], seed: str, count: int) -> dict[str, Any]:
    """Return a header with `count` test questions about a world that no one has seen.

    Its passages take the place of the old test world's, so the index keeps its size.
    """
    config = preset()
    rng = random.Random(seed)
    titles = {passage["title"] for passage in header["corpus"]}
    world = make_world(rng, max(150, round(0.6 * count)), titles)
    mix: dict[str, float] = config.data.mix  # pyright: ignore[reportAttributeAccessIssue]
    questions = make_questions(world, rng, count, mix)
    corpus = [{"title": p.title, "text": p.text} for p in world.passages()]
    entries = [{"question": q.text, "answers": [q.answer], "kind": q.kind} for q in questions]
    return header | {"corpus": header["corpus"] + corpus, "test": entries}


def pack(header: dict[str, Any]) -> bytes:
    """Pack header and start weights for js/unpack.js of recipes/page."""
    text = json.dumps(header).encode()
    sections = read_start().sections()
    return zlib.compress(b"".join([struct.pack("<I", len(text)), text, *sections]), 9)


# ----------------------------------------------------------------------- for the page's cold start


def play_demonstrations(config: Config | None = None) -> tuple[list[Row], list[TrainingRow]]:
    """Play the cold start's demonstrations with the shipped tokenizer.

    Return the questions, and the rows of the plays that are cloned, before names are exchanged. A
    row's `trajectory` is its question's number.
    """
    world_config = preset() if config is None else config
    workspace = Workspace(world_config)
    workspace.make_task()
    questions = mixture_questions(workspace.load_rows("cold"))
    chat = load_chat(DEMO_AGENT)
    demonstrator = Demonstrator(chat, workspace.dialect)
    tools = workspace.load_tools()
    loop = make_loop(demonstrator, chat, tools, world_config.rollout, world_config.env)
    behaviours: dict[str, float] = world_config.cold_start.behaviours  # pyright: ignore[reportAttributeAccessIssue]
    # The seed's name is that of `demonstrations`, so these are the plays of the preset.
    return questions, demonstrate_rows(questions, behaviours, loop, world_config.seed, "copy")


def describe_plays(config: Config | None = None) -> dict[str, Any]:
    """Describe the demonstrations for js/cold_start.js.

    A play is its question's number, then in turn what the agent wrote and the numbers of the
    passages that it read. So a passage, which many plays read, is packed once. The page exchanges
    the names in them, `renames` times: it gets the ids of the first and of the second syllables.
    """
    questions, rows = play_demonstrations(config)
    chat = load_chat(DEMO_AGENT)
    passages: dict[str, int] = {}
    plays = [[row.trajectory, *_turns(row, chat, passages)] for row in rows]
    syllables = [[head.capitalize() for head in HEADS], list(TAILS)]
    return {
        "questions": [row["prompt"][-1]["content"] for row in questions],
        "passages": list(passages),
        "plays": plays,
        "syllables": [chat.tokenizer.convert_tokens_to_ids(part) for part in syllables],
        "renames": RENAMES,
    }


def _turns(row: TrainingRow, chat: ChatFormat, passages: dict[str, int]) -> Iterator[Any]:
    """Yield the turns of a row, and between them the passages that were read."""
    for is_action, group in itertools.groupby(
        zip(row.input_ids, row.action_mask, strict=True), key=lambda pair: pair[1]
    ):
        ids = [token for token, _ in group]
        text = chat.decode(ids)
        if is_action:
            yield text.removesuffix(END)
        elif "<tool_response>" in text:
            content = text.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
            yield [passages.setdefault(line, len(passages)) for line in content.split("\n")]


END = "<|im_end|>"
"""The token that ends a turn."""


def pack_plays(header: dict[str, Any]) -> bytes:
    """Pack demonstrations for `unpackPlays` of js/cold_start.js."""
    return zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
