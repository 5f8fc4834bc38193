"""Write one HTML page in which a trained agent plays in the reader's browser.

In: a checkpoint of a run, and its configuration. Out: a page of a few megabytes that works from the
disk without a network: scripts, checkpoints, tokenizer, corpus and test questions. Next:
js/unpack.js reads the data.

    matrices    level x scale of the row, level = round(weight / scale) from -127 to 127
    scale       largest |weight| of the row in all packed checkpoints / 127, so that differences of
                levels are small
    checkpoint  levels minus the levels of the checkpoint before it, modulo 256; then norms and
                biases as float32
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent_r1 import (
    AgentR1Error,
    ChatFormat,
    Config,
    Decoder,
    Row,
    Workspace,
    load_any,
    load_chat,
    read_file,
    say,
)
from agent_r1_recipes.page.microscope import read_group, script, title_of, write_html

SCRIPTS = (
    "unpack",
    "decoder",
    "tokenizer",
    "sampling",
    "search",
    "episode",
    "quantities",
    "microscope",
    "page",
)
"""Files of js/ in the order of the page."""
QUESTIONS = 500
MARK = "\ue0f0"
"""Stands for a content in the exported chat template: a private-use character.

No template has it.
"""


@dataclass
class Packed:
    """Weights of several checkpoints in whole numbers."""

    scales: dict[str, np.ndarray]  # of each matrix: float32 [rows, 1]
    levels: list[dict[str, np.ndarray]]  # of each checkpoint: int8, by matrix
    vectors: list[dict[str, np.ndarray]]  # of each checkpoint: float32, by vector

    def state(self, number: int) -> dict[str, Tensor]:
        """Return the weights of checkpoint `number` as the page computes them."""
        weights = {}
        for name, levels in self.levels[number].items():
            weights[name] = torch.from_numpy(levels.astype(np.float32) * self.scales[name])
        for name, vector in self.vectors[number].items():
            weights[name] = torch.from_numpy(vector)
        return weights

    def sections(self) -> Iterator[bytes]:
        """Yield the binary sections in the order of js/unpack.js."""
        for scale in self.scales.values():
            yield scale.tobytes()
        previous = {name: np.zeros_like(level) for name, level in self.levels[0].items()}
        for levels, vectors in zip(self.levels, self.vectors, strict=True):
            for name, level in levels.items():
                # int8 wraps around: -100 - 100 = 56, and the page adds it back modulo 256. Small
                # differences compress well.
                yield (level - previous[name]).tobytes()
            for vector in vectors.values():
                yield vector.tobytes()
            previous = levels


def pack(models: list[Decoder]) -> Packed:
    """Round the weights of several checkpoints of one run."""
    matrices: list[dict[str, np.ndarray]] = []
    vectors: list[dict[str, np.ndarray]] = []
    for model in models:
        weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
        matrices.append({name: weight for name, weight in weights.items() if weight.ndim == 2})
        vectors.append({name: weight for name, weight in weights.items() if weight.ndim == 1})

    scales: dict[str, np.ndarray] = {}
    for name in matrices[0]:
        maxima = [np.abs(weights[name]).max(axis=1, keepdims=True) for weights in matrices]
        largest = np.max(maxima, axis=0)
        # A row of zeros gets the scale 1 / 127, because 0 / 0 is no number.
        scales[name] = (np.where(largest > 0, largest, 1) / 127).astype(np.float32)

    levels: list[dict[str, np.ndarray]] = []
    for weights in matrices:
        model_levels = {}
        for name, scale in scales.items():
            model_levels[name] = np.rint(weights[name] / scale).clip(-127, 127).astype(np.int8)
        levels.append(model_levels)
    return Packed(scales, levels, vectors)


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints_of(checkpoint: Path, config: Config) -> dict[int, Path]:
    """Map steps to model folders: the start model as step 0, then the checkpoints."""
    folders: dict[int, Path] = {}
    start = Workspace(config).start_model
    if (start / "config.json").is_file():
        folders[0] = start
    if not checkpoint.name.startswith("step_"):  # an exported model
        folders[config.trainer.steps] = checkpoint
        return folders
    # Step numbers have leading zeros (step_000016), so names sort like numbers.
    for folder in sorted(checkpoint.parent.glob("step_*")):
        if folder.name <= checkpoint.name:
            step = int(folder.name.removeprefix("step_"))
            folders[step] = folder / "model"
    return folders


def read_models(folders: dict[int, Path]) -> list[Decoder]:
    """Read the checkpoints. Raises AgentR1Error for a model that the page does not compute."""
    models = [load_any(folder) for folder in folders.values()]
    shape = getattr(models[0], "shape", None)
    computable = shape is not None and shape.family == "qwen2" and shape.tied
    if not computable or models[0].parameter_count > 3_000_000:
        raise AgentR1Error(
            "the page supports only tiny models (model.path unset); talk to a larger agent with "
            "`agent-r1 chat`",
            code="model_too_large_for_a_page",
        )
    return models


# --------------------------------------------------------------------------------------- the header


def check_task(config: Config) -> None:
    """Raise AgentR1Error for a task that the page's scripts do not play."""
    env = config.env
    usual_env = env.name in ("hermes", "nous") and env.tools == ["search"]
    local_search = config.search.encoder == "ngram" and not config.search.url
    other_rewards = env.reward or env.call_reward or env.evidence_reward
    if not usual_env or not local_search or other_rewards:
        raise AgentR1Error(
            "the page plays question answering with the n-gram search and exact match (presets "
            "discover, smoke, laptop and small); use `agent-r1 chat` for other tasks",
            code="task_unfit_for_a_page",
        )


