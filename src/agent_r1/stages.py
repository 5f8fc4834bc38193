"""The stages of a speedrun. Each makes one thing, says what it does, how long it took and where it left it.

    data -> index -> cold start -> evaluate -> train -> evaluate -> report

A stage that is done is skipped. What a stage makes is named after a fingerprint of everything that it depends on, so a
changed setting makes a new thing beside the old one, and nothing stale is ever used. Each stage writes beside its
target and renames at the end: an interrupted one leaves nothing behind that looks whole.

    artifacts/tinyhop-<fp>/       questions and corpus        shared by all runs (or hotpotqa-<fp>/ and the like)
    artifacts/index-<fp>/         the search index
    artifacts/cold-start-<fp>/    the model that RL starts from (or model-<name>/: which commit of the hub it is)
    runs/<name>/                  one training run            see training/run.py
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agent_r1 import hub
from agent_r1.config import Config, fingerprint
from agent_r1.data.folder import read_manifest
from agent_r1.data.rows import read_corpus, read_rows
from agent_r1.data.tinyhop_build import build, verify
from agent_r1.errors import AgentR1Error
from agent_r1.files import write_whole
from agent_r1.rollout import qwen
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.types import Row, Trajectory
from agent_r1.search import prebuilt
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import PassageIndex, build_index, recall_at_k, title_recall
from agent_r1.search.searcher import Searcher
from agent_r1.tool import BaseTool, make_tools
from agent_r1.training.tiny_model import init_weights, load_tokenizer, shape_of
from agent_r1.ui import progress, say

if TYPE_CHECKING:
    from agent_r1.search.client import RemoteIndex


SAMPLED = 1000
"""Questions of an evaluation that are also asked at temperature 1: enough for +-.03, at a seventh of HotpotQA's cost."""


@dataclass(frozen=True)
class Places:
    """Where things are for a configuration. The root is the working directory, or AGENT_R1_HOME."""

    config: Config
    root: Path

    @classmethod
    def of(cls, config: Config) -> Places:
        return cls(config, Path(os.environ.get("AGENT_R1_HOME", ".")))

    @property
    def data(self) -> Path:
        c = self.config
        return self.root / "artifacts" / f"{c.data.name}-{fingerprint(c.data, c.seed, c.env.name)}"

    @property
    def index(self) -> Path:
        s = self.config.search
        kind = [] if s.index == "auto" else [s.index]
        return self.root / "artifacts" / f"index-{fingerprint(s.encoder, s.dim, self.data.name, *kind)}"

    @property
    def cold_start(self) -> Path:
        c = self.config
        parts = (c.model, c.cold_start, c.env, c.search, c.rollout.max_context, c.rollout.max_tokens_per_turn, c.seed)
        return self.root / "artifacts" / f"cold-start-{fingerprint(*parts, self.data.name)}"

    @property
    def fetched(self) -> Path:
        """What is known of the start model, if it is one of the hub: see `_fetch_model`."""
        return self.root / "artifacts" / f"model-{re.sub('[/@]', '--', self.config.model.path)}"

    @property
    def start_model(self) -> Path:
        """The model that RL starts from."""
        path = self.config.model.path
        if path is None:
            return self.cold_start
        if not hub.is_name(path):
            return Path(path)
        manifest = self.fetched / "manifest.json"
        return Path(json.loads(manifest.read_text())["folder"]) if manifest.exists() else self.fetched

    def run(self, name: str) -> Path:
        return self.root / "runs" / name


