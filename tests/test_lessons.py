"""The numbers of the lessons, read from the pages and computed by the project's own functions."""

from __future__ import annotations

import doctest
import fnmatch
import json
import math
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest
import torch
from batches import inputs_of
from lab.experiments import bands, corridor, ratios
from lab.pictures.book import PICTURES
from lab.pictures.museum import museum
from runs import ROOT, metric_patterns

from agent_r1.config.settings import AdvantageConfig, EnvConfig
from agent_r1.env.hermes import HermesToolEnv, parse_call
from agent_r1.reward.qa import qa_outcome
from agent_r1.rollout.training_rows import Batch, TrainingRow, collate
from agent_r1.tool.base import ToolErrorKind, ToolResult
from agent_r1.training.advantages import grpo, ppo, standardize
from agent_r1.training.losses import aggregate_loss, kl_penalty, policy_loss, value_loss
from agent_r1.training.parts import get_estimator, get_ratios
from agent_r1.watch.sentinel import signs
from agent_r1_recipes.credit.settings import CreditActor, CreditAdvantage
from agent_r1_recipes.robustness.off_policy import nucleus, truncated_weights

LESSONS = ROOT / "docs" / "lessons"
PAGES = sorted(LESSONS.glob("[0-9]*.md"))
CLIPS = (0.2, 0.28, 3.0)


@dataclass
class Table:
    """A table of a page: its rows as dictionaries, a cell that reads like a number as one."""

    rows: list[dict]

    def column(self, name: str) -> list:
        return [row[name] for row in self.rows]


def number(cell: str):
    try:
        return float(cell)
    except ValueError:
        return cell


