"""Estimate what a GPU run needs before it starts: memory, disk, hours, money.

In: a configuration, the shape of its model, a GPU's data sheet. Out: bytes and seconds. `train
--dry-run` prints them (plan.txt.j2 is the page for GPUs), and `doctor.py` compares them with a
machine. P are weights, H heads, K key-value heads, V words, R ranks. A token of a sequence of T
tokens attends to T/2 tokens on average:

    weights, Adam      12 P / R bytes for each trained network: float32, two moments (FSDP: / R)
    gradients           4 P / R, of the network that is updated; with LoRA, adapters only
    logits              8 V bytes per token of a pass, at most; usually the largest part
    vLLM                its share: 2 P of weights, 4 K (layers x width of a head) of cache a token
    reference, offload  only the network in use is on the GPU; the others wait in host memory
    forward             2 P + 2 T H (layers x width of a head) operations a token, with attention
    update              4 forwards: backward is two, and recomputing the activations is one
    decoding            bound by memory: a token reads 2 P of weights once, and each episode's cache

Seconds are a roofline (Williams et al. 2009), max(operations / rate, bytes / bandwidth): what good
kernels could reach. Assumptions are constants in capitals with their reason. An update and
log-probabilities were measured on one H100, sampling on one H200 (docs/lab/gpu.md).
"""

from __future__ import annotations

import math

from agent_r1.cluster.hardware import Gpu, find_gpu
from agent_r1.config import Config, tables
from agent_r1.config.settings import NGRAM
from agent_r1.data.source import source_of
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.machine import total_memory
from agent_r1.ground.preflight import gpus_here, list_gpus, plan_setting
from agent_r1.ground.shapes import Shape, check_context
from agent_r1.ground.units import GIB
from agent_r1.training.plan_local import local_memory, model_shape

# -------------------------------------------------------------------------------------- assumptions

PROMPT_TOKENS, EPISODE_TURNS, TURN_TOKENS, PASSAGE_TOKENS = 450, 3, 120, 85
"""A HotpotQA episode, guessed: tokens of instructions and question; turns, with the answer; sampled
tokens per turn; tokens of a passage. (BEIR has 46 words, and a title.) A model that reasons longer
costs in proportion."""
LONGEST = 4
"""Sampled tokens of the longest episode, which the step waits for, in multiples of the mean."""
MULTIPLY, WIDE = 0.4, 4096
"""Share of a GPU's arithmetic that passes over long packed rows reach at width 4096. It falls with
the root of the width, because narrow matrices leave units idle (published: .15 at 896,
benchmarks/published_steps.json). At width 1536 that is .245. Measured with verl on one H100: .245
for log-probabilities and .30 for an update with its recomputed forward (docs/lab/gpu.md)."""
STREAM = 0.6
"""Share of the bandwidth that decoding reaches."""
TOKEN_S, TURN_S, STEP_S = 0.006, 1.0, 5.0
"""Seconds that do not depend on the model. Per token: kernel launches, scheduling, sampling. Per
turn of the longest episode: search, and the way between Ray, vLLM and the tools. Per step:
TransferQueue, Ray, logging."""
MANY_EPISODES, LEAST_STEP_S = 256, 2.7
"""The seconds above are guesses for so many episodes. For fewer they shrink in proportion, but not
below a whole step of a tiny model, measured on one H100 (docs/lab/gpu.md, two steps of verl)."""
SYNC_S, SYNC_RATE, HOST_RATE = 3.0, 5e9, 20e9
"""Seconds to wake vLLM up; bytes per second of the weight sync, and to a GPU (PCIe 4).

It is woken after a step. What goes to a GPU comes from host memory.
"""
SLOWER = 4
SLOWER_ON_HOPPER = 2
"""The plan's range is the computed time to so many times that (benchmarks/published_steps.json).

On A100s of 2025 steps took up to 3.7 times as long: that stack paused all episodes for each round
of tools. On H100s they took at most 1.5 times as long."""
BYTES_PER_LOGIT = 8
"""Most bytes per token of a pass and word of the vocabulary: bfloat16, its gradient, float32 for
the softmax. A cross entropy in place and a compiled entropy need less (`make long
PART=real_shapes`). On an H100 an update of 1.5B with 16,384 tokens reserved 45.5 GiB; this sum has
45.1 for the same parts."""
CONTEXT, VLLM_WORK = 3 * GIB, 2 * GIB
"""Per GPU: CUDA's contexts, NCCL, graphs, memory that the allocator cannot reuse.

Of vLLM's share: a long prompt, graphs.
"""
RANK_HOST, HOST, SHM = 6 * GIB, 8 * GIB, 8 * GIB
"""Host memory of a training process with vLLM; of Ray's head and the driver; of Ray's store.

vLLM's is its server of one process, and the store is Ray's object store.
"""
PASSAGE_DISK, PASSAGE_HOST, GRAPH = 340, 800, 300
"""Bytes of a BEIR passage as JSON, as a Python object, and of its node in an HNSW graph."""
PACKAGES_BYTES, HUB_BYTES, KERNELS_BYTES = 11 * GIB, 2 * GIB, GIB
"""Disk: requirements/verl-gpu.txt (measured); the hub's cache; compiled kernels of a program.

The cache has questions and the encoder.
"""
WIDTHS = {"small": 384, "base": 768, "large": 1024}
"""Vector widths of bge and e5."""
INDEXED_PASSAGES, INDEX_HOURS = 5_233_329, (0.3, 1.5)
"""Hours to download and encode that many passages and to build their graph. An estimate;
proportional to the passages."""


