"""A checkpoint becomes a folder that anyone can use: vLLM, `transformers`, the hub, and `agent-r1 chat`.

In: a checkpoint of the local loop or of verl, or a LoRA adapter. Out: weights as safetensors, tokenizer, chat template,
generation settings as trained, the run's configuration, and a model card. Next: `serve.py`.

Nothing is called exported that was not compared: the exported folder, read by `transformers`, must give the checkpoint's
own log-probabilities on episodes of the run, token by token.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agent_r1.config import Config, fingerprint, to_yaml
from agent_r1.errors import AgentR1Error
from agent_r1.files import read_jsonl, sha256
from agent_r1.inference.agent import SETTINGS, hub_model, model_folder
from agent_r1.inference.provenance import train_command
from agent_r1.rollout import qwen
from agent_r1.rollout.policies import load_transformers, token_logprobs
from agent_r1.rollout.rows import TrainingRow, collate
from agent_r1.training.checkpoint import verify_checkpoint
from agent_r1.training.forward import action_logprobs
from agent_r1.training.shards import SHARDS, find_shards, write_merged
from agent_r1.training.tiny_model import load_chat
from agent_r1.ui import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEAN, MOST = 3e-4, 1e-2
"""What rounding may change in a log-probability between checkpoint and export, both in float32: on average, and for 99 of
100 sampled tokens. Not the largest: sums over 28 layers and 152,000 logits come in another order, and of some thousand
tokens an unlikely one is always far out. Measured with random weights in Qwen2.5-0.5B's shape, 400 tokens, on a CPU: 2e-5 on
average, 1e-4 at most; .10 on average where the weights were rounded to bfloat16. Another model is off by whole nats."""
RECORD = "export.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
TOKENIZER = ("*token*.json", "vocab.json", "merges.txt", "*.jinja", "generation_config.json")
"""What is copied from a model folder: in particular no *.bin, which could hold code."""
ROW_KEYS = ("input_ids", "action_mask", "logprobs", "rewards", "step_ids")


def export(checkpoint: Path, config: Config | None, target: Path, base: Path | None = None) -> Path:
    """Write `target` from a checkpoint folder (or a model or adapter folder) and return it.

    `config`: what it was trained with, None where that is not known. `base`: the model folder whose shape and tokenizer
    the shards of verl have, instead of those that verl saved beside them. Raises AgentR1Error when the checkpoint is
    damaged, when the copy does not compute the same, and when `target` holds something else.
    """
    source = _source(checkpoint)
    weights = fingerprint([_fingerprint(source), str(base)])
    if _exported_weights(target) == weights:
        say(f"export: done before, in {target}")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not (target / RECORD).is_file():
        raise AgentR1Error(f"{target} holds something else; choose another --target-dir")
    say(f"export: {checkpoint} ...")
    begin, part = time.perf_counter(), target.with_name(f".part-{target.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        rows = _recorded_rows(checkpoint) or _random_rows()
        gaps = _gaps(_write_weights(source, part, rows, base), _by_transformers(part, rows), rows)
        gap, mean, most, tokens = gaps.max().item(), gaps.mean().item(), gaps.quantile(0.99).item(), len(gaps)
        if not (mean <= MEAN and most <= MOST):  # also where one is NaN
            raise AgentR1Error(
                f"{checkpoint} and its export differ by {mean:.1e} in the mean log-probability of a sampled token (at most "
                f"{MEAN:.0e}) and by {most:.1e} in the 99th percentile (at most {MOST:.0e}); the export was not kept: it "
                "has not the checkpoint's weights"
            )
        if config is not None:
            _write_settings(part, config)
        (part / "README.md").write_text(_card(checkpoint, config, gap, tokens))
        name = "/".join(checkpoint.resolve().parts[-3:])  # not the whole path: this may be published
        record = {
            "checkpoint": name,
            "weights": weights,
            "max_logprob_difference": gap,
            "mean_logprob_difference": mean,
        }
        (part / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except OSError as error:
        raise AgentR1Error(
            f"cannot write {target} ({error.strerror or error}); free space or choose --target-dir"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(
        f"  log-probabilities of {tokens} sampled tokens: checkpoint and export differ by at most {gap:.1e}, {mean:.1e} on "
        "average\n"
        f"  {time.perf_counter() - begin:.1f} s, in {target}"
    )
    return target


def default_target(checkpoint: Path) -> Path:
    """`export/` in the folder of the run, or beside a checkpoint that is in none."""
    checkpoint = checkpoint.absolute()
    return (checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint.parent) / "export"


# ----------------------------------------------------------------------------------------------------------- weights


def _source(checkpoint: Path) -> Path:
    """The folder with the weights: a model, an adapter, or a checkpoint of verl."""
    if (checkpoint / "manifest.json").is_file():
        verify_checkpoint(checkpoint)
    if (checkpoint / "adapter_config.json").is_file():
        return checkpoint
    return find_shards(checkpoint) or model_folder(checkpoint)


def _fingerprint(source: Path) -> str:
    files = sorted([*source.rglob("*.safetensors"), *source.glob(SHARDS)])
    return fingerprint([[str(file.relative_to(source)), sha256(file)] for file in files])


def _exported_weights(target: Path) -> str | None:
    """The fingerprint of what `target` was exported from; None where it is no export."""
    try:
        return json.loads((target / RECORD).read_text())["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_weights(source: Path, part: Path, rows: list[TrainingRow], base: Path | None) -> list[Tensor]:
    """Fill `part` with a model folder. Returns the checkpoint's own log-probabilities of `rows`."""
    if (source / "adapter_config.json").is_file():
        return _merge_adapter(source, part, rows)
    if find_shards(source):
        base = base or source / "huggingface"  # where verl saves them
        for name in ("config.json", "tokenizer.json"):
            if not (base / name).is_file():
                raise AgentR1Error(
                    f"{base} has no {name}, and shards are weights alone; name the model that training started from with "
                    "--base-model PATH|OWNER/NAME"
                )
        write_merged(source, base, part)
        _copy(base, part, TOKENIZER)
        source = part
    else:
        _copy(source, part, WEIGHTS + TOKENIZER)
    try:
        qwen.read_shape(source)
    except AgentR1Error:  # another architecture: `transformers` is all we have to compute it with
        return _by_transformers(source, rows)
    model = qwen.load(source)
    with torch.inference_mode():
        return [action_logprobs(model, collate([row]))[0][0] for row in rows]


