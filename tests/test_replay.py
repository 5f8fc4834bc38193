"""The buffer that names missing episodes: verl's own, over a stand-in for its queue."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not installed: see requirements/verl-cpu.txt")

from verl.trainer.ppo.v1 import replay_buffer  # noqa: E402

from agent_r1.cluster import replay  # noqa: E402

pytestmark = pytest.mark.cluster


@pytest.fixture
def waiting(monkeypatch):
    """verl's `sample` for two prompts of three episodes, over a queue that the test fills.

    The clock moves five minutes in each poll. `polls` are called one a poll.
    """
    tags = {
        "train": {
            uid: {"is_prompt": True, "status": "running", "global_steps": 7} for uid in ("a", "b")
        }
    }
    notes: list[str] = []
    clock = iter(range(0, 100_000, 300))
    polls: list = []
    monkeypatch.setattr(replay_buffer.tq, "kv_list", lambda: tags)
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **keys: None)
    monkeypatch.setattr(replay.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(replay_buffer.time, "sleep", lambda seconds: polls.pop(0)())

    def sample():
        buffer = replay.NamingReplayBuffer(
            trainer_mode="sync",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
        )
        buffer.samples, buffer.note = 3, notes.append
        buffer.questions = {"a": 41, "b": 42}
        return buffer.sample(7, "train", 2)[0]

    sample.tags, sample.notes, sample.polls = tags["train"], notes, polls
    return sample


def done(tags: dict, uid: str, samples: int) -> None:
    for sample in range(samples):
        tags[f"{uid}_{sample}_0"] = {"status": "success", "seq_len": 5}


def test_missing_episodes_are_named_after_ten_quiet_minutes(waiting):
    done(waiting.tags, "a", 3)
    waiting.tags["a"]["status"] = "finished"
    done(waiting.tags, "b", 1)

    def nothing():
        pass

    def second_episode():
        assert "2 are missing: question 42 (2 of 3)" in waiting.notes[0]
        done(waiting.tags, "b", 2)

    def rest():
        assert waiting.notes[1:] == [""], "an episode has finished, so the note is gone"
        done(waiting.tags, "b", 3)
        waiting.tags["b"]["status"] = "finished"

    # 0, 5 and 10 minutes without an episode; then one finishes.
    waiting.polls += [nothing, nothing, second_episode, rest]
    batch = waiting()
    assert len(batch.keys) == 6 and len(waiting.notes) == 2


def test_a_slow_step_that_moves_is_not_noted(waiting):
    def one_more():
        done(waiting.tags, "a", len([key for key in waiting.tags if key.startswith("a_")]) + 1)

    def end():
        done(waiting.tags, "b", 3)
        waiting.tags["a"]["status"] = waiting.tags["b"]["status"] = "finished"

    def nothing():
        pass

    # After ten minutes two episodes are there, and the third one takes five more.
    waiting.polls += [one_more, one_more, nothing, one_more, end]
    waiting()
    assert waiting.notes == []


def test_a_note_names_the_first_questions_and_counts_the_others():
    uids = [f"u{number}" for number in range(8)]
    questions = {uid: number for number, uid in enumerate(uids)}
    note = replay.describe_missing(uids, [("u0", "0")], questions, 2)
    assert "15 are missing: question 0 (1 of 2), question 1 (2 of 2)" in note
    assert "question 4 (2 of 2) and 3 more questions" in note
