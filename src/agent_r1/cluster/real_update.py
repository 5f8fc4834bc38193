"""Update a model of real size with random weights, for `gpu-check`.

    torchrun --nproc-per-node RANKS -m agent_r1.cluster.real_update FOLDER

In: FOLDER/config.yaml (our configuration) and FOLDER/job.json. Out: FOLDER/rank_N.json with the
peak of memory, the seconds of an update and the tokens of its largest pass. The worker is verl's
own (FSDP2, dynamic batches), without Ray, vLLM and a task. Next: `gpu_check.py` compares the peak
with the card and the plan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from agent_r1.cluster.compose import Sources, compose, overrides
from agent_r1.config import Config, from_yaml, to_yaml
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.shapes import Shape

SHORTEST = 500
LONGEST = 2200
"""Tokens of the shortest and of the longest row: a mean of about 1,350, as HotpotQA's episodes."""
UPDATES = 2
"""The first one compiles; the second one is timed."""
PATIENCE_S = 600


def measure(config: Config, shape: Shape, device: str, folder: Path) -> dict[str, float]:
    """Run an update on this machine's ranks; return each rank's largest figures.

    `peak` is in bytes, `seconds` are an update's, `tokens` a rank's, `largest_pass` is in tokens.
    Raises AgentR1Error with the last error of a rank, such as a lack of memory.
    """
    from agent_r1.cluster.launch import driver_environment

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    job = {"shape": dataclasses.asdict(shape), "device": device}
    (folder / "job.json").write_text(json.dumps(job))
    ranks = config.verl.ranks // config.verl.nodes
    log = folder / "update.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "agent_r1.cluster.real_update"]
    environment = driver_environment(config, device, "gpu-check", folder)
    with log.open("w") as output:
        try:
            process = subprocess.run(
                [*command, str(folder)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
            )
        except subprocess.TimeoutExpired:
            raise AgentR1Error(
                f"an update of real size had not ended after {PATIENCE_S} s; log: {log}",
                code="too_slow",
            ) from None
    if process.returncode:
        raise AgentR1Error(
            f"an update of real size failed: {last_error(log)}; log: {log}", code="update_failed"
        )
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("rank_*.json"))]
    return {name: max(result[name] for result in results) for name in results[0]}


