"""Export a checkpoint as a folder for vLLM, `transformers`, the hub and `agent-r1 chat`.

In: a checkpoint of the local loop or of verl. Out: weights as safetensors, tokenizer, chat
template, generation settings as trained, the run's configuration, and a model card. Next:
`cluster/serve.py`.

The model in a checkpoint already has Hugging Face's format, so it is verified and copied. verl's
shards are merged. Then `transformers` must compute the checkpoint's log-probabilities from the
exported folder, token by token, on episodes of the run. Otherwise the export is deleted.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_r1.chat.probe import TOOLS
from agent_r1.chat.tokenizer import load_chat
from agent_r1.config import Config, shareable, tables, to_yaml
from agent_r1.evaluation.provenance import train_command, weights_hash
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import read_jsonl, whole, writing
from agent_r1.ground.ui import say
from agent_r1.inference.agent import SETTINGS_FILE, model_folder
from agent_r1.model import files as model_files
from agent_r1.model.policies import AnyModel, load_any, load_transformers, token_logprobs
from agent_r1.training.checkpoint import verify_checkpoint
from agent_r1.training.fsdp_merge import write_merged

MEAN, MOST = 3e-4, 1e-2
"""Most that rounding may change a log-probability between checkpoint and export, both in float32:
the mean, and the 99th percentile of sampled tokens. The maximum is useless: sums over 28 layers and
152,000 logits change their order, and some unlikely token is always far off. Measured with random
weights in Qwen2.5-0.5B's shape, 400 tokens, on a CPU: mean 2e-5, at most 1e-4; mean .10 for weights
rounded to bfloat16. Another model differs by whole nats."""
RECORD = "export.json"
MODEL_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json")
TOKENIZER_PATTERNS = (
    "*token*.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
"""Files that are copied from a model folder; no *.bin, which can contain code."""
TokenRow = tuple[list[int], list[int]]
"""Token ids, and for each whether it was sampled."""


def export(
    checkpoint: Path, config: Config | None, target: Path | None = None, base: Path | None = None
) -> Path:
    """Write `target` from a checkpoint folder (or a model folder) and return it.

    Args:
        config: What it was trained with, or None if unknown.
        target: Default: `export/` in the run's folder, or next to a checkpoint without a run.
        base: Model folder with the shape and tokenizer of verl's shards, instead of those that verl
        saved.

    Raises AgentR1Error if the checkpoint is damaged, the copy computes something else, or `target`
    has other contents.
    """
    if (checkpoint / "manifest.json").is_file():
        verify_checkpoint(checkpoint)
    source = model_files.find_shards(checkpoint) or model_folder(checkpoint)
    if target is None:
        above = checkpoint.absolute().parent
        target = (above.parent if above.name == "checkpoints" else above) / "export"
    weights = f"{weights_hash(source)}-{base}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not (target / RECORD).is_file():
            raise AgentR1Error(
                f"{target} has other contents; choose another --target-dir", code="other_contents"
            )
        if bounds.read_json(target / RECORD)["weights"] == weights:
            say(f"export: already done, in {target}")
            return target
    say(f"export: {checkpoint} ...")
    begin = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), whole(target) as part:
        part.mkdir()
        ours = _write_model(source, part, base)
        check_chat(_tokenizer_folder(source, base), part)
        gaps = logprob_differences(ours, load_transformers(part), _rows(checkpoint))
        mean, most, largest = gaps.mean().item(), gaps.quantile(0.99).item(), gaps.max().item()
        if not (mean <= MEAN and most <= MOST):  # negated, so that NaN fails
            raise AgentR1Error(
                f"{checkpoint} and its export differ by {mean:.1e} in the mean log-probability of "
                f"a sampled token (at most {MEAN:.0e}) and by {most:.1e} in the 99th percentile "
                f"(at most {MOST:.0e}); the export was not kept: it does not have the checkpoint's "
                "weights",
                code="wrong_conversion",
            )
        authors = _read_authors(source, part)
        if config is not None:
            _write_settings(part, config)
        card = _card(checkpoint, config, f"{largest:.1e}", len(gaps), authors)
        (part / "README.md").write_text(card)
        record = {
            "checkpoint": "/".join(
                checkpoint.resolve().parts[-3:]
            ),  # not the whole path, because this may be published
            "weights": weights,
            "max_logprob_difference": largest,
            "mean_logprob_difference": mean,
        }
        (part / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    say(
        f"  log-probabilities of {len(gaps)} sampled tokens: checkpoint and export differ by at "
        f"most {largest:.1e}, "
        f"{mean:.1e} on average\n  {time.perf_counter() - begin:.1f} s, in {target}"
    )
    return target


# ------------------------------------------------------------------------------------------ weights


def _write_model(source: Path, part: Path, base: Path | None) -> AnyModel:
    """Fill `part` with a model folder, and return the checkpoint's model for comparison."""
    if not model_files.find_shards(source):
        _copy(source, part, MODEL_PATTERNS + TOKENIZER_PATTERNS)
        return load_any(source)
    base = _tokenizer_folder(source, base)
    for name in ("config.json", "tokenizer.json"):
        if not (base / name).is_file():
            raise AgentR1Error(
                f"{base} has no {name}, and shards contain only weights; name the start model with "
                "--base-model PATH|OWNER/NAME",
                code="missing_base_model",
            )
    write_merged(source, base, part)
    _copy(base, part, TOKENIZER_PATTERNS)
    return load_any(part)


