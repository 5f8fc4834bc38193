"""Name the episodes that a step waits for, in verl's replay buffer.

In: the tags of TransferQueue, which verl's buffer reads 20 times a second. Out: verl's batch, and
after ten minutes without a finished episode a note for the dashboard. Nothing ends here, because an
episode may take half an hour; `watchdog.py` ends a run in which nothing moves. In verl#7155 a
sampling waited for ever for one prompt of 512.

verl makes the buffer by its own setting, `trainer.v1.sampler.custom_sampler` (settings.yaml).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

QUIET_S = 600.0
"""Seconds without a finished episode, after which the missing ones are named."""
NAMED = 5
"""Questions that a note names; it counts the others."""
POLL_S = 0.05
"""verl looks every 2 s whether the episodes are done, which is half a step of a small model."""


class NamingReplayBuffer(ReplayBuffer):
    """verl's buffer for synchronous sampling, which names missing episodes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.poll_interval = POLL_S
        self.samples = 1
        """Episodes of a prompt in training; the trainer sets it."""
        self.questions: Mapping[str, int] = {}
        """Number of the question by verl's id of the prompt; the trainer sets it for each step."""
        self.note: Callable[[str], Any] = lambda text: None
        """Shows a sentence on the dashboard; "" takes it away."""
        self.finished = -1
        self.quiet_since = 0.0
        self.has_note = False

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Look for progress before each wait. verl calls this while episodes are missing."""
        self.look(partition_id, time.monotonic())
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def look(self, partition_id: str, now: float) -> None:
        """Write a note if no episode has finished since `QUIET_S`; remove it when one has."""
        episodes = {tuple(key.split("_")[:2]) for key in self.partitions[partition_id]}
        done = self.finished_keys[partition_id] | self.failure_keys[partition_id]
        finished = len(episodes) + len(done)
        if finished != self.finished:
            self.finished = finished
            self.quiet_since = now
            if self.has_note:
                self.note("")
            self.has_note = False
        elif now - self.quiet_since >= QUIET_S and not self.has_note:
            waiting = self.pending_keys[partition_id] | self.running_keys[partition_id]
            per_prompt = self.samples if partition_id == "train" else 1
            self.note(describe_missing(waiting, episodes, self.questions, per_prompt))
            self.has_note = True


def describe_missing(
    waiting: Collection[str],
    episodes: Collection[tuple[str, ...]],
    questions: Mapping[str, int],
    samples: int,
) -> str:
    """Name the questions whose episodes have not come back, and how many of each.

    Args:
        waiting: verl's ids of the prompts that are not done.
        episodes: (prompt, sample) of each episode that is.
        questions: Number of the question by prompt.
        samples: Episodes of a prompt.
    """
    arrived = Counter(episode[0] for episode in episodes)
    missing = {uid: max(0, samples - arrived[uid]) for uid in waiting}
    names = [
        f"question {questions.get(uid, uid)} ({count} of {samples})"
        for uid, count in sorted(missing.items(), key=lambda item: questions.get(item[0], -1))
    ]
    listed = ", ".join(names[:NAMED])
    more = f" and {len(names) - NAMED} more questions" if len(names) > NAMED else ""
    return (
        f"no episode has finished for {QUIET_S / 60:.0f} minutes; {sum(missing.values())} are "
        f"missing: {listed}{more}. Nothing ends yet; verl.stall_timeout_s judges what does not move"
    )
