"""Locate, make and open the task's artefacts: rows, corpus, index, tools.

In: a configuration. Out: a `Workspace`, with the folders of all artefacts. It makes and opens those
of the task, with the packages data, search, tool and env. It only names those of learning. Next:
`app/stages.py` makes them.

An artefact is named after a fingerprint of everything that it depends on. A stage writes it to a
temporary name and renames it at the end.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1.config import (
    Config,
    fingerprint,
    plugins,
    preset_title,
    tables,
    trusted_settings,
    user_code,
)
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Row
from agent_r1.data.names import describe_new_names
from agent_r1.data.source import SPLITS, source_of
from agent_r1.data.storage import Passage, copy_data, read_corpus, read_manifest, read_rows, verify
from agent_r1.env import Dialect, dialect_of, wants_answers
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import home, make_once, write_whole, writing
from agent_r1.ground.machine import available_memory
from agent_r1.ground.ui import say
from agent_r1.reward.scorers import normalize_answer
from agent_r1.tool import BaseTool, make_tools

if TYPE_CHECKING:
    from agent_r1.search.index import PassageIndex
    from agent_r1.search.remote import RemoteIndex


@dataclass(frozen=True)
class Workspace:
    """Locate, make and open the artefacts of a configuration.

    The root is AGENT_R1_HOME or the working directory.

    Each object computes fingerprints and reads user-defined code once; it looks at the disk each
    time.
    """

    config: Config
    root: Path = field(default_factory=home)

    @cached_property
    def data(self) -> Path:
        c = self.config
        theirs = tables.recipe_code({"data": [c.data.name]})
        key = fingerprint(c.data, c.seed, c.env.name, *code(c.data.name, *theirs))
        return self.root / "artifacts" / f"{c.data.data_source}-{key}"

    @cached_property
    def index(self) -> Path:
        s = self.config.search
        if Path(s.index).is_dir():
            return Path(s.index)
        return (
            self.root
            / "artifacts"
            / f"index-{fingerprint(s.encoder, s.dim, s.index, self.data.name)}"
        )

    @cached_property
    def cold_start(self) -> Path:
        # A price, or a judge's address, changes no demonstration: a user who compares rewards pays
        # for one cold start.
        c = self.config.model_copy(update={"env": self.demonstration_env})
        digest = fingerprint(
            c.model,
            c.cold_start,
            c.env,
            c.search,
            c.rollout.max_context,
            c.rollout.max_tokens_per_turn,
            c.seed,
            self.data.name,
            *code(*user_code(c, trains=False)),
            *self._own_flow,
        )
        return self.root / "artifacts" / f"cold-start-{digest}"

    @property
    def demonstration_env(self) -> EnvConfig:
        """Return the settings that demonstrations are played with: without prices.

        The reward stays only where it chooses among plays (cold_start/demonstrate.py): for a
        user-defined demonstrator, unless it asks a server.
        """
        env = self.config.env.without_prices()
        asks_server = "address" in tables.entries("reward").get(env.reward or "", {})
        if asks_server or not self.config.cold_start.demonstrator:
            env = env.model_copy(update={"reward": None})
        return env

    @property
    def _own_flow(self) -> list[str]:
        """List the programs of the section `rollout`: they decide what the model reads."""
        names = trusted_settings(self.config).items()
        return [program for setting, program in names if setting.startswith("rollout.")]

    @cached_property
    def fetch_folder(self) -> Path:
        """Return the folder of a converted package, or of the facts about a hub model.

        See `cold_start/stage.py`.
        """
        path = self.config.model.path
        if scheme := tables.scheme_of(path):
            return (
                self.root
                / "artifacts"
                / f"model-{path.partition(':')[2]}-{fingerprint(*scheme.made_of(path))}"
            )
        return self.root / "artifacts" / f"model-{re.sub('[/@]', '--', path)}"

    @property
    def start_model(self) -> Path:
        """Return the folder of the model that RL starts from."""
        c = self.config
        return (
            self.cold_start if c.model.path is None or c.cold_start.warm_steps else self.base_model
        )

    @property
    def base_model(self) -> Path:
        """Return the folder of `model.path`."""
        path = self.config.model.path
        if tables.scheme_of(path):
            return self.fetch_folder
        if not hub.is_repo_name(path):
            return Path(path)
        manifest = self.fetch_folder / "manifest.json"
        return (
            Path(json.loads(manifest.read_text())["folder"])
            if manifest.exists()
            else self.fetch_folder
        )

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    # ----------------------------------------------------------------------------------- make, open

    def make_data(self, release: Path | None = None, origin: str = "") -> None:
        """Make questions and passages (stage), or copy released ones.

        Args:
            release: The folder that `data/release.py` found.
            origin: Where the release is from, for the line that is printed.
        """
        config, source = self.config, source_of(self.config.data)

        def make(part: Path) -> str:
            if release:
                return source.summary(config.data, copy_data(release, part))
            from agent_r1.data.build import build

            manifest = build(
                config.data, config.seed, part, config.env.name, self.dialect.describes_format
            )
            return source.summary(config.data, manifest)

        title = f"from {origin}" if release else source.title(config.data)
        stage(f"data: {title}", self.data, make)
        verify(self.data)
        by_split = {split: self.load_rows(split) for split in SPLITS}
        rows = [row for split in SPLITS for row in by_split[split]]
        if config.data.data_source == "rows":
            train, test = (
                [row["prompt"][-1]["content"] for row in by_split[split]]
                for split in ("train", "test")
            )
            if line := describe_new_names(train, test):
                say(f"  {line}")
        scored_by_text = wants_answers(config.env.name) and not config.env.reward
        if scored_by_text and has_only_numbers(rows):
            say(
                "  note: all answers are numbers, and exact match compares them as texts without "
                "punctuation: it pays 1.4 for 14. env.reward=math compares numbers"
            )

        articles = sorted(words_that_exact_match_drops(rows)) if scored_by_text else []
        if articles:
            say(
                f"  note: of the answer {articles[0]!r} exact match drops every word, so it is "
                "compared as it is written, and another spelling is wrong; write the text of the "
                "choice, or use your own env.reward"
            )

    def make_index(self) -> None:
        """Build the search index over all passages, and measure its recall (stage)."""
        config = self.config
        if not self.needs_index:
            say(
                "index: not needed here, "
                f"{f'{config.search.url} has one' if config.search.url else 'no tool searches'}"
            )
            return
        corpus = self.data_folder() / "corpus.jsonl"

        def make(part: Path) -> str:
            from agent_r1.search.encoders import make_encoder
            from agent_r1.search.index import PassageIndex, build_index

            encoder = make_encoder(config.search.encoder, config.search.dim)
            build_index(corpus, part, encoder, config.search.index, available_memory() or math.inf)
            return self._quality(PassageIndex.load(part, corpus, encoder))

        if Path(config.search.index).is_dir():
            say(f"index: {self._quality(self.load_index())}, in {config.search.index}")
            return
        stage(f"index: {config.search.encoder} vectors in FAISS", self.index, make)

    def _quality(self, index: PassageIndex) -> str:
        """Describe how many of the passages that the test questions need the index finds."""
        from agent_r1.search.index import recall_at_k, title_recall

        rows, top_k, manifest = self.load_rows("test"), self.config.search.top_k, index.manifest
        recall = (
            f"; of the exact 10 nearest it finds {manifest['recall_at_10']:.3f}"
            if "recall_at_10" in manifest
            else ""
        )
        if "lookups" in rows[0]["extra_info"]:  # the queries of an ideal agent are known
            share = recall_at_k(index, rows, top_k)
            return f"recall@{top_k} of a correct query on the test questions: {share:.3f}{recall}"
        if "supporting" not in rows[0]["extra_info"]:  # user-defined questions name no passages
            return f"{manifest['index']} over {manifest['count']} passages{recall}"
        return (
            f"{manifest['index']} over {manifest['count']} passages{recall}; the question itself "
            f"as a query finds {title_recall(index, rows, top_k):.3f} of the needed titles among "
            f"the first {top_k}"
        )

    def make_task(self) -> None:
        """Run the stages that need no model, unless they are done."""
        if not self.data.exists():
            self.make_data()
        if self.needs_index and not self.index.exists():
            self.make_index()

    def load_tools(self, tell: Callable[[str], object] = say) -> dict[str, BaseTool]:
        """Load the configured tools.

        Args:
            tell: Called with a message when a search service is gone.

        Raises AgentR1Error if there is no index.
        """
        config, env, searcher = self.config, self.config.env, None
        if config.searches:
            from agent_r1.search.searcher import Searcher

            searcher = Searcher(self.remote_index(tell) if config.search.url else self.load_index())
        paid_later = {
            f"env.{facts['address']}"
            for facts in tables.entries("reward").values()
            if "address" in facts
        }
        for setting, place in trusted_settings(config).items():
            if (
                setting not in paid_later
            ):  # of a reward that is asked when an answer is paid (reward/named.py)
                plugins.check_trusted(place, setting)
        search = config.search
        return make_tools(
            env.tools, env=env, searcher=searcher, top_k=search.top_k, min_k=search.min_k
        )

    @property
    def dialect(self) -> Dialect:
        """Return the dialect of the configured environment."""
        return dialect_of(self.config.env)

    @property
    def needs_index(self) -> bool:
        """Return whether the agent searches an index of this process."""
        return self.config.searches and not self.config.search.url

    def load_index(self) -> PassageIndex:
        """Open this configuration's index. Raises AgentR1Error if there is none."""
        from agent_r1.search.encoders import make_encoder
        from agent_r1.search.index import PassageIndex

        corpus, s = self.data_folder() / "corpus.jsonl", self.config.search
        folder = self.require(self.index, "agent-r1 index")
        return PassageIndex.load(folder, corpus, make_encoder(s.encoder, s.dim))

    def remote_index(self, tell: Callable[[str], object] = say) -> RemoteIndex:
        """Connect to the service at search.url.

        Raises AgentR1Error unless it has the index that this configuration would build, as far as
        it describes its index.
        """
        from agent_r1.search.remote import RemoteIndex

        config = self.config
        # Half of an episode's time: a caller that waits in vain should see this cause, not an
        # episode timeout.
        wait_s = config.env.episode_timeout_s / 2
        index = RemoteIndex(config.search.url, config.env.tool_timeout_s, wait_s=wait_s, tell=tell)
        index.check(
            config.search.encoder, read_manifest(self.data_folder())["files"]["corpus.jsonl"]
        )
        return index

    def refuse_untrainable(self) -> None:
        """Raise ConfigError if the data are too few to train on.

        Its source says so in the manifest (`recipes/harbor`): such data can still be played.
        """
        reason = read_manifest(self.data).get("untrainable")
        if reason:
            raise ConfigError(reason, code="too_few_questions")

    def foreign_split(self) -> str:
        """Return the split for a model that was not trained on these data.

        It is `all`, if the source has such a split or the data are one small file, because no
        question has to be kept apart.
        """
        data = self.config.data
        source = source_of(data)
        is_small = data.train + data.val + data.test <= MOST_OF_SMALL and source.is_one_file(data)
        return "all" if "all" in source.splits or is_small else "test"

    def held_out(self, split: str) -> dict[str, Any]:
        """Return the numbers of questions for an eval card: all, and those for training.

        Empty for data whose splits are no parts of one small whole.
        """
        if self.foreign_split() == "test":
            return {}
        manifest = read_manifest(self.data)
        sizes = manifest["splits"]
        count = sum(sizes[name]["questions"] for name in (["all"] if "all" in sizes else SPLITS))
        is_split = split != "all" and "untrainable" not in manifest
        trained = sizes["train"]["questions"] if is_split else 0
        return {"questions": {"all": count, "for_training": trained}}

    def load_rows(self, split: str) -> list[Row]:
        """Load the questions of a split; `all` has every question of a small file.

        Raises AgentR1Error for a question without an answer.
        """
        config = self.config
        if split == "all" and "all" not in source_of(config.data).splits:
            return [row for part in SPLITS for row in self.load_rows(part)]
        rows = read_rows(self.data_folder() / f"{split}.parquet")
        unanswerable = wants_answers(config.env.name) and not config.env.reward
        for row in rows if unanswerable else ():
            if not len(row["reward_model"]["ground_truth"]):
                raise AgentR1Error(
                    f"{config.data.source or config.data.name}: the question "
                    f"{row['prompt'][-1]['content'][:80]!r} has no answer, "
                    f"and env.name={config.env.name} rewards the right one; add an answer, or use "
                    "your own env.reward or env.name",
                    code="question_without_answer",
                )
        refuse_long_context(rows, config.rollout.max_context, split)
        return rows

    def learned_question(self, model: Path) -> int | None:
        """Return the number of a test question that RL has taught the model, or None.

        It was wrong before RL and is right after it, by the eval cards of a run's last checkpoint
        or of a model's folder. Of several such questions, its samples are right most often.
        """
        folder = model
        if not (model / "eval.json").is_file():
            folder = Path(*model.resolve().parts[:-3])  # runs/NAME/checkpoints/step_000220/model
        try:
            before, after = [
                json.loads((folder / name).read_text(encoding="utf-8"))
                for name in ("eval_before.json", "eval.json")
            ]
            is_other = folder != model and Path(after["model"]).resolve() != model.resolve()
            if is_other or after["data"] != self.data.name:
                return None
            if before["rows_hash"] != after["rows_hash"]:  # other questions
                return None
            scores = zip(before["question_scores"], after["question_scores"], strict=True)
            learned = [number for number, (old, new) in enumerate(scores) if old <= 0 < new]
            samples = (after.get("reliability") or {}).get("right") or []
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # not evaluated, or only on some questions
        counts = [samples[number] if number < len(samples) else 0 for number in learned]
        return learned[counts.index(max(counts))] if learned else None

    def load_passages(self) -> Iterator[Passage]:
        """Yield all passages of the corpus. Raises AgentR1Error if the data is not made yet."""
        return read_corpus(self.data_folder() / "corpus.jsonl")

    def data_folder(self) -> Path:
        """Return the folder of this configuration's data.

        Raises AgentR1Error if it is missing or of another version.
        """
        folder = self.require(self.data, "agent-r1 data")
        read_manifest(folder)
        return folder

    @property
    def retriever(self) -> str:
        """Describe the agent's search for the eval card."""
        s = self.config.search
        if not self.config.searches:
            return "none"
        if s.foreign:
            return f"{s.url}, top {s.top_k}"
        return f"{s.encoder} (dim {s.dim}), top {s.top_k}, {self.index.name}"

    def require(self, path: Path, command: str) -> Path:
        """Return `path`.

        Raises AgentR1Error with `command`, which makes it, if it does not exist.
        """
        if not path.exists():
            raise AgentR1Error(
                f"{path} is missing; make it with `{command} --preset {self.config.preset} --seed "
                f"{self.config.seed}` and the same overrides, or run speedrun-nodocker.sh",
                code="missing_stage",
            )
        return path


