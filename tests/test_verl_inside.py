"""What this project touches of verl's inside still has its name there, and is still called.

An outdated patch fails silently: a renamed function is simply not replaced. verl's source is read,
not imported, so this takes no seconds. docs/verl.md says when verl is changed, and what runs then.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import ROOT

FOUND = importlib.util.find_spec("verl")
pytestmark = pytest.mark.cluster
SITE = Path(FOUND.submodule_search_locations[0]).parent if FOUND else Path()
BASE = "verl/trainer/ppo/v1/trainer_base.py"
SYNC = "verl/trainer/ppo/v1/trainer_sync.py"
BUFFER = "verl/trainer/ppo/v1/replay_buffer.py"
FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
EXTENSION = "verl/workers/rollout/vllm_rollout/utils.py"
ROLLOUT = "verl/workers/rollout/vllm_rollout/vllm_rollout.py"
LOOP = "verl/experimental/agent_loop/agent_loop.py"


@dataclass(frozen=True)
class Touch:
    """A name of verl's (or transformers') that we replace, override or call."""

    ours: str
    """our file that touches it, and how"""
    names: str
    defined_in: str
    used_in: str
    """a file that must still call or read each name, or the patch has no effect"""


TOUCHED = (
    Touch("no_flash_attn.py: log-probabilities replaced", "logprobs_from_logits_v2",
          "verl/utils/torch_functional.py", "verl/utils/torch_functional.py"),
    Touch("no_flash_attn.py: the critic's loader replaced", "load_valuehead_model",
          "verl/utils/model.py", FSDP),
    Touch("no_flash_attn.py: trl's class left alone", "is_trl_available",
          "verl/models/transformers/monkey_patch.py", "verl/models/transformers/monkey_patch.py"),
    Touch("no_flash_attn.py, launch.py: flash_attn hidden", "flash_attn",
          "verl/utils/attention_utils.py", "verl/utils/attention_utils.py"),
    Touch("cpu.py: scikit-learn left alone", "is_sklearn_available",
          "transformers/utils/import_utils.py", "transformers/generation/candidate_generator.py"),
    Touch("cpu.py: the process group's backend", "initialize_global_process_group_ray",
          "verl/utils/distributed.py", "verl/workers/engine_workers.py"),
    Touch("cpu.py: no pinned memory", "CPUOffloadPolicy", "verl/utils/fsdp_utils.py", FSDP),
    Touch("cpu.py: weights into vLLM", "update_weights_from_ipc",
          EXTENSION, ROLLOUT),
    Touch("trainer.py: steps overridden",
          "on_init_end on_sample_begin on_sample_end on_validate_begin on_step_end prepare_step",
          BASE, BASE),
    Touch("trainer.py: parts of a step overridden",
          "_submit_batch_to_rollout _balance_batch _compute_advantage _update_critic "
          "_compute_metrics _save_checkpoint _get_required_batch_multiple "
          "_init_resource_pool_mgr replay_buffer step",
          BASE, BASE),
    Touch("replay.py: a wait overridden", "_wait_for_next_poll poll_interval partitions "
          "pending_keys running_keys finished_keys failure_keys", BUFFER, BUFFER),
    Touch("settings.yaml: our buffer", "custom_sampler", BASE, BASE),
    Touch("algorithms.py: our learning rate's post box", "num_cycles",
          "verl/workers/config/optimizer.py", FSDP),
    Touch("algorithms.py: our engine", "register", "verl/workers/engine/base.py", FSDP),
    Touch("agent_loop.py: verl's constructor skipped", "AgentLoopBase run", LOOP, LOOP),
)  # fmt: skip


def names_in(source: str) -> tuple[set[str], set[str]]:
    """Return (names that a file defines, imports or assigns; names that it calls or reads)."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module.partition(".")[0]] if getattr(node, "module", None) else []
            imported = {*module, *(alias.name.partition(".")[0] for alias in node.names)}
            defined |= imported
            used |= imported & {"flash_attn"}
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            (defined if isinstance(node.ctx, ast.Store) else used).add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                defined.add(node.value)  # a key of a configuration
                used.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
    return defined, used


def missing(touch: Touch, change=lambda source: source) -> list[str]:
    """List the names that are no longer where we touch them, in verl as `change` makes it."""
    sources = [change((SITE / file).read_text()) for file in (touch.defined_in, touch.used_in)]
    (defined, _), (_, used) = map(names_in, sources)
    return [name for name in touch.names.split() if name not in defined or name not in used]


@pytest.mark.parametrize("touch", TOUCHED, ids=lambda touch: touch.ours)
def test_what_we_touch_is_still_there(touch):
    assert missing(touch) == [], touch.ours


@pytest.mark.parametrize("touch", TOUCHED, ids=lambda touch: touch.ours)
def test_a_renamed_one_is_noticed(touch):
    """verl renames all of them: the test above must fail for each name."""
    pattern = r"\b(" + "|".join(touch.names.split()) + r")\b"
    assert missing(touch, lambda source: re.sub(pattern, r"\1_2", source)) == touch.names.split()


def test_every_override_of_the_trainer_is_listed():
    """A method of ours that verl's trainer has, too, is an override."""
    ours = methods(ROOT / "src/agent_r1/cluster/trainer.py", "AgentR1Trainer")
    verls = methods(SITE / BASE) | methods(SITE / SYNC)
    listed = {name for touch in TOUCHED for name in touch.names.split()}
    assert (ours & verls) - {"__init__"} <= listed


def methods(path: Path, name: str = "") -> set[str]:
    """Return the methods of a file's classes, or of one class."""
    classes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    return {
        item.name
        for node in classes
        if name in ("", node.name)
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }
