"""The command line: what it refuses, how it says so, and its exit codes.

0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; the last line on standard error has cause and remedy.
"""

from __future__ import annotations

import errno
import itertools
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import AGENT, CHATML, TINY, environment, leftovers, lines, main, prepare, tree

from agent_r1 import workspace
from agent_r1.app import cli
from agent_r1.config import ALGORITHMS, fingerprint, load_config
from agent_r1.data.rows import read_rows, write_rows
from agent_r1.inference import compare
from agent_r1.training.checkpoint import read_checkpoint
from agent_r1.training.run import RunDir, only_trainer, open_run
from agent_r1.workspace import Workspace

SMALL = [*TINY, "cold_start.copy_steps=3", "cold_start.mix_steps=3", "trainer.steps=3", "trainer.save_every=1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A home with a finished run `done` of three steps, and its first half in `half`. Copy it before changing it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("AGENT_R1_HOME", str(folder))
        prepare(folder, *SMALL[len(TINY) :])
        assert main("train", "grpo", *SMALL, "--run=done") == 0
        done, half = folder / "runs" / "done", folder / "runs" / "half"
        shutil.copytree(done, half)
        shutil.rmtree(half / "checkpoints" / "step_000003")  # killed before its last checkpoint
        shutil.copytree(done / "checkpoints" / "step_000002", half / "checkpoints" / "step_000002", dirs_exist_ok=True)
        yield folder


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    """A copy that a test may spoil."""
    shutil.copytree(made, tmp_path / "home")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    return tmp_path


def refused(capsys, code: int, *argv: str) -> str:
    """`agent-r1 ARGV` ends with `code`; its last words."""
    assert main(*argv) == code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


# ------------------------------------------------------------------------------------------- help, and how to ask


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_examples_that_work(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main("new", "my-task") == 0
    capsys.readouterr()
    assert main(name, "--help") == 0
    examples = [shlex.split(line) for line in capsys.readouterr().out.partition("examples:\n")[2].splitlines()]
    assert examples and all(line[:2] == ["agent-r1", name] for line in examples)
    for example in examples:
        arguments = cli.parse(example[1:])
        if name in ("chat", "serve"):  # the settings go on top of the model's own
            model = [f"model.path={arguments.model}"] if arguments.model else []
            load_config(arguments.preset or "laptop", model + arguments.settings)
        elif "settings" in arguments:
            preset = cli._config(arguments).preset
            assert preset in example or {"--run", "--model"} & set(example) or Path(preset).is_file()


def test_the_commands_of_the_design(capsys):
    stages = {"doctor", "data", "index", "cold-start", "train", "eval", "report", "inspect"}
    assert stages | {"export", "serve", "chat"} <= cli.COMMANDS.keys()
    assert main("--help") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in cli.COMMANDS)
    assert main("--version") == 0
    assert capsys.readouterr().out.startswith("agent-r1 ")


def test_the_package_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "agent_r1", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("agent-r1 ")


def test_help_and_refusals_do_not_wait_for_torch():
    code = (
        "import sys; from agent_r1.app.cli import main\n"
        "for argv in (['train', '--preset', 'nope'], ['data', 'x=1'], ['eval', 'x=1'], ['--help']):\n"
        "    try: main(argv)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'faiss', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def planned(monkeypatch):
    """What `train --dry-run` was to plan: (configuration, name of the run)."""
    seen = []
    monkeypatch.setattr("agent_r1.app.plan.print_plan", lambda config, run, price: seen.append((config, run)))
    return seen


def test_settings_in_any_order(planned):
    parts = [["grpo"], ["--preset", "smoke"], ["--seed=3"], ["actor.lr=0.5", "data.train=99"]]
    for order in itertools.permutations(parts):
        assert main("train", *itertools.chain(*order), "--dry-run") == 0
    expected = load_config("smoke", ["actor.lr=0.5", "data.train=99"], algorithm="grpo", seed=3)
    assert planned == [(expected, "smoke-grpo-s3")] * 24


def test_what_is_trained_where_nothing_or_only_a_run_is_named(home, planned):
    assert main("train", "--dry-run") == main("train", "--dry-run", "--run", "done") == 0
    assert planned == [
        (load_config("laptop", algorithm="ppo"), "laptop-ppo"),
        (load_config("smoke", SMALL[1:], algorithm="grpo"), "done"),  # it speaks for itself
    ]


def test_a_dry_run_says_that_the_run_there_has_other_settings(home, capsys):
    for settings, said in (([], False), (["actor.lr=0.01"], True)):
        assert main("train", "grpo", *SMALL, *settings, "--run=done", "--dry-run") == 0
        assert ("was started with other settings (actor.lr: " in capsys.readouterr().out) == said


# ----------------------------------------------------------------------------------------------- what is refused

BAD_USAGE = {  # of settings there is more in test_config.py
    "no command": ([], "COMMAND"),
    "unknown command": (["trian"], "invalid choice: 'trian' (did you mean 'train'?) (choose from "),
    "unknown option": (["data", "--foo"], "agent-r1 data: error: unrecognized arguments: --foo"),
    "option with a typing error": (["train", "--presett", "smoke"], "unrecognized arguments: --presett (did you mean '--preset'?)"),
    "the same before a value": (["chat", "--bakend=vllm"], "(did you mean '--backend'?)"),
    "unknown value": (["eval", "--split", "tset"], "invalid choice: 'tset' (did you mean 'test'?)"),
    "fewer than no questions": (["eval", "--limit=-1"], "invalid count value: '-1'"),
    "option without value": (["data", "--seed"], "expected one argument"),
    "seed that is no number": (["data", "--seed", "one"], "invalid int value: 'one'"),
    "unknown preset of the doctor": (["doctor", "--preset", "laptpo"], "unknown preset 'laptpo' (did you mean 'laptop'?)"),
    "unknown preset": (["data", "--preset", "smok"], "unknown preset 'smok' (did you mean 'smoke'?); choose from"),
    "unknown key": (["data", "data.trian=3"], "unknown configuration key 'data.trian' (did you mean 'data.train'?)"),
    "unknown algorithm": (["train", "grop"], "algorithm='grop' is unknown (did you mean 'grpo'?)"),
    "two algorithms": (["train", "grpo", "ppo"], "algorithm='grpo ppo' is unknown"),
    "unknown engine": (["train", "--engine", "locla"], "engine='locla' is unknown (did you mean 'local'?)"),
    "a run that is a path": (["train", "--run", "a/b"], "give a plain folder name"),
    "a hidden run": (["report", "--run", ".x"], "give a plain folder name"),
    "unknown kind of question": (["data", "data.mix={9-hop: 1}"], "unknown kind of question '9-hop' (did you mean '3-hop'?)"),
    "demonstrations without search": (["cold-start", "env.tools=[]"], "this task has no demonstrator"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "said"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_wrong_usage(empty, capsys, argv, said):
    assert said in refused(capsys, 2, *argv)
    assert tree(empty) == {}


MISSING = {  # in which order the stages are asked for: test_stages.py
    "data": (["index", *TINY], "agent-r1 data --preset smoke --seed 0"),
    "everything to evaluate": (["eval", "--before", *TINY], "agent-r1 data"),
    "run to evaluate": (["eval", *TINY, "--run=nope"], "nope does not exist; run `agent-r1 train` first"),
    "run to report": (["report", "--run=nope"], "name a run with --run (there are: none yet)"),
    "rollouts": (["inspect", "nope.jsonl"], "nope.jsonl does not exist; runs/<name>/rollouts/"),
    "model to start from": (["train", *TINY, "model.path=/nope"], "no model at model.path=/nope"),
}


@pytest.mark.parametrize(("argv", "said"), MISSING.values(), ids=MISSING)
def test_what_is_missing(empty, capsys, argv, said):
    assert said in refused(capsys, 1, *argv)
    assert tree(empty) == {}


def test_a_model_folder_that_is_none(home, capsys):
    for folder in (home, home / "runs"):
        assert "make or download" in refused(capsys, 1, "eval", *SMALL, "--model", str(folder))


def test_evaluating_any_model_stores_nothing(home, capsys):
    before = tree(home)
    model = home / "runs" / "done" / "checkpoints" / "step_000002" / "model"
    assert main("eval", *SMALL, "--model", str(model), "--split", "val") == 0
    assert "8 val questions" in capsys.readouterr().out
    assert tree(home) == before


def test_an_evaluation_of_a_run_honours_every_option_and_leaves_its_card_alone(home, capsys):
    """Each of them was ignored without --model: the test set was evaluated instead, into eval.json."""
    before, out, file = tree(home), home.parent / "cards", home.parent / "mine.parquet"
    run, card = ["eval", "--run=done"], {}
    options = {
        "plain": ["--limit=2"],
        "val": ["--limit=2", "--split=val"],
        "sampled": ["--limit=2", "--temperature=0.7"],
        "told": ["--limit=2", "--prompt=Answer in one word."],
        "file": [f"--dataset={file}"],
        "start": ["--limit=2", "--before"],
    }
    (data,) = (path.parent for path in home.glob("artifacts/*/test.parquet"))
    write_rows(file, read_rows(data / "train.parquet")[:3])
    for name, words in options.items():
        assert main(*run, *words, f"--out={out / name}") == 0
        card[name] = json.loads((out / name / "1.json").read_text())
    assert {name: (c["split"], c["n"], c["temperature"]) for name, c in card.items()} == {
        "plain": ("test", 2, 0.0), "val": ("val", 2, 0.0), "sampled": ("test", 2, 0.7), "told": ("test", 2, 0.0),
        "file": ("mine", 3, 0.0), "start": ("test", 2, 0.0),
    }  # fmt: skip
    assert card["val"]["rows_hash"] != card["plain"]["rows_hash"]
    assert card["told"]["prompt_hash"] != card["plain"]["prompt_hash"] == card["start"]["prompt_hash"]
    assert card["start"]["model_hash"] != card["plain"]["model_hash"]
    assert tree(home) == before and "temperature 0.7, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "position", "value"), [("--backend=vllm", 4, "vllm"), ("--dataset=hotpotqa", 1, "hotpotqa")]
)
def test_an_evaluation_of_a_run_by_another_program_or_of_other_data(home, monkeypatch, words, position, value):
    seen = []
    monkeypatch.setattr("agent_r1.inference.compare.evaluate_models", lambda *said, **_: seen.append(said[position]))
    monkeypatch.setattr("agent_r1.workspace.make_task", lambda config: None)
    monkeypatch.setattr("agent_r1.workspace.load_rows", lambda config, split: [])
    assert main("eval", "--run=done", words) == 0
    (said,) = seen
    assert (said if isinstance(said, str) else said.data.name) == value


def test_the_words_of_an_evaluation_are_those_of_the_rows(home, monkeypatch):
    """A pretrained model that RL starts from has no run of its own; it was asked in other words than the run's cards."""
    leads, open_agent = [], compare.open_agent

    @contextmanager
    def opened(*said, **options):
        with open_agent(*said, **options) as agent:
            agent.lead = [{"role": "system", "content": "Instructions for a stranger."}]
            leads.append(agent)
            yield agent

    monkeypatch.setattr(compare, "open_agent", opened)
    for words, told in ((["--before"], False), (["--before", "--prompt=hi"], True)):
        assert main("eval", "--run=done", "--limit=1", *words) == 0
        assert bool(leads.pop().lead) == told


@pytest.mark.parametrize("command", ["data", "train"])
def test_the_help_names_every_algorithm(command, capsys):
    assert main(command, "--help") == 0
    assert set(ALGORITHMS) <= set(re.findall(r"[\w+-]+", capsys.readouterr().out))


def test_another_number_of_threads_is_said_and_does_not_cost_the_run(home, capsys):
    run, config = (
        RunDir(home / "runs" / "half"),
        load_config("smoke", [*SMALL[1:], "trainer.threads=2"], algorithm="grpo"),
    )
    open_run(run, config, resume=True)
    assert "trainer.threads: 1 there, 2 now. Sums are rounded in another order" in capsys.readouterr().out
    assert read_checkpoint(run.latest_checkpoint(), fingerprint(config))[0] == 2


def test_a_run_that_is_running_is_not_called_unfinished(home, capsys):
    train = ["train", "grpo", *SMALL, "--run=half"]
    assert "add --resume to continue it" in refused(capsys, 1, *train)
    with only_trainer(RunDir(home / "runs" / "half")):
        assert "another process is training" in refused(capsys, 1, *train)


# --------------------------------------------------------------------------------------------- damaged checkpoints


def flip_a_byte(checkpoint):
    data = bytearray((checkpoint / "model" / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (checkpoint / "model" / "model.safetensors").write_bytes(data)


def foreign_folder(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "notes.txt").write_text("not a checkpoint")


@pytest.mark.parametrize("damage", [flip_a_byte, foreign_folder])  # more kinds: test_checkpoint.py
def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(home, capsys, damage):
    checkpoint = home / "runs" / "half" / "checkpoints" / "step_000002"
    damage(checkpoint)
    before = tree(home)
    said = refused(capsys, 1, "train", "grpo", *SMALL, "--run=half", "--resume")
    assert str(checkpoint) in said and "delete" in said
    assert tree(home) == before


def test_deleting_the_damaged_checkpoint_helps_as_it_was_said(home, made, capsys):
    run = home / "runs" / "done"
    flip_a_byte(run / "checkpoints" / "step_000003")
    assert "step_000003 is damaged" in refused(capsys, 1, "eval", "grpo", *SMALL, "--run=done")
    shutil.rmtree(run / "checkpoints" / "step_000003")
    assert main("train", "grpo", *SMALL, "--run=done", "--resume") == 0
    same = Path("runs/done/checkpoints/step_000003/model/model.safetensors")
    assert (home / same).read_bytes() == (made / same).read_bytes()
    assert len(lines(run)) == 3


def test_a_damaged_configuration_of_a_run(home, capsys):
    config = home / "runs" / "half" / "config.yaml"
    config.write_text(config.read_text().replace("actor:", "actress:"))
    said = refused(capsys, 2, "train", "grpo", *SMALL, "--run=half", "--resume")
    assert str(config) in said and "did you mean 'actor'?" in said and "another version" in said


# ------------------------------------------------------------------------------------- nowhere to write, no space


@pytest.mark.parametrize("place", ["file/home", "/proc/nowhere", "file"])
def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, capsys, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / place))
    said = refused(capsys, 1, "data", *SMALL)
    assert str(tmp_path / place) in said and "cannot write" in said and "AGENT_R1_HOME" in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("argv", [["train", "grpo"], ["eval", "--before"]], ids=lambda a: a[0])
def test_a_place_for_runs_that_cannot_be_written(home, capsys, argv):
    shutil.rmtree(home / "runs")
    (home / "runs").write_text("a file")
    assert str(home / "runs") in refused(capsys, 1, *argv, *SMALL)
    assert (home / "runs").read_text() == "a file"


@contextmanager
def limited(kilobytes: int):
    """No file may grow beyond this; the system refuses to write, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


NO_SPACE = {
    "index": (["index", "search.dim=512"], 50),
    "cold start": (["cold-start", "cold_start.mix_steps=4"], 50),
    "later checkpoint, state": (["train", "grpo", "--run=half", "--resume", "trainer.rollouts_every=0"], 200),
    "rollouts": (["train", "grpo", "--run=new", "trainer.save_every=3"], 30),
    "evaluation": (["eval", "--before", "--run=new"], 10),
}


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "kilobytes"), NO_SPACE.values(), ids=NO_SPACE)
def test_no_space(home, capsys, argv, kilobytes):
    """One line, no half thing under a whole one's name, everything that was there still there, and then it goes on."""
    before = {
        name: digest for name, digest in tree(home).items() if not name.endswith(("config.yaml", "metrics.jsonl"))
    }
    command = [argv[0], *SMALL, *argv[1:]]
    with limited(kilobytes):
        said = refused(capsys, 1, *command)
    assert ("File too large" in said or "trainer.pt" in said) and ("free" in said or "make room" in said), said
    assert before.items() <= tree(home).items()
    assert leftovers(home) == []
    for folder in (home / "artifacts").iterdir():
        assert folder.name.startswith(".") or folder.name in {name.split("/")[1] for name in before if "/" in name}
    assert main(*command, *(["--resume"] if argv[0] == "train" else [])) == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left", "/a/file"), 1, "/a/file: No space left; check space and permissions"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)  # fmt: skip
def test_what_nobody_thought_of(empty, monkeypatch, capsys, error, code, said):
    def raises(config):
        raise error

    monkeypatch.setattr(workspace, "make_data", raises)
    assert refused(capsys, code, "data") == f"agent-r1: {said}"


def test_a_bug_of_ours_keeps_its_traceback(empty, monkeypatch):
    monkeypatch.setattr(workspace, "make_data", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["data"])


# ------------------------------------------------------------------------------------------------ eval, report, inspect


def test_the_stages_after_training(home, capsys):
    for argv in (["eval", "--before"], ["eval"], ["report"]):
        assert main(*argv, "grpo", *SMALL, "--run=done") == 0
    run = home / "runs" / "done"
    assert {"eval_before.json", "eval.json", "report.html", "config.yaml", "metrics.jsonl"} <= {
        p.name for p in run.iterdir()
    }
    card = json.loads((run / "eval.json").read_text())
    assert card["model"].endswith("step_000003/model")
    assert card["time_to_agent"]["val"] == 0.9 and card["time_to_agent"]["cold_start_seconds"] > 0
    assert "time_to_agent" not in json.loads((run / "eval_before.json").read_text())
    capsys.readouterr()
    assert main("eval", "grpo", *SMALL, "--run=done") == 0
    assert "already done" in capsys.readouterr().out
    assert "has not finished its 3 steps" in refused(capsys, 1, "eval", "grpo", *SMALL, "--run=half")


def test_inspect_shows_a_trajectory(made, capsys):
    path = next((made / "runs" / "done" / "rollouts").glob("step_*.jsonl"))
    record = json.loads(path.read_text().splitlines()[2])
    assert main("inspect", str(path), "-i", "2") == 0
    assert record["question"].split()[0] in capsys.readouterr().out
    assert main("inspect", str(path), "--index=2", "--table") == 0
    assert capsys.readouterr().out.count("\n") >= len(record["rows"][0]["input_ids"])
    assert "has trajectories 0 to 15; there is no 99" in refused(capsys, 1, "inspect", str(path), "-i", "99")
    assert "there is no -1" in refused(capsys, 1, "inspect", str(path), "-i", "-1")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\x00\xff", b"[1, 2]\n", b'{"question": 1}\n'])
def test_inspect_of_a_foreign_file(tmp_path, capsys, content):
    (tmp_path / "file").write_bytes(content)
    said = refused(capsys, 1, "inspect", str(tmp_path / "file"))
    assert str(tmp_path / "file") in said and (
        "delete that line" in said or "give a file of runs/<name>/rollouts/" in said
    )
    assert "does not exist" in refused(capsys, 1, "inspect", str(tmp_path))


def test_a_reader_that_leaves_early(made):
    """`agent-r1 inspect ... | head -1` is nobody's error."""
    path = next((made / "runs" / "done" / "rollouts").glob("step_*.jsonl"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {AGENT} inspect {path} --table | head -1"],
        env=environment(made), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stderr == "" and done.stdout.count("\n") == 1


# --------------------------------------------------------------------------------------------- models of other kinds


@pytest.fixture
def foreign(home, tmp_path):
    """Folders `olmo2` (another architecture) and `plain` (a template that shows no tools)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    start = Workspace.of(load_config("smoke", SMALL[1:])).cold_start
    for name in ("olmo2", "plain"):
        shutil.copytree(start, tmp_path / name)
    (tmp_path / "plain" / "chat_template.jinja").write_text(CHATML)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("olmo2", **small, intermediate_size=48, vocab_size=400, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "olmo2")
    settings = tmp_path / "olmo2" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "auto_map"}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "olmo2",
            1,
            "is of architecture 'olmo2'; the local loop computes llama, qwen2, qwen3; train it with --engine verl",
        ),
        ("plain", 2, "shows the model no tools"),
    ],
)
def test_what_no_run_can_start_from_is_said_before_anything_is_written(home, foreign, capsys, name, code, said):
    before, model = tree(home), f"model.path={foreign / name}"
    for command in (["cold-start"], ["eval", "--before", "--run=new"], ["train", "--run=new"]):
        assert said in refused(capsys, code, *command, *SMALL, model)
    assert tree(home) == before and not (home / "runs" / "new").exists()
    assert main("train", "grpo", *SMALL, "--run=new") == 0  # the same name, other settings


def test_a_model_that_cannot_speak_the_dialect_is_refused_before_it_is_taught_or_trained(home, foreign, capsys):
    chatml = f"model.path={foreign / 'plain'}"
    for words in ([], [chatml], [chatml, "cold_start.warm_steps=2"]):
        said = refused(capsys, 2, "train", "--run=new", *SMALL, "env.name=harmony", *words)
        assert "env.name=harmony is spoken in control tokens, and this model has no <|start|>" in said
    assert not (home / "runs" / "new").exists()


def test_the_plan_knows_which_engine_trains_what(home, foreign, capsys):
    model = f"model.path={foreign / 'olmo2'}"
    assert "the local loop computes llama, qwen2, qwen3" in refused(capsys, 1, "train", *SMALL, model, "--dry-run")
    assert main("train", "--engine=verl", *SMALL, model, "--dry-run") == 0
    assert re.search(r"model +0\.04 M parameters", capsys.readouterr().out)
    assert main("cold-start", "--engine=verl", *SMALL, model) == 0


def test_a_run_that_failed_before_its_first_step_holds_nobody_to_its_settings(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = ["train", "grpo", *SMALL, "--run=new"]
    assert "not installed" in refused(capsys, 2, *options, "trainer.loggers=[wandb]", "actor.lr=0.1")
    assert main(*options) == 0
    assert "actor.lr: 0.0005 there, 0.1 now" in refused(capsys, 1, *options, "actor.lr=0.1")  # now something has run