def stage(title: str, target: Path, make: Callable[[Path], str]) -> None:
    """Make `target` unless it is there. `make` writes into a folder that does not exist yet and returns a summary."""
    if target.exists():
        say(f"{title}: done before, in {target}")
        return
    say(f"{title} ...")
    start = time.perf_counter()
    part = target.parent / f".part-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two runs may need the same artefact: the second waits here, and then finds it made.
        with (target.parent / f".lock-{target.name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                say(f"  made by another process, in {target}")
                return
            _clear_parts(target)
            try:
                summary = make(part)
                part.rename(target)
            finally:
                _clear_parts(target)
    except OSError as error:
        raise AgentR1Error(
            f"{title}: cannot write {target} ({error.strerror or error}); free space, or set AGENT_R1_HOME to a folder "
            "of yours"
        ) from None
    say(f"  {summary}\n  {time.perf_counter() - start:.1f} s, in {target}")


def _clear_parts(target: Path) -> None:
    """Remove what an interrupted stage left: its folder, and what the room that fills it writes beside that."""
    for part in target.parent.glob(f".*part-{target.name}*"):
        shutil.rmtree(part, ignore_errors=True)


def make_data(config: Config) -> None:
    """Stage: questions and passages."""
    places = Places.of(config)
    if config.data.name != "tinyhop":
        return _make_real_data(config, places)

    def make(part: Path) -> str:
        splits = build(config.data, config.seed, part, config.env.name)["splits"]
        return ", ".join(
            f"{name} {s['questions']} questions in a world of {s['entities']}" for name, s in splits.items()
        )

    stage("data: a world made from nothing", places.data, make)
    verify(places.data)


def _make_real_data(config: Config, places: Places) -> None:
    from agent_r1.data import qa_build

    def make(part: Path) -> str:
        manifest = qa_build.build(config.data, config.seed, part, places.data.parent / "downloads", config.env.name)
        counts = ", ".join(f"{name} {s['questions']}" for name, s in manifest["splits"].items())
        skipped = manifest["skipped"]
        few = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        bad = f"; left out {len(skipped)} corrupt records: {few}" if skipped else ""
        return f"questions: {counts}; corpus: {config.data.corpus}{bad}"

    stage(f"data: {config.data.name} from {config.data.source or 'the hub'}", places.data, make)
    qa_build.verify(places.data)


def make_index(config: Config) -> None:
    """Stage: the search index over all passages, and how much of what the questions need it finds."""
    if not needs_index(config):
        say(f"index: not needed here, {f'{config.search.url} has one' if config.search.url else 'no tool searches'}")
        return
    places = Places.of(config)
    corpus = data_folder(config) / "corpus.jsonl"

    def make(part: Path) -> str:
        from agent_r1.doctor import available_memory

        encoder = make_encoder(config.search.encoder, config.search.dim)
        if ready:
            manifest = prebuilt.fetch(config.search.index.removeprefix(prebuilt.PREFIX), part, encoder, corpus)
            return f"{_quality(config, PassageIndex.load(part, corpus, encoder))}; commit {manifest['hub']['revision']}"
        # Apart from `part`: it stays when the stage is interrupted, and serves an index of another kind as well.
        made_of = fingerprint(config.search.encoder, config.search.dim, places.data.name)
        shards = places.index.parent / f".shards-{made_of}"
        memory = available_memory() or math.inf
        build_index(corpus, part, encoder, config.search.index, shards, memory)
        return _quality(config, PassageIndex.load(part, corpus, encoder))

    ready = config.search.index.startswith(prebuilt.PREFIX)
    title = f"fetch {config.search.index}" if ready else f"{config.search.encoder} vectors in FAISS"
    stage(f"index: {title}", places.index, make)


def _quality(config: Config, index: PassageIndex) -> str:
    """How much of what the test questions need an index finds."""
    rows, top_k, made_of = load_rows(config, "test"), config.search.top_k, index.made_of
    recall = f"; of the exact 10 nearest it finds {made_of['recall_at_10']:.3f}" if "recall_at_10" in made_of else ""
    if config.data.name == "tinyhop":
        return f"recall@{top_k} of a correct query on the test questions: {recall_at_k(index, rows, top_k):.3f}{recall}"
    return (
        f"{made_of['index']} over {made_of['count']} passages{recall}; the question itself as a query brings "
        f"{title_recall(index, rows, top_k):.3f} of the titles that an answer takes into the first {top_k}"
    )


def make_cold_start(config: Config) -> None:
    """Stage: tokenizer, tiny model, and behaviour cloning of an imperfect demonstrator."""
    if config.model.path:
        _fetch_model(config)
        return check_start_model(config)
    stage("cold start: teach a new model the format, to copy, and to play badly", Places.of(config).cold_start,
          lambda part: _cold_start(config, part))  # fmt: skip


def _fetch_model(config: Config) -> None:
    """A model of one's own needs nothing. One of the hub is fetched once, and its commit is kept: whatever is published
    under that name later, all stages and runs here start from the same weights."""
    places, name = Places.of(config), config.model.path
    if not hub.is_name(name):
        _local_model(name)
        say(f"cold start: not needed, the run starts from {name}")
        return
    if places.fetched.exists() and hub.damage(
        places.start_model
    ):  # somebody has emptied the hub's cache, or a part of it
        known = json.loads((places.fetched / "manifest.json").read_text())
        name = f"{name.partition('@')[0]}@{known['revision']}"
        shutil.rmtree(places.fetched)

    def make(part: Path) -> str:
        folder = hub.fetch_model(name)
        part.mkdir()
        manifest = {"model": config.model.path, "revision": folder.name, "folder": str(folder.resolve())}
        write_whole(part / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        return f"commit {folder.name}, in {folder}"

    stage(f"start model: fetch {name} from the hub", places.fetched, make)


def _cold_start(config: Config, out: Path) -> str:
    from agent_r1.training.cold_start import clone, demonstrations, renamed_demonstrations
    from agent_r1.training.run import write_model

    set_threads(config)
    c, tools = config.cold_start, load_tools(config)
    say("  a demonstrator plays its questions ...")  # some seconds to half a minute, before the bar below
    if config.data.name == "tinyhop":
        chat, copy_rows, mix_rows = demonstrations(config, load_rows(config, "cold"), tools)
    else:
        passages = [passage.text for passage in read_corpus(Places.of(config).data / "corpus.jsonl")]
        chat, copy_rows, mix_rows = renamed_demonstrations(config, load_rows(config, "train"), passages, tools)
    model = qwen.Qwen(shape_of(config.model, len(chat.tokenizer)))
    init_weights(model, config.seed)
    losses: list[float] = []
    with progress("cloning", c.copy_steps + c.mix_steps) as advance:
        for phase, phase_rows, steps, tokens in (
            ("copy", copy_rows, c.copy_steps, c.copy_tokens), ("mix", mix_rows, c.mix_steps, c.mix_tokens)
        ):  # fmt: skip

            def on_step(step: int, loss: float, phase: str = phase) -> None:
                losses.append(loss)
                advance(f"{phase} loss {loss:.3f}")

            clone(model, phase_rows, steps, tokens, c.lr, config.seed, on_step)
    write_model(model, chat, out)
    return (
        f"{model.parameter_count / 1e6:.2f} M parameters, {len(chat.tokenizer)} tokens, {len(copy_rows)} + {len(mix_rows)} "
        f"demonstrations, loss {losses[0]:.2f} -> {sum(losses[-20:]) / 20:.2f}"
    )


def start_model(config: Config) -> Path:
    """The folder of the model that RL starts from. Raises AgentR1Error when it is not there."""
    path, places = config.model.path, Places.of(config)
    if path and not hub.is_name(path):
        _local_model(path)
    data_folder(config)  # the first that is missing is the one to name
    if needs_index(config):
        _needed(places.index, "agent-r1 index", config)
    _needed(places.start_model, "agent-r1 cold-start", config)
    check_start_model(config)
    return places.start_model


def check_start_model(config: Config) -> None:
    """What no run can start from, said before anything is computed or written. Raises AgentR1Error."""
    model = Places.of(config).start_model
    if trouble := hub.damage(model):
        raise AgentR1Error(f"this model cannot be trained: {trouble}")
    if config.engine == "local":
        qwen.read_shape(model)
    chat = ChatFormat(load_tokenizer(model))
    if config.env.tools:
        chat.check_tools()


def _local_model(path: str) -> None:
    if not Path(path).is_dir():
        raise AgentR1Error(
            f"there is no model at model.path={path}; set it to a folder in Hugging Face's format, or to a name on the hub"
        )


def load_tools(config: Config, tell: Callable[[str], None] = say) -> dict[str, BaseTool]:
    """The configured tools, `search` over this configuration's index, here or in a service. Raises AgentR1Error when there
    is none. `tell` hears of a service that is gone."""
    searcher = None
    if "search" in config.env.tools:
        searcher = Searcher(remote_index(config, tell) if config.search.url else load_index(config))
    return make_tools(config.env.tools, searcher=searcher, top_k=config.search.top_k)


def needs_index(config: Config) -> bool:
    """Whether the agent searches an index of this process."""
    return "search" in config.env.tools and not config.search.url


def load_index(config: Config) -> PassageIndex:
    """This configuration's index. Raises AgentR1Error when there is none."""
    corpus = data_folder(config) / "corpus.jsonl"
    return PassageIndex.load(_needed(Places.of(config).index, "agent-r1 index", config), corpus)


def remote_index(config: Config, tell: Callable[[str], None] = say) -> RemoteIndex:
    """The service at search.url. Raises AgentR1Error unless it has the index that this configuration would build."""
    from agent_r1.search.client import RemoteIndex

    # Half of an episode's time: whoever waits in vain should hear why, and not that the episode took too long.
    wait_s = config.env.episode_timeout_s / 2
    index = RemoteIndex(config.search.url, config.env.tool_timeout_s, wait_s=wait_s, tell=tell)
    index.check(config.search.encoder, read_manifest(data_folder(config))["files"]["corpus.jsonl"])
    return index


def load_rows(config: Config, split: str) -> list[Row]:
    """The questions of a split."""
    return read_rows(data_folder(config) / f"{split}.parquet")


def data_folder(config: Config) -> Path:
    """This configuration's data. Raises AgentR1Error where it is missing or of another version."""
    folder = _needed(Places.of(config).data, "agent-r1 data", config)
    read_manifest(folder)
    return folder


def run_train(config: Config, name: str, resume: bool, plain: bool) -> None:
    """Stage: RL."""
    from agent_r1.training.run import RunDir, open_run, run_training

    places = Places.of(config)
    run = RunDir(places.run(name))
    if run.config.exists():
        open_run(run, config, resume)
        if run.finished(config):
            say(f"train: done before, in {run.latest_checkpoint()}")
            return
    set_threads(config)
    model = start_model(config)
    say(f"train: {config.algorithm}, {config.trainer.steps} steps, {run.path} ...")
    start = time.perf_counter()
    if config.engine == "verl":
        from agent_r1.verl_engine import launch

        checkpoint = launch.train(run, config, model, resume, plain)
        say(f"  {time.perf_counter() - start:.1f} s, in {checkpoint}")
        return
    checkpoint = run_training(
        run,
        config,
        model,
        load_tools(config),
        load_rows(config, "train"),
        load_rows(config, "val"),
        resume,
        plain,
    )
    say(f"  {time.perf_counter() - start:.1f} s, in {checkpoint}")


def run_eval(config: Config, model: Path, out: Path, title: str, split: str = "test") -> dict:
    """Stage: greedy and sampled evaluation of a model folder; the card goes to `out` and is returned."""
    from agent_r1.inference.agent import open_agent
    from agent_r1.inference.evaluate import eval_card, evaluate, score_line, scores
    from agent_r1.inference.provenance import provenance
    from agent_r1.inference.serve import gpus_for
    from agent_r1.rollout.episode import make_loop
    from agent_r1.training.run import evaluation_records, write_rollouts

    if out.exists():
        say(f"{title}: done before, in {out}")
        return json.loads(out.read_text())
    rows, tools, backend = load_rows(config, split), load_tools(config), _backend(config)
    few, gpus = rows[:SAMPLED], gpus_for(config) if backend == "vllm" else 0
    say(f"{title}: {len(rows)} {split} questions greedily, {len(few)} sampled ...")
    with (
        open_agent(model, config, backend, tools=tools, gpus=gpus) as agent,
        progress("evaluating", len(rows) + len(few)) as advance,
    ):
        loop, start = make_loop(agent.policy, agent.chat, agent.tools, agent.config), time.perf_counter()

        def run(rows: list[Row], temperature: float) -> list[Trajectory]:
            return evaluate(
                loop, rows, temperature=temperature, seed=config.seed, on_done=lambda t: advance(),
                at_once=agent.at_once,
            )  # fmt: skip

        greedy, sampled = run(rows, 0.0), run(few, 1.0)
    card = eval_card(
        greedy, model=str(model), split=split, seed=config.seed, retriever=retriever_of(config), started=start
    )
    keys = ("score", "score_name", "em", "em_ci95")
    card["sampled"] = {"temperature": 1.0, "n": len(sampled)} | {
        key: value for key, value in scores(sampled).items() if key in keys
    }
    card |= provenance(config, model)
    (out.parent / "rollouts").mkdir(parents=True, exist_ok=True)
    write_rollouts(out.parent / "rollouts" / f"{out.stem}.jsonl", evaluation_records(greedy[:60], agent.chat))
    write_whole(out, json.dumps(card, indent=2) + "\n")
    say(
        f"  {score_line(card)}; sampled {card['sampled']['score']:.3f}, {card['mean_tool_calls']:.2f} calls a question\n"
        f"  {card['wall_seconds']:.1f} s, in {out}"
    )
    return card


def _backend(config: Config) -> str:
    """Thousands of questions to a model of billions take vLLM minutes, and the reference sampler hours."""
    from agent_r1.training.loop import resolve_device

    return "vllm" if config.engine == "verl" and resolve_device(config)[0] == "cuda" else "transformers"


def retriever_of(config: Config) -> str:
    """What the agent searches with, for the eval card."""
    s = config.search
    if "search" not in config.env.tools:
        return "none"
    return f"{s.encoder} (dim {s.dim}), top {s.top_k}, {Places.of(config).index.name}"


def run_report(name: str, root: Path) -> None:
    """Stage: one HTML page about a run."""
    from agent_r1.inspect.report import write_report

    start = time.perf_counter()
    path = write_report(root / "runs" / name)
    say(f"report: {path} ({time.perf_counter() - start:.1f} s); open it in a browser")


def set_threads(config: Config) -> None:
    """Give PyTorch the configured number of threads."""
    torch.set_num_threads(config.trainer.threads or len(os.sched_getaffinity(0)))


def _needed(path: Path, command: str, config: Config) -> Path:
    if not path.exists():
        raise AgentR1Error(
            f"{path} is missing; make it with `{command} --preset {config.preset} --seed {config.seed}` and the same "
            "overrides, or run speedrun-nodocker.sh"
        )
    return path
