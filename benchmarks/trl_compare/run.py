"""Time the same GRPO step with TRL's GRPOTrainer as `../step_time.py` does with our loop.

    PYTHONPATH=src:benchmarks benchmarks/trl_compare/.venv/bin/python benchmarks/trl_compare/run.py
    --steps 20

Model, questions, tool, reward and batch are equal. In: the options of `../common.py`. Out: the same
table and JSON line. TRL is used as its documentation shows: a typed search function in `tools=`, a
reward function, a `GRPOConfig`. Nothing in it is patched; `TimedTrainer` only puts clocks around
methods. Two of its defaults are off, bfloat16 and gradient checkpointing, because `laptop` has
neither; for `pocket`, give `trainer.dtype=float32` on a CPU with bf16.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common
import torch
from common import (
    PHASES,
    Result,
    Setting,
    StepRecord,
    Watch,
    greedy_em,
    load_setting,
    make_parser,
    max_memory_gb,
    report,
    run,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema

from agent_r1.env.hermes import answer_of, is_well_formed
from agent_r1.ground.errors import ConfigError
from agent_r1.model import files as model_files
from agent_r1.model.decoder import Decoder
from agent_r1.reward.qa import qa_outcome
from agent_r1.rollout.rollouts import prompts_of_step


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with clocks around its phases. `steps` holds a record for each RL step (one
    generation)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps: list[StepRecord] = []
        self.watch: Watch | None = None
        self.padded_tokens = 0
        """Size of all the padded batches that were trained on, in tokens."""
        self._laps: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float | tuple[int, int]] = {}
        self._step_began, self._cpu_began = time.perf_counter(), time.process_time()
        self.add_callback(_StepClock(self))

    @contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._laps[name] += time.perf_counter() - began

    def _generate_single_turn(self, *args, **kwargs):
        with self._watch("model"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate(self, prompts):
        with self._watch("generate"):
            result = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask = result[:3]
        self._counts = {
            "agent_tokens": sum(map(sum, tool_mask)),
            "all_tokens": sum(map(len, prompt_ids)) + sum(map(len, completion_ids)),
        }
        self._counts["learnt"] = (
            self._counts["all_tokens"],
            self._counts["agent_tokens"],
        )  # no row is left out
        return result

    def _calculate_rewards(self, *args, **kwargs):
        with self._watch("rewards"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._counts["reward"] = rewards.sum(dim=1).mean().item()
        return rewards

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if torch.is_grad_enabled():  # the pass that the loss is made of; it belongs to the update
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._watch("old log-probs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _prepare_inputs(self, batch):
        with self._watch("prepare"):
            inputs = super()._prepare_inputs(batch)
        self.padded_tokens += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return inputs

    def training_step(self, *args, **kwargs):
        with self._watch("training_step"):
            loss = super().training_step(*args, **kwargs)
        self._training_step_ended = time.perf_counter()
        return loss

    def as_decoder(self) -> Decoder:
        """Return the model as it is now, for our evaluator."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return model_files.load_model(Path(folder))

    def optimizer_stepped(self) -> None:
        """Time clipping and optimiser, which follow `training_step`."""
        self._laps["optimizer"] += time.perf_counter() - self._training_step_ended

    def batch_done(self) -> None:
        """Close the record after all optimiser steps on one generation."""
        now, cpu, laps = time.perf_counter(), time.process_time(), self._laps
        seconds = {
            "step": now - self._step_began,
            "rollout": laps["model"],
            "environment": laps["generate"] - laps["model"] + laps["rewards"],
            "old log-probs": laps["old log-probs"],
            "update": laps["training_step"] - laps["prepare"] + laps["optimizer"],
            "cpu": cpu - self._cpu_began,
        }
        seconds["overhead"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES)
        self.steps.append(StepRecord(seconds, **self._counts))
        self._laps, self._step_began, self._cpu_began = defaultdict(float), now, cpu