def _merge_adapter(adapter: Path, part: Path, rows: list[TrainingRow]) -> list[Tensor]:
    """base + B.A becomes one matrix each, in float32."""
    try:
        from peft import PeftModel
    except ImportError:
        raise AgentR1Error(f"{adapter} is a LoRA adapter; install what merges it: pip install peft") from None
    if not (adapter / "adapter_model.safetensors").is_file():
        raise AgentR1Error(f"{adapter} has no adapter_model.safetensors; save the adapter again, as safetensors")
    base = hub_model(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])
    model = PeftModel.from_pretrained(load_transformers(base), adapter).eval()
    apart = [_logprobs(model, row) for row in rows]
    model.merge_and_unload().save_pretrained(part)
    _copy(adapter if (adapter / "tokenizer.json").is_file() else base, part, TOKENIZER)
    return apart


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


# ------------------------------------------------------------------------------------------------------------ parity


def _recorded_rows(checkpoint: Path) -> list[TrainingRow]:
    """A handful of episodes of the run, prompts, tool results and all."""
    for folder in checkpoint.resolve().parents[:3]:
        files = [folder / "rollouts" / "eval.jsonl", *sorted((folder / "rollouts").glob("step_*.jsonl"))[::-1]]
        for file in files:
            rows = [row for record in read_jsonl(file)[:8] for row in record["rows"]]
            if rows:
                return [TrainingRow(0, "", *(row[key] for key in ROW_KEYS)) for row in rows]
    return []


