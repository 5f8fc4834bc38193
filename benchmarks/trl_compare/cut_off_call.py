"""Test on both sides what happens to a tool call that is cut off.

    PYTHONPATH=src:benchmarks benchmarks/trl_compare/.venv/bin/python
    benchmarks/trl_compare/cut_off_call.py

A turn is `<think>...</think><tool_call>...</tool_call><|im_end|>`. The limit is set to one token
less than the most frequent length of such a turn, so many turns are cut just before `<|im_end|>`.
Such a call looks complete, but the agent had not ended its turn: it might have added a second call,
or an answer. Out: counts, and an episode of TRL's.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from common import Setting, load_setting, make_parser
from common import run as run_main
from run import TimedTrainer, make_trainer

from agent_r1.core import Sampling, Trajectory
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import prompts_of_step, run_episodes
from agent_r1.rollout.setup import make_loop


def our_episodes(setting: Setting) -> list[Trajectory]:
    """Sample one step's episodes, untrained."""
    c, r = setting.config, setting.config.rollout
    policy = LocalPolicy(
        model_files.load_model(setting.model),
        setting.chat.stop_ids,
        slots=r.max_concurrent_episodes,
        max_context=r.max_context,
    )
    tasks = [
        Task(row, str(p), f"{p}-{g}", derive_seed(c.seed, p, g))
        for p, row in enumerate(prompts_of_step(setting.questions, 1, r.prompts_per_step, c.seed))
        for g in range(r.samples_per_prompt)
    ]
    loop = make_loop(policy, setting.chat, setting.tools, c.rollout, c.env)
    return asyncio.run(run_episodes(loop, tasks, Sampling(r.max_tokens_per_turn, r.temperature)))


def ends_with_call(setting: Setting, ids: list[int]) -> bool:
    """Return whether a turn without `<|im_end|>` ends with `</tool_call>`."""
    return setting.chat.decode(ids).rstrip().endswith("</tool_call>")


def usual_call_length(setting: Setting) -> int:
    """Return the most frequent length, in tokens, of a first turn with a tool call."""
    first_turns = [t.steps[0] for t in our_episodes(setting)]
    return Counter(len(s.action_ids) for s in first_turns if s.info.get("tool_calls")).most_common(
        1
    )[0][0]


def main() -> None:
    arguments = make_parser(__doc__.splitlines()[0]).parse_args()
    setting = load_setting(arguments)
    limit = usual_call_length(setting) - 1
    rollout = setting.config.rollout.model_copy(update={"max_tokens_per_turn": limit})
    setting = replace(setting, config=setting.config.model_copy(update={"rollout": rollout}))
    print(f"limit: {limit} tokens a turn")

    last_steps = [t.steps[-1] for t in our_episodes(setting)]
    cut = [
        s
        for s in last_steps
        if s.finish_reason == "length" and ends_with_call(setting, s.action_ids)
    ]
    executed = sum(bool(s.info.get("tool_calls")) for s in cut)
    print(f"agent-r1: {len(cut)} calls cut off before <|im_end|>, {executed} of them executed")

    cut_then_executed: list[bool] = []
    examples: list[str] = []

    class Watcher(TimedTrainer):
        """Looks at first turns before, and at the conversations after, TRL's tool loop."""

        def _tool_call_loop(self, prompts, prompt_ids, completion_ids, *rest):
            cut = [i for i, ids in enumerate(completion_ids) if ends_with_call(setting, ids)]
            result = super()._tool_call_loop(prompts, prompt_ids, completion_ids, *rest)
            conversations, all_ids = result[1], result[2]
            for i in cut:
                cut_then_executed.append(
                    any(message["role"] == "tool" for message in conversations[i])
                )
                examples.append(setting.chat.decode(all_ids[i]))
            return result

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, Path(folder), trainer_class=Watcher).train()
    cut_off, executed = len(cut_then_executed), sum(cut_then_executed)
    print(f"TRL 1.16: {cut_off} calls cut off before <|im_end|>, {executed} of them executed")
    if examples:
        print(f"an episode of TRL's:\n{examples[0]}")


if __name__ == "__main__":
    run_main(main)