class _StepClock(TrainerCallback):
    """Tells the trainer where an optimiser step and an RL step end."""

    def __init__(self, trainer: TimedTrainer):
        self.trainer = trainer

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.optimizer_stepped()

    def on_step_end(self, args, state, control, **kwargs):
        # Several optimiser steps (minibatches) make one RL step.
        if state.global_step % (args.steps_per_generation // args.gradient_accumulation_steps) == 0:
            self.trainer.batch_done()
            step = len(self.trainer.steps)
            if self.trainer.watch and self.trainer.watch.reached(step, self.trainer.as_decoder):
                control.should_training_stop = True


def make_trainer(
    setting: Setting,
    output: Path,
    rows_per_pass: int | None = None,
    trainer_class: type[TimedTrainer] = TimedTrainer,
) -> TimedTrainer:
    """Make a GRPOTrainer with the settings of our GRPO.

    `rows_per_pass` splits a minibatch by gradient accumulation.
    """
    c, tokenizer = setting.config, setting.chat.tokenizer
    a, r = c.actor, c.rollout
    minibatch = setting.episodes // a.minibatches
    rows = rows_per_pass or minibatch
    if minibatch % rows:
        raise ConfigError(
            f"--rows-per-pass {rows} does not divide a minibatch of {minibatch} rows; choose a "
            "divisor"
        )
    if a.epochs != 1 or a.entropy_coef or a.kl_coef or a.loss_aggregation != "token-mean":
        raise ConfigError(
            "the comparison is for one epoch, token-mean, no entropy bonus, no KL; drop these "
            "settings"
        )
    # TRL picks the parser of tool calls by the chat template's text. It cannot know ours, which
    # writes Qwen3's format.
    tokenizer.response_schema = qwen3_schema
    rows_asked = [
        row
        for step in range(1, c.trainer.steps + 1)
        for row in prompts_of_step(setting.questions, step, c.rollout.prompts_per_step, c.seed)
    ]
    dataset = [
        {"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]}
        for row in rows_asked
    ]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=outcome_reward(setting),
        tools=[search_function(setting)],
        train_dataset=Dataset.from_list(dataset),
        args=GRPOConfig(
            output_dir=str(output),
            seed=c.seed,
            # the batch: minibatches x (passes x rows) from one generation of prompts x samples
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=minibatch // rows,
            steps_per_generation=setting.episodes // rows,
            num_generations=r.samples_per_prompt,
            max_steps=c.trainer.steps * a.minibatches,
            shuffle_dataset=False,  # they are in the order in which our loop asks them
            # sampling
            temperature=r.temperature,
            top_p=1.0,
            max_completion_length=r.max_context
            - max(len(prompt_ids(setting, row)) for row in rows_asked),
            generation_kwargs={
                "max_new_tokens": r.max_tokens_per_turn
            },  # the line above is for all turns together
            max_tool_calling_iterations=c.env.max_turns - 1,
            # the loss: bnpo is our token-mean, delta our dual clip; over several passes dapo comes
            # closest
            loss_type="bnpo" if rows == minibatch else "dapo",
            epsilon=a.clip_low,
            epsilon_high=a.clip_high,
            delta=a.clip_dual if a.clip_dual > 1 else None,
            beta=0.0,
            scale_rewards="group" if c.advantage.normalize_std else "none",
            # the optimiser: AdamW, linear decay
            learning_rate=a.lr,
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"power": 1.0, "lr_end": a.lr * a.lr_final},
            adam_beta1=0.9,
            adam_beta2=0.999,
            weight_decay=a.weight_decay,
            max_grad_norm=a.grad_clip,
            # float32 on a CPU, activations kept, nothing written or shown
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=a.minibatches,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    check_tokens(setting, trainer)
    return trainer


def search_function(setting: Setting):
    """Wrap our search tool as a typed function, with the same index, text and cache."""
    tool, loop = setting.tools["search"], asyncio.new_event_loop()

    @functools.wraps(common.search)
    def search(query: str):
        return loop.run_until_complete(tool.execute({"query": query})).content

    return search


def outcome_reward(setting: Setting):
    """Return exact match and format penalty of the last turn, from the sampled ids."""
    chat, penalty = setting.chat, setting.config.env.format_penalty
    end = chat.decode([chat.turn_end_id])

    def outcome(completion_ids: list[list[int]], ground_truth: list[list[str]], **_) -> list[float]:
        rewards = []
        for ids, targets in zip(completion_ids, ground_truth, strict=True):
            turn = chat.decode(ids).rpartition("<|im_start|>assistant\n")[2]
            final = turn.removesuffix(end) if turn.endswith(end) else ""  # cut off
            rewards.append(qa_outcome(answer_of(final), is_well_formed(final), targets, penalty)[0])
        return rewards

    return outcome


def prompt_ids(setting: Setting, row: dict) -> list[int]:
    """Return the ids that our side sends for a question."""
    return setting.chat.prompt_ids(
        row["prompt"], [tool.schema() for tool in setting.tools.values()]
    )


def check_tokens(setting: Setting, trainer: GRPOTrainer) -> None:
    """Raise ConfigError unless both sides show the model the same tokens."""
    row = setting.questions[0]
    theirs = trainer._tokenize_prompts([row["prompt"]])[0][0]
    message = {"role": "tool", "name": "search", "content": "Vexlor was founded by Tulo."}
    their_result = trainer._get_tool_suffix_ids([message])
    our_result = setting.chat.continuation_ids([message], closed=True)
    if theirs != prompt_ids(setting, row) or their_result != our_result:
        raise ConfigError(
            "TRL renders other tokens than agent_r1 does; was the chat template of the model "
            "changed?"
        )


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--rows-per-pass", type=int, metavar="N", help="default: a whole minibatch")
    arguments = parser.parse_args()
    setting = load_setting(arguments)
    watch = Watch(setting, arguments.until, arguments.look_every) if arguments.until else None
    em_before = em_after = None
    if setting.test and not watch:
        em_before = greedy_em(setting, model_files.load_model(setting.model), setting.test)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setting, Path(folder), arguments.rows_per_pass)
        trainer.watch = watch
        trainer.train()
    if watch:
        return
    memory = max_memory_gb()
    if setting.test:
        em_after = greedy_em(setting, trainer.as_decoder(), setting.test)
    steps = trainer.steps[arguments.warmup :]
    padding = 1 - sum(s.all_tokens for s in trainer.steps) / trainer.padded_tokens
    notes = {"padding in the update": padding}
    report(
        Result(
            "TRL 1.16",
            arguments.threads,
            arguments.warmup,
            steps,
            memory,
            em_before,
            em_after,
            notes,
        ),
        setting,
    )


if __name__ == "__main__":
    run(main)