# ------------------------------------------------------------------------------------------- memory


def layer_width(shape: Shape) -> int:
    """Count the numbers that one layer computes for a token."""
    return 3 * shape.intermediate + 4 * (shape.heads * shape.head_dim + shape.hidden)


def states(config: Config, shape: Shape) -> tuple[float, float]:
    """Return bytes of weights and Adam's moments of the actor and the critic.

    verl's critic has no adapters.
    """
    actor = 4 * shape.parameters + 8 * shape.count_trained_weights(config.actor.lora_rank)
    return actor, 12 * shape.parameters * (config.algorithm_has("critic"))


def gpu_memory(config: Config, shape: Shape, gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Return by part the bytes on each GPU, as (while sampling, while training)."""
    v, tokens = config.verl, config.trainer.max_tokens_per_microbatch
    trained_weights = shape.count_trained_weights(config.actor.lora_rank)
    actor, critic = (part / v.ranks for part in states(config, shape))
    # Weights and gradients in bfloat16, and gradients in float32 for the sum over ranks: an FSDP
    # unit's peak at the end of backward. Embeddings and output are one unit, by far the largest.
    gathered_bytes = 8 * (shape.layer + shape.vocab * shape.hidden * (1 if shape.tied else 2))
    return {
        "actor: weights, Adam": (0, max(actor, critic))
        if v.offload
        else (actor, actor),  # one is at work, the larger counts
        **({"critic: weights, Adam": (0, 0) if v.offload else (critic, critic)} if critic else {}),
        "gradients": (0, 4 * (shape.parameters if critic else trained_weights) / v.ranks),
        "gathered embeddings, layer": (0, gathered_bytes if v.ranks > 1 else gathered_bytes / 2),
        f"activations of {tokens:,} tokens": (
            0,
            2 * tokens * (shape.layers * shape.hidden + layer_width(shape)),
        ),
        f"logits of {tokens:,} tokens": (0, BYTES_PER_LOGIT * tokens * shape.vocab),
        "vLLM: weights, cache, work": (v.gpu_memory * gpu.memory, 0),
        "vLLM: bucket of new weights": (4 * shape.vocab * shape.hidden, 0),
        "CUDA, NCCL, graphs": (CONTEXT, CONTEXT),
    }


def conversations(config: Config, shape: Shape, gpu: Gpu) -> float:
    """Return how many conversations of full length fit into one server's cache.

    The result is negative if not even the weights fit.
    """
    v = config.verl
    cache = v.gpu_memory * gpu.memory - 2 * shape.parameters / v.tensor_parallel - VLLM_WORK
    return cache * v.tensor_parallel / (shape.cache * config.rollout.max_context)


def misfits(config: Config, shape: Shape, gpu: Gpu) -> list[str]:
    """List why the run does not fit on such GPUs, each reason with a remedy."""
    v, context, limit = config.verl, config.rollout.max_context, 0.97 * gpu.memory
    sampling, training = (
        sum(row[i] for row in gpu_memory(config, shape, gpu).values()) for i in (0, 1)
    )
    warm = sum(local_memory(config, shape, 2).values()) if config.cold_start.warm_steps else 0
    size, more = f"of {gpu.memory / GIB:.0f} GiB", "" if v.offload else "verl.offload=true, "
    less = (
        f"trainer.max_tokens_per_microbatch={context}, "
        if config.trainer.max_tokens_per_microbatch > context
        else ""
    )
    problems = {
        f"vLLM's share ({v.gpu_memory:.0%} {size}) does not hold the weights and one conversation "
        f"of {context} tokens; raise verl.gpu_memory or verl.tensor_parallel, or use a smaller "
        "model": conversations(config, shape, gpu) < 1,
        f"sampling needs {sampling / GIB:.0f} {size}; set {more}a smaller verl.gpu_memory, more "
        "verl.ranks or a smaller model": sampling > limit,
        f"the warm start needs {warm / GIB:.0f} {size} on one GPU; set cold_start.warm_steps=0 or "
        "a smaller model": warm > limit,
        f"training needs {training / GIB:.0f} {size}; set {less}{more}more verl.ranks or a smaller "
        "model": training > limit,
    }
    return [problem for problem, applies in problems.items() if applies]


def index_memory(config: Config) -> float:
    """Return bytes of the search index with its passages, in one process."""
    return passage_count(config) * (PASSAGE_HOST + 4 * width(config) + GRAPH)


def convert_memory(shape: Shape) -> float:
    """Return bytes to merge a checkpoint's shards into one model.

    Float32 weights, a copy of tied embeddings, and two copies to look for NaN.
    """
    return 4 * (shape.parameters + shape.vocab * shape.hidden * (3 if shape.tied else 2))


def host_memory_parts(config: Config, shape: Shape) -> dict[str, float]:
    """Return by part the bytes of host memory on one machine, with one search service."""
    v, P = config.verl, shape.parameters
    here = v.ranks / v.nodes
    return {
        "Ray and the driver": HOST + convert_memory(shape),
        "training processes": here * RANK_HOST
        + (here if shape.tied else 1) * 4 * P,  # loaded in float32
        "reference": 4 * P / v.nodes if config.actor.kl_coef else 0,
        "offloaded networks": sum(states(config, shape)) / v.nodes if v.offload else 0,
        "search service": index_memory(config),
    }


def disk(config: Config, shape: Shape) -> dict[str, float]:
    """Return by part the bytes of disk, at most."""
    checkpoints = config.trainer.keep_checkpoints
    return {
        "packages": PACKAGES_BYTES,
        "the hub's cache": HUB_BYTES + 2 * shape.parameters,
        "corpus and its archive": 1.5 * passage_count(config) * PASSAGE_DISK,
        "index": passage_count(config)
        * (2 * 4 * width(config) + GRAPH),  # vectors twice: in vectors.npy and in FAISS's graph
        "warm-started model": 4 * shape.parameters * bool(config.cold_start.warm_steps),
        f"checkpoints, {checkpoints} kept and one being written": (checkpoints + 1)
        * checkpoint_bytes(config, shape),
    }


def checkpoint_bytes(config: Config, shape: Shape) -> float:
    """Return bytes of one checkpoint: model/ in float32, weights and Adam of each network."""
    return 4 * shape.parameters + sum(states(config, shape))


def passage_count(config: Config) -> int:
    """Count the passages to search: about five per question, or those of a known corpus.

    A user-defined file counts as 0.
    """
    facts = tables.entries("corpus").get(config.data.corpus, {})
    return (
        config.data_facts.get("paragraphs", 0)
        if facts.get("of_questions")
        else facts.get("passages", 0)
    )


def width(config: Config) -> int:
    """Return the width of the encoder's vectors, by its name."""
    if config.search.encoder == NGRAM:
        return config.search.dim
    return next(
        (value for name, value in WIDTHS.items() if name in config.search.encoder),
        max(WIDTHS.values()),
    )


# --------------------------------------------------------------------------------------------- time


def step_seconds(config: Config, shape: Shape, gpu: Gpu) -> dict[str, float]:
    """Return the seconds of each part of a step with the assumed HotpotQA episodes."""
    r, e, v, ppo = config.rollout, config.env, config.verl, config.algorithm_has("critic")
    episodes, sampled_tokens, read_tokens, length = lengths(config)
    sampled_episodes = episodes + config.greedy_episodes
    rate = gpu.flops * MULTIPLY * min(1, math.sqrt(shape.hidden / WIDE))
    forward = episodes * length * shape.forward(length) / v.ranks / rate

    here = (
        sampled_episodes * v.tensor_parallel / v.ranks
    )  # episodes per server, and how many it decodes at a time
    slots = min(
        here,
        r.max_concurrent_episodes,
        max(1, conversations(config, shape, gpu) * r.max_context / length),
    )
    room = (
        r.max_context - PROMPT_TOKENS - (e.max_turns - 1) * read_tokens / max(1, EPISODE_TURNS - 1)
    )
    longest = max(
        sampled_tokens, min(LONGEST * sampled_tokens, e.max_turns * r.max_tokens_per_turn, room)
    )
    tokens = max(
        longest, here * sampled_tokens / slots
    )  # two batches of episodes decode one after the other
    together = here * sampled_tokens / tokens  # mean batch size, which falls as episodes end
    traffic = 2 * shape.matmul_weights + together * (PROMPT_TOKENS + length) / 2 * shape.cache
    token = (
        max(traffic / (gpu.bandwidth * STREAM), together * 2 * shape.matmul_weights / rate)
        / v.tensor_parallel
    )

    fixed = share_of_fixed_seconds(episodes, e.max_turns * TURN_S + SYNC_S + STEP_S)
    seconds = {
        "sampling: decoding": tokens * (TOKEN_S + token),
        # A group's prompt is read once (prefix cache).
        "sampling: reading": (r.prompts_per_step * PROMPT_TOKENS + sampled_episodes * read_tokens)
        * shape.forward(length)
        / v.ranks
        / rate,
        "sampling: tools, turns": fixed * e.max_turns * TURN_S,
        "log-probabilities": forward,
        "reference": (config.actor.kl_coef > 0)
        * max(forward, 4 * shape.parameters / v.ranks / HOST_RATE),
        "values": forward * ppo,
        "critic's update": 4 * forward * ppo * config.critic.epochs,
        "actor's update": 4 * forward * config.actor.epochs,
        "weight sync": fixed * SYNC_S + 2 * shape.parameters / SYNC_RATE,
        "Ray, TransferQueue": fixed * STEP_S,
    }
    return {name: value for name, value in seconds.items() if value}


def share_of_fixed_seconds(episodes: int, seconds: float) -> float:
    """Return the share of a step's fixed `seconds` that a step of few episodes takes."""
    least = min(1.0, LEAST_STEP_S / seconds) if seconds else 1.0
    return min(1.0, max(least, episodes / MANY_EPISODES))


def lengths(config: Config) -> tuple[int, float, float, float]:
    """Return episodes per step, and the tokens of a mean episode: (sampled, read, all)."""
    turns = min(EPISODE_TURNS, config.env.max_turns)
    sampled_tokens = turns * min(TURN_TOKENS, config.rollout.max_tokens_per_turn)
    read_tokens = (turns - 1) * min(
        config.search.top_k * PASSAGE_TOKENS, config.env.tool_max_chars / 4
    )
    return (
        config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        sampled_tokens,
        read_tokens,
        PROMPT_TOKENS + sampled_tokens + read_tokens,
    )


def run_hours(config: Config, shape: Shape, step: dict[str, float]) -> dict[str, float]:
    """Return the computed hours of each part of a run. `INDEX_HOURS` come once before it."""
    t, d = config.trainer, config.data
    published_counts = [*getattr(source_of(d), "counts", {}).values()] or [0]
    questions = d.test or published_counts[-1]  # 0 means all held-out questions, the last count
    sampling = sum(value for name, value in step.items() if name.startswith("sampling"))
    return {
        "training": t.steps * sum(step.values()) / 3600,
        # Before and after training: greedy, and 1,000 at temperature 1, at the speed of a step's
        # sampling.
        "evaluations": 2
        * (questions + min(questions, 1000))
        / lengths(config)[0]
        * sampling
        / 3600,
        # Every rank writes its shards and one rank merges them, at 1 GB/s.
        "checkpoints": math.ceil(t.steps / t.save_every)
        * 2
        * checkpoint_bytes(config, shape)
        / 1e9
        / 3600,
    }


# ----------------------------------------------------------------------------------------- the page


def slower(gpu: str) -> int:
    """Return the factor from the computed to the longest time, for a name in `hardware.GPUS`."""
    return SLOWER_ON_HOPPER if gpu.startswith(("H100", "H200")) else SLOWER


def check_conversion(config: Config) -> None:
    """Raise AgentR1Error if a checkpoint of this model cannot be merged in this machine's memory.

    One process merges verl's shards in float32, after the first steps were paid for.
    """

    if not config.verl.gpu:
        return
    try:
        shape = model_shape(config)
    except ConfigError:  # of unknown size until it is fetched
        return
    total = total_memory()
    need = HOST + convert_memory(shape)
    if total is not None and total < need:
        raise AgentR1Error(
            f"a checkpoint of {config.model.path} is merged by one process, which needs "
            f"{need / GIB:.0f} GiB of host memory; this machine has {total / GIB:.0f}; use a "
            "machine with more, or a smaller model",
            code="too_little_memory",
        )


def resume_count(hours: float, max_hours: float) -> int:
    """Count the calls with --resume that a training of `hours` takes."""
    return max(0, math.ceil(hours / max_hours) - 1)


def describe_limit(hours: float, times: int, max_hours: float) -> str:
    """Compare a training of `hours`, and of up to `times` that, with trainer.max_hours."""
    if not max_hours:
        return "trainer.max_hours=0: no limit"
    limit = f"trainer.max_hours={max_hours:g} ends training with a checkpoint"
    least, most = (resume_count(value, max_hours) for value in (hours, times * hours))
    if most == 0:
        return f"{limit}; by this plan all steps are done before"
    count = f"{least} to {most}" if least else f"up to {most}"
    return f"{limit}; by this plan --resume is needed {count} time{'s' if most > 1 else ''}"


def other_card(config: Config) -> str:
    """Return a note if the plan knows this machine's cards and is made for others."""
    gpus = gpus_here()
    setting = plan_setting(gpus, config.verl.gpu) if gpus else ""
    return setting and f"here is {list_gpus(gpus)}; {setting} plans for that"


def _in_gib(amount: float) -> str:
    return f"{amount / GIB:.0f}"


def _list_parts(amounts: dict[str, float]) -> str:
    """List the bytes of each part that has some, in GiB."""
    return ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in amounts.items() if amount)