def _random_rows() -> list[TrainingRow]:
    """Without a run: byte tokens at random. They mean nothing, and the arithmetic must agree all the same."""
    ids = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    return [TrainingRow(0, "", row, [0] + [1] * 63, [0.0] * 64, [0.0] * 64, [0] * 64) for row in ids]


def _by_transformers(folder: Path, rows: list[TrainingRow]) -> list[Tensor]:
    model = load_transformers(folder)
    return [_logprobs(model, row) for row in rows]


def _logprobs(model: PreTrainedModel, row: TrainingRow) -> Tensor:
    """log pi [T] at the row's action tokens, 0 elsewhere; the counterpart of `action_logprobs`."""
    return token_logprobs(model, row.input_ids) * torch.tensor(row.action_mask)


def _gaps(ours: list[Tensor], theirs: list[Tensor], rows: list[TrainingRow]) -> Tensor:
    """|difference| of the log-probabilities of all action tokens, end to end [A]."""
    return torch.cat(
        [(a - b).abs()[torch.tensor(row.action_mask).bool()] for a, b, row in zip(ours, theirs, rows, strict=True)]
    ).float()


# ------------------------------------------------------------------------------------------- what lies beside the weights


def _write_settings(part: Path, config: Config) -> None:
    """How the model was made to speak: for `agent-r1` the whole configuration, for others the sampling settings."""
    (part / SETTINGS).write_text(to_yaml(config))
    chat = load_chat(part)
    generation = {
        "do_sample": True,
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "max_new_tokens": config.rollout.max_tokens_per_turn,
        "eos_token_id": list(chat.stop_ids),
        "pad_token_id": chat.tokenizer.pad_token_id,
    }
    (part / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [agent-r1, reinforcement-learning, tool-use]
---
# {name}
"""
BARE = """
Exported by Agent-R1 from a checkpoint that came without its run: how it was trained, and how well it does, is not known
here. On {tokens} tokens `transformers` gives the log-probabilities of its weights, within {gap:.1e}.
"""
CARD = """
A language model that was trained to act in turns by Agent-R1: it calls a tool ({tools}), reads the result, acts again,
answers. Algorithm {algorithm}, {steps} steps, preset {preset}, seed {seed}; it started from {start}.

{evaluation}

The weights were exported from a checkpoint. On {tokens} tokens `transformers` gives the checkpoint's own
log-probabilities, within {gap:.1e}.

## Use

    agent-r1 chat --model FOLDER
    agent-r1 eval --model FOLDER
    agent-r1 serve --model FOLDER

`agent_r1.yaml` holds the environment, its limits and the sampling settings of the training; the commands above read it.
The chat template in this folder is the one that the model was trained with.

## Train it again

    {command}
"""


def _card(checkpoint: Path, config: Config | None, gap: float, tokens: int) -> str:
    """The model card. Only what was measured on this very checkpoint is called its evaluation."""
    if config is None:
        return (HEAD + BARE).format(name=checkpoint.name, gap=gap, tokens=tokens)
    run, last = checkpoint.resolve().parents[1], f"step_{config.trainer.steps:06d}"
    path = run / "eval.json"
    card = json.loads(path.read_text()) if checkpoint.name == last and path.is_file() else None
    keys = (
        "dataset",
        "split",
        "n",
        "score_name",
        "score",
        "em",
        "em_ci95",
        "f1",
        "mean_tool_calls",
        "truncated_rate",
        "retriever",
        "hardware",
    )
    table = [f"| {key} | {card[key]} |" for key in keys if key in card] if card else []
    return (HEAD + CARD).format(
        name=run.name if card else checkpoint.name,
        tools=", ".join(config.env.tools) or "none",
        start=config.model.path or "a cold start of a tiny model made from nothing",
        evaluation="\n".join(["| evaluation | |", "|---|---|", *table])
        if table
        else "This checkpoint was not evaluated.",
        command=train_command(config),
        **{"algorithm": config.algorithm, "steps": config.trainer.steps, "preset": config.preset, "seed": config.seed},
        **{"gap": gap, "tokens": tokens},
    )