def table(page: str, *header: str) -> Table:
    """The table of a page whose first columns are called so. There must be exactly one."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", (LESSONS / page).read_text(), re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|\n ").split(" | ")]
            for line in block.splitlines()
        ]
        names = [name.strip("| ") for name in rows[0]]
        if tuple(names[: len(header)]) == header:
            found.append(
                Table([dict(zip(names, map(number, row), strict=True)) for row in rows[2:]])
            )
    assert len(found) == 1, f"{page}: {len(found)} tables begin with {header}"
    return found[0]


def near(values, tolerance=5e-5):
    return pytest.approx([float(v) for v in values], abs=tolerance)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_shows_of_the_code_is_what_the_code_says(path):
    """Blocks called pycon are one Python session a page."""
    text = "\n".join(
        re.findall(r"^```pycon\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    )
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


# ----------------------------------------------------------------------------------------- lesson 0


def test_the_policy_gradient_of_two_actions():
    page = "00-reinforcement-learning.md"
    first, second = (
        table(page, "action", "probability", "reward"),
        table(page, "action", "probability", "advantage"),
    )
    p, rewards = torch.tensor(first.column("probability")), torch.tensor(first.column("reward"))
    theta = torch.tensor(math.log(0.3 / 0.7), requires_grad=True)
    gradients = []
    for sign in (1, -1):
        (gradient,) = torch.autograd.grad(torch.nn.functional.logsigmoid(sign * theta), theta)
        gradients.append(gradient.item())
    assert first.column("gradient of log-probability") == near(gradients)
    assert first.column("reward x gradient") == near(rewards * torch.tensor(gradients))
    value = (p * rewards).sum()
    assert second.column("advantage") == near(rewards - value)
    assert second.column("advantage x gradient") == near(
        (rewards - value) * torch.tensor(gradients)
    )

    def spread(samples):
        return (p * samples**2).sum().item() - (p * samples).sum().item() ** 2

    plain, based = rewards * torch.tensor(gradients), (rewards - value) * torch.tensor(gradients)
    assert [(p * plain).sum().item(), (p * based).sum().item()] == near([0.21, 0.21])
    text = (LESSONS / page).read_text()
    assert f"from {spread(plain):.4f} to {spread(based):.4f}" in text
    assert f"- 0.0441 = {spread((rewards + 10) * torch.tensor(gradients)):.2f}$" in text
    moved = torch.sigmoid(theta.detach() + 0.21)
    ratios = table(page, "action", "old probability")
    assert ratios.column("new probability") == near([moved, 1 - moved])
    assert ratios.column("ratio") == near([moved / 0.3, (1 - moved) / 0.7])


# ----------------------------------------------------------------------------------------- lesson 5


def test_the_exact_advantages_of_an_episode_add_up_to_its_surprise():
    """Tools are deterministic, so V after a turn is Q of the turn."""
    record = json.loads((LESSONS / "exact_turns.json").read_text())
    assert record["share"] > 0.99
    rewards = torch.tensor(record["rewards"])
    grpo_of = dict(zip(record["rewards"], standardize(rewards, True).tolist(), strict=True))
    text = (LESSONS / "05-advantages.md").read_text()
    for episode in record["episodes"]:
        first = episode["turns"][0]["V"]
        assert f"The chance of success was {first:.3f}" in text
        assert sum(turn["A"] for turn in episode["turns"]) == pytest.approx(
            episode["reward"] - first
        )
        for turn, after in zip(episode["turns"], episode["turns"][1:], strict=False):
            assert turn["A"] == pytest.approx(turn["Q"] - turn["V"])
            assert turn["Q"] == pytest.approx(after["V"])
        assert episode["grpo"] == pytest.approx(grpo_of[episode["reward"]])
    assert f"+{record['episodes'][0]['turns'][1]['A']:.3f}" in text


# ---------------------------------------------------------------------------------------- lesson 12


def test_groups_that_agree():
    rows = table("12-the-start.md", "p", "groups that agree")
    agree = [float(p) ** 8 + (1 - float(p)) ** 8 for p in rows.column("p")]
    assert rows.column("groups that agree") == near(agree)
    text = (LESSONS / "12-the-start.md").read_text()
    assert "one group in thirteen" in text and round(1 / (1 - agree[1])) == 13
    assert "one in 125" in text and round(1 / (1 - agree[0]), -0) == 125
    rare = 0.98**8 + 0.02**8
    assert f"{rare:.4f}" in text and f"{32 * (1 - rare):.1f}$ groups" in text


# ----------------------------------------------------------------------------------------- lesson 4


def test_rewards_of_answers():
    for row in table("04-rewards.md", "answer", "right one").rows:
        answer = None if row["answer"] == "(none)" else row["answer"]
        reward, _, metrics = qa_outcome(
            answer, row["well formed"] == "yes", [row["right one"]], EnvConfig().format_penalty
        )
        assert [row[name] for name in ("reward", "em", "sub_em", "f1")] == near(
            [reward, *metrics.values()]
        )
    two = qa_outcome("Landir Bumvel", True, ["Landir"], 0)[2]["f1"]
    assert f"F1 {two:.3f}" in (LESSONS / "04-rewards.md").read_text()


def test_rewards_of_calls():
    env = HermesToolEnv({}, EnvConfig(call_reward=0.1))
    for row in table("04-rewards.md", "turn", "call").rows:
        if row["call"] == "not JSON":
            call, result = (
                parse_call("search", True),
                ToolResult("", ok=False, error=ToolErrorKind.MALFORMED_CALL),
            )
        else:
            query = row["call"].split('"')[1]
            call, result = (
                parse_call(f'{{"name": "search", "arguments": {{"query": "{query}"}}}}', True),
                ToolResult(""),
            )
        assert row["paid"] == env.process_reward(call, result)


# ----------------------------------------------------------------------------------------- lesson 5

GAE = AdvantageConfig(gamma=1.0, lam=0.5, normalize_std=False)


def one_episode(mask: list[int], values: list[float], reward: float) -> Batch:
    rewards = torch.zeros(1, len(mask))
    rewards[0, -1] = reward
    batch = Batch(
        mask_BT=torch.tensor([mask]),
        rewards_BT=rewards,
        groups=["q"],
        trajectory_B=torch.tensor([0]),
    )
    batch.values_BT = torch.tensor([values])
    return batch


def test_gae_on_six_tokens():
    by_hand = table("05-advantages.md", "t", "turn")
    V, r = by_hand.column("V"), by_hand.column("r")
    mask, values = [1, 1, 1, 0, 0, 0, 0, 1, 1, 1], [*V[:3], 9.0, -9.0, 9.0, 9.0, *V[3:]]
    assert r == [0, 0, 0, 0, 0, 1]
    batch = one_episode(mask, values, 1.0)
    advantages, returns = (x[0][torch.tensor(mask).bool()].tolist() for x in ppo(batch, GAE))
    assert by_hand.column("A") == near(advantages) and by_hand.column("R") == near(returns)
    assert by_hand.column("delta") == near(
        [now + after - v for now, v, after in zip(r, V, [*V[1:], 0.0], strict=True)]
    )

    wrong = table("05-advantages.md", "t", "A, action tokens only")
    counted, _ = ppo(one_episode([1] * 10, [*V[:3], 0.0, 0.0, 0.0, 0.0, *V[3:]], 1.0), GAE)
    assert wrong.column("A, action tokens only") == near(advantages[:3])
    assert wrong.column("A, tool tokens counted") == near(counted[0, :3])

    plain = AdvantageConfig(normalize_std=False)
    right, _ = ppo(batch, plain)
    said = re.search(r"here ([\d., ]+)\. Smaller", (LESSONS / "05-advantages.md").read_text())[1]
    assert [float(x) for x in said.split(", ")] == near(right[0][torch.tensor(mask).bool()])
    failed, _ = ppo(one_episode(mask, values, 0.0), plain)
    said = re.search(
        r"0 - V_t\$: ([-\d., ]+)\. The last", (LESSONS / "05-advantages.md").read_text()
    )[1]
    assert [float(x) for x in said.split(", ")] == near(failed[0][torch.tensor(mask).bool()])


def group(scores: list[float], **settings) -> list[float]:
    n = len(scores)
    batch = Batch(
        mask_BT=torch.ones(n, 1),
        rewards_BT=torch.tensor(scores)[:, None],
        groups=["q"] * n,
        trajectory_B=torch.arange(n),
    )
    return grpo(batch, AdvantageConfig(**settings))[0][:, 0].tolist()


def test_grpo_on_four_rollouts():
    four = table("05-advantages.md", "rollout", "score", "score - mean")
    scores = four.column("score")
    assert scores == [1, 1, 0, -0.2]
    assert four.column("A") == near(group(scores)) and four.column("score - mean") == near(
        group(scores, normalize_std=False)
    )
    text = (LESSONS / "05-advantages.md").read_text()
    assert (
        f"mean {torch.tensor(scores).mean():.2f}" in text
        and f"{torch.tensor(scores).std():.4f}" in text
    )
    assert set(group([1.0] * 4)) == {0.0}
    assert f"{group([1.0, 0.0])[0]:.4f} and {group([1.0, 0.0])[1]:.4f}" in text


def test_grpo_where_one_of_eight_differs():
    found = re.search(
        r"\| each right one \| 1 \| (\S+) \| (\S+) \|\n\| the wrong one \| 0 \| (\S+) \| (\S+) \|",
        (LESSONS / "05-advantages.md").read_text(),
    )
    scores = [1.0] * 7 + [0.0]
    plain, divided = group(scores, normalize_std=False), group(scores)
    assert [float(x) for x in found.groups()] == near([plain[0], divided[0], plain[7], divided[7]])
    squares, sums = [], []
    for scores in ([1.0] * 7 + [0.0], [1.0] * 4 + [0.0] * 4):
        assert sum(a * a for a in group(scores)) == pytest.approx(7, abs=1e-3)
        squares.append(sum(a * a for a in group(scores, normalize_std=False)))
        sums.append(sum(map(abs, group(scores))))
    text = (LESSONS / "05-advantages.md").read_text()
    assert f"sum to {sums[0]:.2f} in the uneven group and to {sums[1]:.2f} in" in text
    assert f"sum to {squares[0]:.3f} in the uneven group and to {squares[1]:.0f} in" in text


# ----------------------------------------------------------------------------------------- lesson 6


def test_the_clipped_loss():
    for row in table("06-losses.md", "A", "ratio").rows:
        logprob = torch.tensor([math.log(row["ratio"])], requires_grad=True)
        loss, _ = policy_loss(
            logprob, torch.zeros(1), torch.tensor([row["A"]]), torch.ones(1), *CLIPS
        )
        loss.sum().backward()
        assert [row["loss"], row["gradient"]] == near([loss.item(), logprob.grad.item()])
    loss, _ = policy_loss(
        torch.tensor([0.16]).log(),
        torch.tensor([0.1]).log(),
        torch.tensor([2.0]),
        torch.ones(1),
        *CLIPS,
    )
    assert f"= {loss.item():.2f}$" in (LESSONS / "06-losses.md").read_text()


def test_kl_estimators():
    each = table("06-losses.md", "estimator", "formula")
    for row in each.rows:
        for d in (0.5, -0.5):
            estimate = kl_penalty(torch.tensor([d]), torch.zeros(1), row["estimator"])
            assert row[f"d = {d}"] == pytest.approx(estimate.item(), abs=5e-5)
    pi, ref = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    for row in table("06-losses.md", "estimator", "mean").rows:
        assert row["mean"] == pytest.approx(
            (pi * kl_penalty(pi.log(), ref.log(), row["estimator"])).sum().item(), abs=5e-5
        )
    assert (
        f"true KL is {(pi * (pi / ref).log()).sum():.4f}" in (LESSONS / "06-losses.md").read_text()
    )


def test_value_loss():
    losses = []
    for value in (0.5, 0.9):
        v = torch.tensor([[value]], requires_grad=True)
        loss, _ = value_loss(v, torch.tensor([[0.2]]), torch.tensor([[1.0]]), torch.ones(1, 1), 0.5)
        loss.sum().backward()
        losses.append((loss.item(), v.grad.item()))
    text = (LESSONS / "06-losses.md").read_text()
    assert (
        f"the loss is {losses[0][0]:.3f}" in text
        and f"= {losses[1][0]:.3f}$ and has no gradient" in text
    )
    assert losses[1][1] == 0


def test_aggregation():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
    loss = torch.zeros(2, 8)
    loss[0, :2] = 1
    for row in table("06-losses.md", "mode", "divides by").rows:
        assert row["loss"] == aggregate_loss(loss, mask, row["mode"])


# --------------------------------------------------------------------- lessons 1 to 3: a real group


@pytest.fixture(scope="module")
def attempts() -> list[dict]:
    """The eight attempts at one question (docs/lessons/index.md has the command)."""
    return [json.loads(line) for line in (LESSONS / "group.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two(attempts) -> tuple[dict, dict]:
    """The row of an attempt that was right, and of one that was not."""
    right = next(a for a in attempts if a["reward"] == 1)
    return right["rows"][0], next(a for a in attempts if a["reward"] == 0)["rows"][0]


def test_the_probability_of_an_episode(two):
    text = (LESSONS / "01-agents.md").read_text()
    right, wrong = re.findall(r"(?:^\| \d \| \d+ \| \d+ \|.*\n)+", text, re.MULTILINE)
    for row, block in zip(two, (right, right.splitlines(keepends=True)[0] + wrong), strict=True):
        told = [line.strip("| ").split(" | ") for line in block.splitlines()]
        steps, mask, start = row["step_ids"], row["action_mask"], 0
        for step, (turn, before, sampled, log, pi, _) in enumerate(told):
            places = [i for i, s in enumerate(steps) if s == step]
            total = sum(row["logprobs"][i] for i in places)
            assert (int(turn), int(before), int(sampled)) == (
                step + 1,
                places[0] - start,
                len(places),
            )
            assert [float(log), float(pi)] == near([total, math.exp(total)])
            start = places[-1] + 1
        assert start == len(steps) and sum(mask) == sum(int(line[2]) for line in told)
        assert f"{math.exp(sum(row['logprobs'])):.4f}" in text
    part = next(
        i
        for i, (a, b) in enumerate(zip(two[0]["input_ids"], two[1]["input_ids"], strict=False))
        if a != b
    )
    for row in two:
        assert f"({math.exp(row['logprobs'][part]):.4f})" in text.replace("(probability ", "(")
    assert f"= {(1 - 0.2002) ** 8:.4f}$" in text


def test_the_row_of_the_rollout(two):
    row = two[0]
    parts = table("02-a-rollout.md", "from", "to")
    for part in parts.rows:
        places = range(int(part["from"]), int(part["to"]) + 1)
        assert len(places) == part["tokens"] and {row["action_mask"][i] for i in places} == {
            part["mask"]
        }
    assert parts.column("tokens") and sum(parts.column("tokens")) == len(row["input_ids"])
    for token in table("02-a-rollout.md", "position", "id").rows:
        i = int(token["position"])
        assert (row["input_ids"][i], row["tokens"][i]) == (
            token["id"],
            token["token"].strip("`").replace("\\|", "|"),
        )
        assert [token["log-probability"], token["probability"]] == near(
            [row["logprobs"][i], math.exp(row["logprobs"][i])]
        )
    assert (
        row["input_ids"][36:38] == row["input_ids"][76:78]
        and row["tokens"][28] == "<tool_response>"
    )
    assert row["tokens"][24] == "<|im_end|>" and row["action_mask"][24] == 1


def test_the_group_behind_the_masks(attempts):
    rows = [a["rows"][0] for a in attempts]
    told = table("03-masks.md", "attempts", "tokens in the row")
    assert sum(told.column("attempts")) == len(rows)
    for line in told.rows:
        alike = [r for r in rows if len(r["input_ids"]) == line["tokens in the row"]]
        assert len(alike) == line["attempts"]
        for r in alike:
            assert sum(r["action_mask"]) == line["sampled"]
            paid = [i for i, x in enumerate(r["rewards"]) if x] or [
                max(i for i, m in enumerate(r["action_mask"]) if m)
            ]
            assert paid == [line["on token"]] and r["rewards"][paid[0]] == line["reward"]
            assert {a for a, m in zip(r["advantages"], r["action_mask"], strict=True) if not m} == {
                0.0
            }
    batch = collate(
        [
            TrainingRow(
                i, "q", r["input_ids"], r["action_mask"], r["logprobs"], r["rewards"], r["step_ids"]
            )
            for i, r in enumerate(rows)
        ]
    )
    advantages, _ = grpo(batch, AdvantageConfig())
    for r, computed in zip(rows, advantages, strict=True):
        (line,) = (line for line in told.rows if line["tokens in the row"] == len(r["input_ids"]))
        assert computed[computed != 0].tolist() == near(
            [line["advantage of each sampled token"]] * int(line["sampled"])
        )
        assert r["advantages"] == near(computed[: len(r["advantages"])])
    text = (LESSONS / "03-masks.md").read_text()
    rewards = torch.tensor([a["reward"] for a in attempts])
    assert (
        f"The mean reward is {rewards.mean():.3f} and the standard deviation {rewards.std():.4f}."
        in text
    )
    sampled, tokens = (
        sum(sum(r["action_mask"]) for r in rows),
        sum(len(r["input_ids"]) for r in rows),
    )
    assert (
        f"{sampled} of {tokens} tokens are sampled: **{100 - 100 * sampled / tokens:.0f} % of"
        in text
    )


@pytest.mark.parametrize("name", [*PICTURES, "museum"])
def test_a_picture_is_what_the_code_draws(name):
    drawn, there = (
        (PICTURES | {"museum": museum})[name](),
        (ROOT / "docs" / "images" / f"{name}.svg").read_text(),
    )
    assert drawn == there, "run python lab/pictures/book.py"
    ElementTree.fromstring(drawn)


# ---------------------------------------------------------------------------------- lessons 7 to 10


def curve(name: str) -> list[dict]:
    return [json.loads(line) for line in (LESSONS / f"{name}.jsonl").read_text().splitlines()]


def test_the_bands_are_those_of_the_recorded_runs():
    text, runs = bands.LAB.read_text(), json.loads(bands.BANDS.read_text())
    assert bands.run_table(runs) in bands.LESSON.read_text(), "run python lab/experiments/bands.py"
    made = [
        line
        for line in bands.metric_table(runs).splitlines()
        if not line.endswith("|  " * len(runs) + "|")
    ]
    assert all(line in text for line in made) and len(made) > 50, (
        "run python lab/experiments/bands.py"
    )
    healthy, smoke = (
        curve("healthy"),
        runs["small, grpo"],
    )  # the run of the picture, recorded a second time
    assert [line["reward/em"] for line in healthy[:4]] == near(
        [line["reward/em"] for line in smoke["first"]]
    )
    told = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    for name, where in metric_patterns().items():
        if (
            "L" in where.split() and "opt" not in where.split()
        ):  # no run that was recorded has switched those on
            assert fnmatch.filter(told, name), f"docs/lab/bands.md has no line for {name}"
    for names, _where, healthy_is in bands.read_metrics_page():
        assert healthy_is, f"docs/metrics.md does not say what is healthy of {names}"


def test_the_lines_of_the_loop_are_its_lines():
    source = (ROOT / "src/agent_r1/training/loop.py").read_text()
    shown = re.findall(
        r"^```python\n(.*?)^```$",
        (LESSONS / "07-the-loop.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(shown) == 4 and all(line in source for block in shown for line in block.splitlines())
    assert curve("laptop")[0]["groups/zero_advantage"] == 7 / 16


def test_the_collapse_is_the_recorded_run():
    steps = {line["training/global_step"]: line for line in curve("collapsed")}
    for row in table("09-curves.md", "step", "`reward/em`").rows:
        for name, said in list(row.items())[1:]:
            assert said == pytest.approx(steps[row["step"]].get(name.strip("`"), 0.0), abs=6e-4), (
                row["step"],
                name,
            )
    healthy = max(line["actor/ppo_kl"] for line in curve("healthy"))
    text = (LESSONS / "09-curves.md").read_text()
    assert (
        f"largest is {healthy:.3f}" in text
        and f"has {curve('healthy')[0]['actor/ppo_kl']:.3f}" in text
    )
    assert max(line["groups/zero_advantage"] for line in steps.values()) == 1
    (sign,) = signs(curve("collapsed"))
    assert sign.collapse and f"here after step {sign.step}" in text and not signs(curve("healthy"))


# ---------------------------------------------------------------------------------------- lesson 11

DRIFT = "11-spans-steps-drift.md"


def test_ratios_of_tokens_steps_and_sequences():
    told, text = table(DRIFT, "turn", "ratio"), (LESSONS / DRIFT).read_text()
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    ratios_T = torch.ones(6)
    ratios_T[mask[0].bool()] = torch.tensor(told.column("ratio"))
    for of, clip in (("token", (0.8, 1.28)), ("step", (0.9, 1.1)), ("sequence", (0.9, 1.1))):
        logprobs = ratios_T.log()[None].requires_grad_()
        bounds = 1 - clip[0], clip[1] - 1, 3.0
        loss, _ = policy_loss(
            logprobs, torch.zeros(1, 6), torch.ones(1, 6), mask, *bounds, get_ratios(of)
        )
        loss.sum().backward()
        assert told.column(f"{of}: gradient") == near(logprobs.grad[mask.bool()])
        free, _ = policy_loss(
            logprobs, torch.zeros(1, 6), torch.ones(1, 6), mask, 1.0, 9.0, 3.0, get_ratios(of)
        )
        if of != "token":
            assert told.column(f"{of}: mean") == near(-free.detach()[mask.bool()])
    assert f"here {ratios_T.prod():.4f}" in text and f"have the product {1.01**200:.3f}" in text
    narrow = CreditActor(ratio_level="sequence").clip
    assert "1 - 3e-4 and 1 + 4e-4" in text and narrow[:2] == (3e-4, 4e-4)
    _, seen = policy_loss(
        ratios_T.log()[None],
        torch.zeros(1, 6),
        torch.ones(1, 6),
        mask,
        *narrow,
        get_ratios("sequence"),
    )
    assert seen["actor/pg_clipfrac"] == 1 and f"$1.02^{{40}} = {1.02**40:.3f}$" in text


def test_ratios_that_are_noise_and_those_of_recorded_runs():
    lab = (ROOT / "docs/lab/estimators.md").read_text()
    # Computed here a second time, from the normal distribution's tail by the error function.
    token = 0.5 * math.erfc(math.log(1.28) / 0.3 / math.sqrt(2))
    short = 0.5 * math.erfc(math.log(1.05) / (0.3 / math.sqrt(30)) / math.sqrt(2))
    long = 0.5 * math.erfc(math.log(1.05) / (0.3 / math.sqrt(300)) / math.sqrt(2))
    text = (LESSONS / DRIFT).read_text()
    assert f"deviation 0.3), the token clip removes the gradient of {token:.3f} of" in text
    assert f"removes {short:.3f} of the means, and {long:.4f} of those of 300 tokens" in text
    # The loss itself counts the same share, up to the chance of 500 sequences.
    counted = ratios.clip_in_simulation(0.3, 30, "sequence", 0.05)
    assert counted == pytest.approx(short, abs=0.05)
    assert ratios.noise_table() in lab
    assert ratios.table(json.loads(ratios.FILE.read_text())) in lab


def test_credit_for_the_steps_of_a_house():
    told = table(DRIFT, "attempt", "room of the step")
    rooms = {"hall": (0, 0.25), "kitchen": (1, 0.5)}
    steps = [
        (int(row["attempt"]) - 1, *rooms[row["room of the step"]], row["reward"])
        for row in told.rows
    ]
    batch, _ = inputs_of([[0, 0]] * 4, [[0, 0]] * 4, values=[[0, 0]] * 4)
    for attempt, room, value, reward in steps:
        batch.mask_BT[attempt, room], batch.rewards_BT[attempt, room] = 1, reward
        batch.steps_BT[attempt, room] = batch.columns["states_BT"][attempt, room] = room
        batch.values_BT[attempt, room] = value

    def credit(name: str, **settings) -> list[float]:
        advantages_BT, _ = get_estimator(name)(batch, CreditAdvantage(**settings))
        return [advantages_BT[attempt, room].item() for attempt, room, *_ in steps]

    assert told.column("grpo") == near(credit("grpo")) and told.column("gigpo") == near(
        credit("gigpo"), 2e-4
    )
    assert told.column("steppo, lambda 0") == near(credit("steppo", lam=0.0, normalize_std=False))
    assert credit("steppo", normalize_std=False)[2:4] == near([-0.25, -0.5])  # exercise 2


def test_the_corridor_is_measured():
    assert corridor.table() in (LESSONS / DRIFT).read_text()


def test_drift_by_hand():
    told, text = table(DRIFT, "token", "trainer", "stale"), (LESSONS / DRIFT).read_text()
    trainer_V, stale_V = torch.tensor(told.column("trainer")), torch.tensor(told.column("stale"))
    batch, _ = inputs_of([[0] * 4], [[1] * 4])
    batch.logprobs_BT = stale_V.log()[None]
    for column, cap in (("weight", 99.0), ("capped at 2", 2.0)):
        weights_BT, _ = truncated_weights(
            batch.logprobs_BT, trainer_V.log()[None], batch.mask_BT, cap
        )
        assert told.column(column) == near(weights_BT[0])
    assert f"weighted mass is {(stale_V * weights_BT[0]).sum():.2f}" in text
    cut_V = nucleus(trainer_V.log()[None], 0.79).softmax(-1)[0]
    kept = cut_V > 0
    assert told.column("top-p 0.79") == near(cut_V)
    assert told.column("weight of top-p")[:2] == near(
        (trainer_V / cut_V)[kept]
    ) and kept.tolist() == [
        True,
        True,
        False,
        False,
    ]
    rounded = torch.tensor(-1.5128).bfloat16().item()
    assert (
        f"becomes {rounded:.6f}" in text and f"factor of {math.exp(-1.5128 - rounded):.4f}" in text
    )


def test_drift_is_the_recorded_runs():
    rows = json.loads((ROOT / "docs/lab/race/mismatch.json").read_text())
    for row in table(DRIFT, "sampler", "gap").rows:
        for name, said in list(row.items())[1:]:
            assert said == pytest.approx(
                rows[row["sampler"]][name], abs=0.5 if said > 100 else 0.05 if said > 3 else 6e-4
            )