def gpu_plan(config: Config, gpu_hour: float | None = None) -> str:
    """Describe memory, disk, time and cost on GPUs.

    Raises ConfigError for a model of unknown size.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    v, gpu = config.verl, find_gpu(config.verl.gpu)
    shape = model_shape(config)
    check_context(config.rollout.max_context, v.tensor_parallel, shape)
    memory, step = gpu_memory(config, shape, gpu), step_seconds(config, shape, gpu)
    rows = list(memory.values())
    memory["together"] = (sum(row[0] for row in rows), sum(row[1] for row in rows))
    (episodes, _, _, length), hours = lengths(config), run_hours(config, shape, step)
    index = [hours * passage_count(config) / INDEXED_PASSAGES for hours in INDEX_HOURS]
    times = slower(v.gpu)
    low, high = sum(hours.values()) + index[0], times * sum(hours.values()) + index[1]
    price = "--gpu-hour PRICE converts them to money"
    if gpu_hour is not None:
        low_cost, high_cost = (hours * v.ranks * gpu_hour for hours in (low, high))
        price = f"{low_cost:.0f} to {high_cost:.0f} at {gpu_hour:g} per GPU-hour"
    page = Environment(
        loader=PackageLoader("agent_r1.cluster", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters["gib"] = _in_gib
    page.filters["parts"] = _list_parts
    return page.get_template("plan.txt.j2").render(
        globals()
        | {
            "v": v,
            "r": config.rollout,
            "gpu": gpu,
            "shape": shape,
            "model": config.model.path,
            "memory": memory,
            "conversations": max(0, conversations(config, shape, gpu)),
            "misfits": misfits(config, shape, gpu),
            "host": host_memory_parts(config, shape),
            "disk": disk(config, shape),
            "step": step,
            "hours": hours,
            "low": low,
            "high": high,
            "times": times,
            "index": index,
            "indexes": 0
            if config.search.url
            else index_memory(config) * (v.agent_workers - 1) / GIB,
            "episodes": episodes,
            "length": length,
            "steps": config.trainer.steps,
            "price": price,
            "limit": describe_limit(
                hours["training"] + hours["checkpoints"], times, config.trainer.max_hours
            ),
            "other_card": other_card(config),
        }
    )