def _tokenizer_folder(source: Path, base: Path | None) -> Path:
    """Return the folder with the checkpoint's tokenizer; verl saves it next to its shards."""
    return (base or source / "huggingface") if model_files.find_shards(source) else source


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            _refuse_links_out(file, source)
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            with bounds.open_file(file, most_bytes=None) as original, place.open("wb") as copy:
                shutil.copyfileobj(original, copy, 1 << 20)


def _refuse_links_out(file: Path, folder: Path) -> None:
    """Raise AgentR1Error for a link out of `folder`: an export is given to others.

    In the hub's cache, the files of `snapshots/REVISION` are links to `blobs`.
    """
    folder = folder.resolve()
    inside = [folder]
    if folder.parent.name == "snapshots":
        inside.append(folder.parent.parent / "blobs")
    if not any(file.resolve().is_relative_to(place) for place in inside):
        raise AgentR1Error(
            f"{file} is a link out of its folder, and an export would copy what it names; "
            "if you trust it, copy the file there yourself",
            code="link_out",
        )


# ------------------------------------------------------------------------------------------- parity


def logprob_differences(ours: AnyModel, theirs: AnyModel, rows: list[TokenRow]) -> Tensor:
    """Return |difference| of the log-probabilities of all sampled tokens, concatenated [A]."""
    return torch.cat(
        [
            (token_logprobs(ours, i) - token_logprobs(theirs, i)).abs()[torch.tensor(mask).bool()]
            for i, mask in rows
        ]
    )


def _rows(checkpoint: Path) -> list[TokenRow]:
    """Return some of the run's episodes; without a run, random byte tokens."""
    for folder in checkpoint.resolve().parents[:3]:
        for file in (
            folder / "rollouts" / "eval.jsonl",
            *sorted((folder / "rollouts").glob("step_*.jsonl"))[::-1],
        ):
            rows = [
                (r["input_ids"], r["action_mask"])
                for record in read_jsonl(file)[:8]
                for r in record["rows"]
            ]
            if rows:
                return rows
    ids = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    return [(row, [0] + [1] * 63) for row in ids]


# -------------------------------------------------------------------------------- files next to the
# weights


def _write_settings(part: Path, config: Config) -> None:
    """Write the configuration for `agent-r1`, and the sampling settings for other programs."""
    (part / SETTINGS_FILE).write_text(to_yaml(shareable(config)))
    chat = load_chat(part)
    file = part / "generation_config.json"
    generation_config = bounds.read_json(file) if file.is_file() else {}
    ends = generation_config.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    # Other programs sample as the training did. What the start model's authors wrote, such as a
    # repetition penalty, stands in the card.
    generation = model_files.neutral_generation(generation_config) | {
        "temperature": config.rollout.temperature,
        "max_new_tokens": config.rollout.max_tokens_per_turn,
        "eos_token_id": sorted({*ends, *chat.stop_ids}),
        "pad_token_id": chat.tokenizer.pad_token_id,
    }
    file.write_text(json.dumps(generation, indent=2) + "\n")