def run_name(config: Config, name: str | None) -> str:
    """Return the folder name of a run: `name`, or preset, algorithm, engine and seed."""
    if name is None:
        name = f"{preset_title(config.preset)}-{config.algorithm}"
        name += "-verl" if config.engine == "verl" else ""
        name += f"-s{config.seed}" if config.seed else ""
    if name.startswith(".") or "/" in name or "\\" in name:
        raise ConfigError(
            f"--run {name!r}: give a plain folder name, such as my-first-run", code="bad_run_name"
        )
    return name


def code(*names: str) -> list[dict[str, str]]:
    """Return hashes of user-defined code for a fingerprint: changed code makes a new artefact."""
    hashes = plugins.code_hashes(names)
    return [hashes] if hashes else []


def stage(title: str, target: Path, make: Callable[[Path], str]) -> None:
    """Make `target` unless it exists.

    `make` writes into a new folder and returns a summary.
    """
    if target.exists():
        say(f"{title}: already done, in {target}")
        return
    say(f"{title} ...")
    start = time.perf_counter()
    # Two runs may need the same artefact: the second waits here, and then finds it made.
    if (summary := make_once(target, make)) is None:
        say(f"  made by another process, in {target}")
        return
    seconds = time.perf_counter() - start
    with writing(target):
        write_whole(seconds_file(target), f"{seconds:.1f}\n")
    say(f"  {summary}\n  {seconds:.1f} s, in {target}")