def last_error(log: Path) -> str:
    """Return the first line of a log that names an exception, else its last line."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines[-1:])[0].strip()


# ---------------------------------------------------------------------------------------- one rank


def make_published_config(shape: Shape, qwen3: bool) -> transformers.PreTrainedConfig:
    """Make the config.json of a published Qwen model of this shape, without a download."""
    kind = transformers.Qwen3Config if qwen3 else transformers.Qwen2Config
    config = kind(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions,
        architectures=["Qwen3ForCausalLM" if qwen3 else "Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    if qwen3:
        config.head_dim = shape.head_dim
    return config


def write_model(shape: Shape, qwen3: bool, folder: Path) -> None:
    """Write random weights in bfloat16, as published models have, and a small tokenizer."""
    from agent_r1.chat.tokenizer import save_tokenizer, train_tokenizer

    config = make_published_config(shape, qwen3)
    # A CPU draws 1.5 billion numbers in about a minute, a GPU at once.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(train_tokenizer(["a question and an answer"], 300), folder)


def row_lengths(tokens: int, longest: int) -> list[int]:
    """Draw the lengths of rows that fill two passes of `tokens` tokens.

    verl takes as few passes as hold a batch, and balances them. A batch that just begins a second
    pass would become two half passes, and test half of the memory. So the rows of a full pass are
    here twice. Two passes, because the second one adds to gradients that are there.
    """
    generator = random.Random(0)
    longest = min(LONGEST, longest)
    shortest = min(SHORTEST, longest // 2)
    lengths: list[int] = []
    rest = tokens
    while rest > longest:
        lengths.append(generator.randint(shortest, min(longest, rest - shortest)))
        rest -= lengths[-1]
    return 2 * [*lengths, rest]


def random_batch(
    lengths: list[int], vocab: int, seed: int, entropy: bool = False, ranks: int = 1
) -> Any:
    """Make one rank's rows of random tokens as in verl's TransferQueue: half prompt, half answer.

    verl's sizes of a batch count the rows of all `ranks`, each of which has as many as this one.
    """
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocab, (length,), generator=generator) for length in lengths]
    answers = [row[len(row) // 2 :] for row in rows]
    count = len(rows) * ranks
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "prompts": [row[: len(row) // 2] for row in rows],
        "responses": answers,
        "response_mask": [torch.ones_like(row) for row in answers],
        "loss_mask": [torch.ones_like(row) for row in answers],
        "old_log_probs": [torch.full(row.shape, -12.0) for row in answers],
        "ref_log_prob": [torch.full(row.shape, -12.0) for row in answers],
        "rollout_is_weights": [torch.ones(row.shape) for row in answers],
        "advantages": [torch.randn(row.shape, generator=generator) for row in answers],
        "episode_tokens": [torch.full(row.shape, len(row)) for row in answers],
        "minibatch_episodes": [torch.full(row.shape, count) for row in answers],
    }
    settings = {
        "calculate_entropy": entropy,
        "distillation_use_topk": False,
        "distillation_only": False,
        "global_batch_size": count,
        "mini_batch_size": count,
        "epochs": 1,
        "seed": 0,
        "dataloader_kwargs": {"shuffle": False},
        "temperature": 1.0,
    }
    nested_columns: dict[str, torch.Tensor | list[Any]] = {
        name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
        for name, column in columns.items()
    }
    return tensordict_utils.get_tensordict(nested_columns, settings)


def make_worker(settings: Any, passes: list[int]) -> Any:
    """Start verl's actor with our loss. `settings` is verl's `actor_rollout_ref`.

    The tokens of each pass of an update are appended to `passes`.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from agent_r1.cluster.algorithms import verl_actor_loss

    loss = partial(verl_actor_loss, omega_conf_to_dataclass(settings.actor))

    def count_and_compute(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        passes.append(int(data["input_ids"].offsets()[-1]))
        return loss(model_output=model_output, data=data, dp_group=dp_group)

    worker = ActorRolloutRefWorker(settings, role="actor")
    worker.init_model()
    worker.set_loss_fn(count_and_compute)
    return worker


def main(folder: Path) -> None:
    """Make the model on the first rank, update it on all, write the costs."""
    job = json.loads((folder / "job.json").read_text())
    config = from_yaml(folder / "config.yaml", written_here=True)
    shape = Shape(**job["shape"])
    rank = int(os.environ["RANK"])
    model = folder / "model"
    ready = folder / "ready"
    if rank == 0:
        write_model(shape, "Qwen3" in (config.model.path or ""), model)
        ready.touch()
    while not ready.exists():
        time.sleep(0.2)
    sources = Sources(model, folder, folder, folder)
    settings = compose(overrides(config, sources, job["device"])).actor_rollout_ref
    passes: list[int] = []
    worker = make_worker(settings, passes)
    lengths = row_lengths(config.trainer.max_tokens_per_microbatch, config.rollout.max_context)
    gpu = job["device"] == "cuda"
    seconds = 0.0
    for update in range(UPDATES):
        batch = random_batch(
            lengths,
            shape.vocab,
            update,
            entropy=config.actor.entropy_coef > 0,
            ranks=int(os.environ["WORLD_SIZE"]),
        )
        start = time.perf_counter()
        worker.update_actor(batch)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    result = {
        "peak": torch.cuda.max_memory_allocated() if gpu else 0,
        "seconds": seconds,
        "tokens": sum(lengths),
        "largest_pass": max(passes),
    }
    (folder / f"rank_{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
