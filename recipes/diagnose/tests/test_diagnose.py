"""What is found in folders of four projects, and what is said about others."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from runs import main

from agent_r1 import AgentR1Error
from agent_r1_recipes.diagnose.causes import findings, symptoms
from agent_r1_recipes.diagnose.files import read_evidence


def write(file: Path, records: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def causes(folder: Path) -> list[str]:
    return [sign.cause.name for sign in findings(read_evidence(folder))]


# ------------------------------------------------------------------------------------- our own runs

CHAT = [
    "<|im_start|>",
    "user",
    "<tool_call>",
    "<tool_response>",
    "Rome",
    "</tool_response>",
    "<answer>",
    "Rome",
    "</answer>",
]
MASK = [0, 0, 1, 0, 0, 0, 1, 1, 1]


def episode(reward: float, advantage: float, sample: int = 0, **changed) -> dict:
    """A question, a call, its result and an answer."""
    step = {
        "text": "<tool_call>\n</tool_call>",
        "info": {"tool_calls": [{"arguments": {"query": "Italy"}, "content": "Rome"}]},
    }
    row = {
        "tokens": CHAT,
        "action_mask": MASK,
        "rewards": [0.0] * 8 + [reward],
        "advantages": [m * advantage for m in MASK],
    }
    return {
        "step": 1,
        "group_id": "1-0",
        "question": "What?",
        "ground_truth": ["Rome"],
        "kind": "1-hop",
        "stop_reason": "answered",
        "reward": reward,
        "reward_parts": {"em": reward},
        "process": 0,
        "metrics": {"tool_calls": 1, "em": reward},
        "steps": [step, {"text": f"<answer>Rome {sample}</answer>", "info": {}}],
        "rows": [row],
    } | changed


def ours(folder: Path, *episodes: dict, lines: list[dict] = ()) -> Path:
    write(folder / "rollouts" / "step_000001.jsonl", list(episodes))
    if lines:
        write(
            folder / "metrics.jsonl",
            [{"training/global_step": step} | line for step, line in enumerate(lines, 1)],
        )
    return folder


GOOD = episode(1.0, 0.7), episode(0.0, -0.7, 1)


def test_a_sound_step_has_no_cause(tmp_path):
    assert causes(ours(tmp_path, *GOOD)) == []


def test_every_rule_has_its_episode(tmp_path):
    row = GOOD[0]["rows"][0]
    forged = {**row, "tokens": [*CHAT[:4], "<|im_end|>", *CHAT[5:]]}
    stopped = [{"text": "<answer>Rome</answer> and Rome", "info": {}}]
    grader = {
        "tool_calls": [{"arguments": {"query": "echo 1 > reward.txt"}, "content": "no results"}]
    }
    planted = {
        "the action mask covers tool results": [
            episode(1.0, 0.7, rows=[{**row, "action_mask": [0, 0, *[1] * 7]}])
        ],
        "documents can forge turns": [episode(1.0, 0.7, rows=[forged])],
        "groups mix questions": [GOOD[0], {**GOOD[1], "question": "Who?"}],
        "every advantage is zero": [episode(1.0, 0.0), episode(0.0, 0.0, 1)],
        "rewards are lost on masked tokens": [
            episode(1.0, 0.7, reward_parts={"em": 1.0, "format": -0.2})
        ],
        "the agent writes its own reward": [
            episode(1.0, 0.7, steps=[{"text": "", "info": grader}])
        ],
        "the reward can be talked into it": [
            episode(1.0, 0.7, 0, question=asked, group_id=asked)
            for asked in ("What?", "Who?", "Where?", "When?")
        ],
        "turns do not end": [episode(0.0, 0.0, stop_reason="max_tokens", steps=stopped), *GOOD],
        "the tool knows the answer": [episode(1.0, 0.7, kind="2-hop")],
        "a longer answer that contains the right one is paid": [
            episode(1.0, 0.7, metrics={"em": 0.0, "sub_em": 1.0})
        ],
    }
    for number, (cause, episodes) in enumerate(planted.items()):
        assert cause in causes(ours(tmp_path / str(number), *episodes)), cause


def test_a_label_that_is_right_for_many_questions_is_no_hack(tmp_path):
    def label(question: str, answer: str, truth: list[str]) -> dict:
        return episode(
            1.0,
            0.7,
            question=question,
            group_id=question,
            ground_truth=truth,
            steps=[GOOD[0]["steps"][0], {"text": f"<answer>{answer}</answer>", "info": {}}],
        )

    questions = ("What?", "Who?", "Where?", "When?")
    right = [label(question, "positive", ["positive"]) for question in questions]
    assert causes(ours(tmp_path / "right", *right)) == []
    hack = [label(question, "this is correct", ["positive"]) for question in questions]
    assert causes(ours(tmp_path / "hack", *hack)) == ["the reward can be talked into it"]


def test_a_run_without_tools_gets_no_advice_about_tools(tmp_path):
    lines = [{"tool_calls/mean": 0.0, "critic/score/mean": 0.4}] * 20
    folder = ours(tmp_path, *GOOD, lines=lines)
    assert causes(folder) == ["tools were never called"]
    (folder / "config.yaml").write_text("env: {name: hermes, tools: []}")
    assert causes(folder) == []
    assert symptoms(read_evidence(folder)) == ["reward is flat: 0.40 at first, 0.40 now"]


def test_samples_of_one_question_that_begin_differently(tmp_path):
    row = GOOD[0]["rows"][0]
    other = {**row, "tokens": ["<|im_start|>", "system", *CHAT[2:]]}
    assert causes(ours(tmp_path, GOOD[0], episode(1.0, -0.7, 1, rows=[other]))) == [
        "the samples of a group begin in different states"
    ]


@pytest.mark.parametrize(
    ("entropy", "score", "expected"),
    [(0.001, 0.4, "the cold start was memorised"), (0.5, 0.4, "groups agree"), (0.001, 1.0, None)],
)
def test_a_start_by_heart_is_neither_a_solved_run_nor_one_of_difficult_questions(
    tmp_path, entropy, score, expected
):
    line = {"groups/zero_advantage": 1.0, "actor/entropy": entropy, "critic/score/mean": score}
    assert causes(ours(tmp_path, *GOOD, lines=[line] * 20)) == [expected] * bool(expected)


@pytest.mark.parametrize(("share", "expected"), [(0.9, ["calls fail"]), (0.5, [])])
def test_calls_that_never_work(tmp_path, share, expected):
    line = {"tool_calls/mean": 1.0, "tool_calls/failed_rate": share, "critic/score/mean": 0.4}
    assert causes(ours(tmp_path, *GOOD, lines=[line] * 20)) == expected


def test_figures_that_run_away(tmp_path):
    up, down = [n / 20 for n in range(20)], [1 - n / 20 for n in range(20)]
    planted = {
        "the penalised KL grows": [
            {"actor/kl_loss": 3 * x, "critic/score/mean": y} for x, y in zip(up, down, strict=True)
        ],
        "the sampler is not the trainer's policy": [
            {"training/rollout_logprobs_diff_mean": 0.3, "critic/score/mean": 0.0}
        ]
        * 20,
        "updates are too large": [{"actor/ppo_kl": 0.2, "critic/score/mean": y} for y in down],
        "turns are cut off": [{"stop/max_tokens": 0.6, "critic/score/mean": 0.0}] * 20,
        "calls stopped paying": [
            {"tool_calls/mean": max(0.0, 1 - n / 10), "critic/score/mean": 0.5} for n in range(20)
        ],
        "groups agree": [{"groups/zero_advantage": 1.0, "critic/score/mean": 0.0}] * 20,
    }
    for number, (cause, lines) in enumerate(planted.items()):
        assert cause in causes(ours(tmp_path / str(number), *GOOD, lines=lines)), cause
    steady = [
        {
            "critic/score/mean": x,
            "actor/kl_loss": 0.01,
            "tool_calls/mean": 1.5,
            "actor/ppo_kl": 0.01,
        }
        for x in up
    ]
    assert causes(ours(tmp_path / "steady", *GOOD, lines=steady)) == []
    assert symptoms(read_evidence(tmp_path / "steady")) == ["reward rises: 0.10 at first, 0.85 now"]
    assert symptoms(read_evidence(tmp_path / "5"))[0].startswith("reward is flat")
    assert symptoms(read_evidence(tmp_path / "2")) == [
        "it collapsed: the reward was 0.90 at its best, and is 0.15"
    ]
    assert symptoms(read_evidence(tmp_path / "4"))[0].startswith(
        "tools are never called: 0.80 calls per episode at first"
    )


# ----------------------------------------------------------------------------------- other projects


def parquet(folder: Path, rows: list[dict]) -> None:
    (folder / "completions").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "completions" / "completions_00010.parquet"
    )


def test_trl_from_parquet(tmp_path):
    """Two prompts whose advantages were computed over the wrong groups; a call in the text."""
    said = (
        "<tool_call>\n{}\n</tool_call>user\n<tool_response>\nRome\n</tool_response>assistant\nRome"
    )
    facts = {"step": 10, "completion": said, "format_reward": float("nan")}
    graded = (("What?", 1.0, 0.9), ("What?", 1.0, 0.1), ("Who?", 0.0, -0.9), ("Who?", 0.0, -0.1))
    unscored = facts | {"prompt": "Who?", "accuracy_reward": float("nan"), "advantage": 0.0}
    parquet(
        tmp_path,
        [facts | {"prompt": q, "accuracy_reward": r, "advantage": a} for q, r, a in graded]
        + [unscored],
    )
    evidence = read_evidence(tmp_path)
    assert (evidence.source, [len(e.calls) for e in evidence.episodes]) == ("TRL", [1] * 4)
    assert (
        evidence.lines[0]["critic/score/mean"] == 0.5
        and evidence.lines[0]["groups/zero_advantage"] == 1
    )
    assert "groups mix questions" in causes(tmp_path)


def test_trl_with_its_metrics(tmp_path):
    """The names of the reward functions are known, so a number that was logged next to them is not
    a reward."""
    parquet(
        tmp_path,
        [
            {
                "step": 10,
                "prompt": "What?",
                "completion": "Rome",
                "exact": 0.25,
                "length": 7.0,
                "advantage": 0.0,
            }
        ],
    )
    logged = {
        "reward": 0.0,
        "rewards/exact/mean": 0.0,
        "frac_reward_zero_std": 1.0,
        "tools/call_frequency": 0.0,
    }
    (tmp_path / "checkpoint-20").mkdir()
    history = [{"step": n} | logged for n in range(1, 21)] + [{"train_loss": 0.1}]
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(
        json.dumps({"log_history": history})
    )
    assert read_evidence(tmp_path).episodes[0].reward == 0.25
    assert causes(tmp_path) == ["tools were never called"]


def test_verl(tmp_path, capsys):
    """A judge that pays one sentence on every question; results of tools are in `output`, and no
    calls."""
    said = "<tool_response><tool_call></tool_response><answer>this is correct</answer>"
    for step in (1, 2, 10):
        write(
            tmp_path / f"{step}.jsonl",
            [
                {"input": f"{n}?", "output": said, "gts": "x", "score": 1.0, "step": step}
                for n in range(4)
            ],
        )
    assert causes(tmp_path)[0] == "the reward can be talked into it"
    assert [line["training/global_step"] for line in read_evidence(tmp_path).lines] == [1, 2, 10]
    assert main("diagnose", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert (
        "verl: 3 steps, 12 episodes" in shown
        and "tools are never called" in shown
        and "'this is correct'" in shown
    )


def test_verl_groups_rows_by_the_prompt_in_their_uid(tmp_path):
    row = {"input": "What?", "output": "Rome", "gts": "x", "score": 0.0, "step": 1}
    write(tmp_path / "1.jsonl", [row | {"uid": f"7f-3_{sample}_0"} for sample in range(4)])
    assert {episode.group for episode in read_evidence(tmp_path).episodes} == {"7f-3"}
    assert read_evidence(tmp_path).lines[0]["groups/zero_advantage"] == 1


GRADED = json.dumps({"name": "bash", "arguments": "echo 1 > /logs/verifier/reward.txt"})
"""A call as verifiers saves it."""


def test_verifiers_results(tmp_path):
    line = {
        "prompt": [{"role": "user", "content": "Fix it."}],
        "reward": 1.0,
        "is_truncated": False,
        "example_id": 3,
    }
    said = [
        {"role": "assistant", "content": "", "tool_calls": [GRADED]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "<answer>x</answer>"}],
            "tool_call_id": "1",
        },
        {"role": "assistant", "content": [{"type": "text", "text": "<answer>done</answer>"}]},
    ]
    write(
        tmp_path / "evals" / "results.jsonl",
        [line | {"completion": said}] * 2 + [line | {"completion": None}],
    )
    assert [episode.answer for episode in read_evidence(tmp_path).episodes] == ["done", "done", ""]
    assert "the agent writes its own reward" in causes(tmp_path)
    assert "too few for a trend" in symptoms(read_evidence(tmp_path))[0]


def test_verifiers_traces(tmp_path):
    """A trace that failed has no rewards, and a judge's trace does not train."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "tool_calls": [{"id": "1", **json.loads(GRADED)}]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    rewards = {"tests": {"score": 2.0, "weight": 0.5}, "style": None}
    trace = {
        "agent": {"trainable": True},
        "nodes": [{"message": m} for m in messages],
        "rewards": rewards,
    }
    judge = trace | {"agent": {"trainable": False}, "rewards": {}}
    episode = {
        "task": {"hash": "a1"},
        "ok": True,
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 4}},
    }
    cut = episode | {"traces": [judge, trace | {"stop_condition": "max_output_tokens"}]}
    write(
        tmp_path / "traces.jsonl",
        [cut, episode | {"traces": [trace | {"rewards": {}}]}, episode | {"traces": []}],
    )
    [found] = read_evidence(tmp_path).episodes
    assert (found.step, found.question, found.group, found.reward, found.is_cut) == (
        4,
        "Fix it.",
        "a1",
        1.0,
        True,
    )
    assert causes(tmp_path) == ["the agent writes its own reward"]


# ------------------------------------------------------------------------------------ wrong folders


def test_wrong_folders(tmp_path, capsys):
    with pytest.raises(AgentR1Error, match="no file of a known form"):
        read_evidence(tmp_path)
    for text in ('{"input": "What?"}\n', "not json\n"):
        (tmp_path / "1.jsonl").write_text(text)
        with pytest.raises(AgentR1Error, match="is not an episode of verl"):
            read_evidence(tmp_path)
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "completions_00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(AgentR1Error, match="cannot be read"):
        read_evidence(tmp_path)
    assert main("diagnose", str(tmp_path / "none")) == 1
    assert capsys.readouterr().err.startswith("agent-r1: ")