def tokenizer_data(chat: ChatFormat) -> dict[str, Any]:
    """Describe the tokenizer for js/tokenizer.js: tokens as byte strings, merges as ids.

    Raises AgentR1Error for another tokenizer than a byte-level one without gaps in its ids.
    """
    try:
        return _tokenizer_data(chat)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise AgentR1Error(
            f"the page does not know this tokenizer ({type(error).__name__}: {error}); it needs "
            "byte-level BPE with ids from 0 without gaps, as our tiny models have",
            code="task_unfit_for_a_page",
        ) from None


def _tokenizer_data(chat: ChatFormat) -> dict[str, Any]:
    tokenizer = json.loads(chat.tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer["model"]["vocab"] | chat.control_ids
    # A byte-level tokenizer writes each byte as a printable letter: "Ġ" stands for a blank.
    byte_of = {letter: chr(byte) for byte, letter in bytes_to_unicode().items()}
    tokens = [""] * len(vocabulary)
    for token, number in vocabulary.items():
        if token in chat.control_ids:
            tokens[number] = token
        else:
            tokens[number] = "".join(byte_of[letter] for letter in token)
    merges: list[int] = []
    for pair in tokenizer["model"]["merges"]:
        # "Ġ t" in older files, ["Ġ", "t"] in newer ones.
        first, second = pair.split(" ") if isinstance(pair, str) else pair
        merges += [vocabulary[first], vocabulary[second], vocabulary[first + second]]
    pattern = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return {"pattern": pattern, "tokens": tokens, "merges": merges, "controls": chat.control_ids}


def chat_data(
    chat: ChatFormat, config: Config, lead: list[dict[str, str]], schema: dict[str, Any]
) -> dict[str, Any]:
    """Render the chat template once for each shape of observation, with MARK for each content."""

    def skeleton(ids: list[int]) -> list[int | str]:
        """Keep control tokens as ids, and turn the runs between them to text."""
        controls = set(chat.control_ids.values())
        parts: list[int | str] = []
        for is_control, run in itertools.groupby(ids, controls.__contains__):
            if is_control:
                parts += run
            else:
                parts.append(chat.decode(list(run)))
        return parts

    question = {"role": "user", "content": MARK}
    result = {"role": "tool", "content": MARK}
    # A turn may have several calls, and the template writes one result other than three.
    continuations = []
    for count in range(1, config.env.max_tool_calls + 1):
        continuations.append(skeleton(chat.continuation_ids([result] * count)))
    return {
        "prompt": skeleton(chat.prompt_ids([*lead, question], [schema])),
        "continuations": continuations,
        "mark": MARK,
        "closingIds": sorted(chat.ends.closing),
        "stopIds": sorted(chat.stop_ids),
        "opened": chat.turn_text([]),
    }


def header_of(
    config: Config, model: Path, steps: list[int], decoder: Decoder, weights: Packed
) -> dict[str, Any]:
    """Describe everything but the weights."""
    chat = load_chat(model)
    env = config.env
    rollout = config.rollout
    paths = Workspace(config)
    rows = paths.load_rows("test")[:QUESTIONS]
    # The page begins with a question that shows what RL has taught.
    first = paths.learned_question(model) or 0
    lead = list(rows[0]["prompt"][:-1])
    schema = paths.load_tools()["search"].schema()
    corpus = []
    for passage in paths.load_passages():
        corpus.append({"title": passage.title, "text": passage.text})
    return {
        "parameters": decoder.parameter_count,
        "shape": asdict(decoder.shape) | {"head_dim": decoder.shape.head_dim},
        "matrices": [[name, *level.shape] for name, level in weights.levels[0].items()],
        "vectors": [[name, len(vector)] for name, vector in weights.vectors[0].items()],
        "checkpoints": steps,
        "tokenizer": tokenizer_data(chat),
        "chat": chat_data(chat, config, lead, schema),
        "settings": {
            "maxTurns": env.max_turns,
            "maxToolCalls": env.max_tool_calls,
            "maxInvalidCalls": env.max_invalid_calls,
            "maxChars": env.tool_max_chars,
            "formatPenalty": env.format_penalty,
            "maxTokensPerTurn": rollout.max_tokens_per_turn,
            "maxContext": rollout.max_context,
            "topK": config.search.top_k,
            "minK": config.search.min_k,
            "dim": config.search.dim,
        },
        "corpus": corpus,
        "questions": [_question_of(row) for row in rows],
        "first": first if first < len(rows) else 0,
    }


def _question_of(row: Row) -> dict[str, Any]:
    return {
        "question": row["prompt"][-1]["content"],
        "answers": list(row["reward_model"]["ground_truth"]),
        "kind": row["extra_info"].get("kind", ""),
    }


# ----------------------------------------------------------------------------------------- the page


def pack_page(checkpoint: Path, config: Config) -> tuple[bytes, Packed, dict[str, Any]]:
    """Return the page's data, weights and header."""
    check_task(config)
    Workspace(config).make_task()
    folders = checkpoints_of(checkpoint, config)
    steps = list(folders)
    models = read_models(folders)
    weights = pack(models)
    header = header_of(config, folders[steps[-1]], steps, models[-1], weights)
    header["recorded"] = read_recorded_group(checkpoint, dict(zip(steps, models, strict=True)))
    text = json.dumps(header).encode()
    page_data = zlib.compress(
        b"".join([struct.pack("<I", len(text)), text, *weights.sections()]), 9
    )
    return page_data, weights, header


def read_recorded_group(checkpoint: Path, models: dict[int, Decoder]) -> dict[str, Any] | None:
    """Read a group of the run's first recorded step.

    The log-probabilities of later `models` come with it.
    """
    files = sorted(checkpoint.parent.parent.glob("rollouts/step_*.jsonl"))
    if not files:
        return None
    first = int(files[0].stem.removeprefix("step_"))
    later = [model for step, model in models.items() if step >= first]
    return {"records": read_group(files[0], later)}


def describe_reliability(checkpoint: Path) -> str:
    """Tell what the run's evaluation measured with several samples of each question.

    Empty if it drew one, or if it is about another checkpoint.
    """
    card_file = checkpoint.parent.parent / "eval.json"
    if not card_file.is_file():
        return ""
    card = json.loads(read_file(card_file))
    part = card.get("reliability")
    if not part or Path(card["model"]).parent.name != checkpoint.name:
        return ""
    n = part["samples"]
    figures = []
    for key, meaning in ((f"pass@{n}", "at least one is right"), (f"pass^{n}", "all are right")):
        if key in part:
            low, high = part[f"{key}_ci95"]
            figures.append(f"{key} {part[key]:.3f} ({low:.3f} to {high:.3f}): {meaning}")
    return (
        f"In the run's evaluation, {n} samples of each of {part['questions']} test questions at "
        f"temperature {part['temperature']:g}, with unrounded weights and 95 % intervals: "
        f"mean {part['mean@1']:.3f}; {'; '.join(figures)}."
    )


def write_page(checkpoint: Path, config: Config | None, file: Path) -> None:
    """Write the page of a run (`agent-r1 export --page FILE`).

    Raises AgentR1Error for a task or model that the page cannot play, or a file that cannot be
    written.
    """
    if config is None:
        raise AgentR1Error(
            f"{checkpoint} lacks its training settings, from which the page takes questions and "
            "passages; name a run",
            code="page_without_run",
        )
    page_data, _, header = pack_page(checkpoint, config)
    steps = header["checkpoints"]
    group = header["recorded"]
    title = ""
    if group:
        title = title_of(group["records"])
    facts = {
        "TITLE": f"{config.preset} {config.algorithm}: the agent in the page",
        "DATA": base64.b64encode(page_data).decode(),
        "PRESET": config.preset,
        "ALGORITHM": config.algorithm.upper(),
        "SEED": config.seed,
        "LAST": steps[-1],
        "STEPS": ", ".join(str(step) for step in steps),
        "PASSAGES": f"{len(header['corpus']):,}",
        "PARAMETERS": f"{header['parameters'] / 1e6:.2f}",
        "RECORDED": title,
        "RELIABILITY": describe_reliability(checkpoint),
    }
    length = write_html(file, "page.html", script(*SCRIPTS), facts)
    say(f"page: checkpoints of steps {facts['STEPS']}, {length / 1e6:.1f} MB, in {file}")