def seconds_file(target: Path) -> Path:
    """Return the file next to `target` with its build time in seconds.

    It is not inside, because equal artefacts must have equal content.
    """
    return target.with_name(f".seconds-{target.name}")


def is_somewhere(model: str) -> bool:
    """Return whether a start model is a local folder or can be fetched."""
    return Path(model).is_dir() or hub.is_repo_name(model) or tables.scheme_of(model) is not None


def check_local_model(path: str) -> None:
    """Raise AgentR1Error if a model folder does not exist."""
    if not is_somewhere(path):
        raise AgentR1Error(
            f"there is no model at model.path={path}; set it to a folder in Hugging Face's format, "
            "or to a name on the hub",
            code="missing_model",
        )


MOST_OF_SMALL = 200
"""Questions of a small file. A test split of one is too small to say much: the 95 % interval of 20
questions is up to .4 wide."""
CHARACTERS_A_TOKEN = 4
"""Of English text. A tiny tokenizer needs more tokens, so this refuses only what cannot fit."""
NUMBER = re.compile(r"\s*[-+$€£]?\s*\d[\d,.\s]*(?:/\d+)?\s*%?\s*")


def has_only_numbers(rows: list[Row]) -> bool:
    """Return whether every right answer is a number."""
    answers = [answer for row in rows for answer in row["reward_model"]["ground_truth"]]
    return bool(answers) and all(NUMBER.fullmatch(answer) for answer in answers)


def words_that_exact_match_drops(rows: list[Row]) -> set[str]:
    """Return the right answers of which exact match drops every word, such as A."""
    answers = {answer for row in rows for answer in row["reward_model"]["ground_truth"]}
    return {answer for answer in answers if not normalize_answer(answer)}


def refuse_long_context(rows: list[Row], max_context: int, split: str) -> None:
    """Raise AgentR1Error for a question whose own text leaves no room for the agent."""
    for number, row in enumerate(rows, 1):
        size = len(row["prompt"][-1]["content"])
        if size > CHARACTERS_A_TOKEN * max_context:
            place = row["extra_info"].get("source_line") or f"question {number} of {split}"
            raise AgentR1Error(
                f"{place}: the question and its context have {size} characters, about "
                f"{size // CHARACTERS_A_TOKEN} tokens, and rollout.max_context={max_context}; "
                "shorten the context, or raise rollout.max_context",
                code="context_too_long",
            )