def check_chat(source: Path, part: Path) -> None:
    """Raise AgentR1Error unless source and export render a conversation with the same tokens."""
    if _conversation(source) != _conversation(part):
        raise AgentR1Error(
            f"{source} and its export render a conversation with other tokens; the export was not "
            "kept: its tokenizer or its chat template is not the checkpoint's",
            code="wrong_conversion",
        )


def _conversation(folder: Path) -> list[list[int]]:
    """Encode a question with and without tools, and a result. Nothing without a chat template."""
    ids: list[list[int]] = []
    try:
        chat = load_chat(folder)
    except ConfigError:
        return ids
    ids.append(list(chat.stop_ids))
    for tools in (None, TOOLS):
        with suppress(ConfigError):  # a template may show no tools
            ids.append(chat.prompt_ids([{"role": "user", "content": "Where is Oslo?"}], tools))
        with suppress(ConfigError):  # or take no results
            result = [{"role": "tool", "content": "In Norway."}]
            ids.append(chat.continuation_ids(result, tools=tools))
    return ids


HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [agent-r1, reinforcement-learning, tool-use]
---
# {name}

Exported by Agent-R1 from a checkpoint. On {tokens} tokens `transformers` gives the
checkpoint's own log-probabilities, within {gap}.
"""
NO_RUN_NOTE = """
It came without its run: how it was trained, and how well it does, is not known here.
"""
MODEL_CARD = """
A language model that was trained to act in turns: it calls a tool ({tools}), reads the
result, acts again, answers. Algorithm {algorithm}, {steps} steps, preset {preset}, seed {seed}; it
started from {start}.{package}

{evaluation}

## Use

    agent-r1 chat --model FOLDER
    agent-r1 eval --model FOLDER
    agent-r1 serve --model FOLDER

`agent_r1.yaml` holds the environment, its limits and the sampling settings of the training; the
commands above read it. The chat template in this folder is the one that the model was trained with.
{authors}
## Train it again

    {command}
"""
AUTHORS = """
generation_config.json samples as the training did. The authors of the start model sample with
`{fields}`.
"""
PACKAGE_SENTENCE = (
    " That is {origin} (licence: {licence}), out of a Python package; its weights: {weights}."
)
CARD_KEYS = (
    "dataset",
    "split",
    "n",
    "score_name",
    "score",
    "score_ci95",
    "em",
    "em_ci95",
    "f1",
    "reward",
    "reward_ci95",
    "mean_tool_calls",
    "truncated_rate",
    "retriever",
    "hardware",
)
"""Keys of the eval card that the model card has, too."""


def _read_authors(source: Path, part: Path) -> dict[str, Any]:
    """Return the sampling fields of the start model's authors, for the card."""
    noted = source / model_files.AUTHORS_FILE
    if noted.is_file():
        return bounds.read_json(noted)
    # verl keeps the start model's file as it is.
    file = part / "generation_config.json"
    return model_files.authors_sampling(bounds.read_json(file)) if file.is_file() else {}


def _card(
    checkpoint: Path, config: Config | None, gap: str, tokens: int, authors: dict[str, Any]
) -> str:
    """Write the model card. Only measurements of this very checkpoint count as its evaluation."""
    if config is None:
        return (HEAD + NO_RUN_NOTE).format(name=checkpoint.name, gap=gap, tokens=tokens)
    run, last = checkpoint.resolve().parents[1], f"step_{config.trainer.steps:06d}"
    has_card = checkpoint.name == last and (run / "eval.json").is_file()
    card = bounds.read_json(run / "eval.json") if has_card else {}
    scheme = tables.scheme_of(config.model.path)
    shown = shareable(config)
    table = [
        "| evaluation | |",
        "|---|---|",
        *(f"| {key} | {card[key]} |" for key in CARD_KEYS if key in card),
    ]
    return (HEAD + MODEL_CARD).format(
        name=run.name if has_card else checkpoint.name,
        gap=gap,
        tokens=tokens,
        tools=", ".join(shown.env.tools) or "none",
        algorithm=config.algorithm,
        steps=config.trainer.steps,
        preset=shown.preset,
        seed=config.seed,
        start=shown.model.path or "a cold start of a tiny model made from scratch",
        package=PACKAGE_SENTENCE.format(**scheme.describe(config.model.path)) if scheme else "",
        evaluation="\n".join(table) if has_card else "This checkpoint was not evaluated.",
        command=train_command(config),
        authors=AUTHORS.format(fields=json.dumps(authors)) if authors else "",
    )
