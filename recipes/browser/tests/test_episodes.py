"""The worker plays the episodes that Python plays, and learns the same whatever plays them."""

from __future__ import annotations

import pytest

from agent_r1 import load_chat
from agent_r1_recipes.browser import world
from agent_r1_recipes.browser.node import run_node
from agent_r1_recipes.browser.page import learning_script
from agent_r1_recipes.browser.tests.small_world import small_config, small_world
from agent_r1_recipes.laptop.settings import DEMO_AGENT
from agent_r1_recipes.page.tests import parity

NUMBER = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(tmp_path_factory.mktemp("home")))
        header, data = small_world()
        yield small_config(), header, data


GREEDY = """
const { trainer, agent, header } = session;
for (const asked of header.test.slice(0, job.count)) {
  // One by one, and below all at once: an episode must not depend on its batch.
  const [alone] = answerGreedily(trainer, agent, [asked]);
  tell(alone);
}
tell(answerGreedily(trainer, agent, header.test.slice(0, job.count)).map(({ ids }) => ids));
"""


def test_greedy_episodes_have_the_tokens_of_python_in_any_batch(small):
    config, _, data = small
    *played, together = run_node(GREEDY, {"count": NUMBER}, data)
    assert [episode["ids"] for episode in played] == together
    episodes = [parity.episode(0, i) for i in range(NUMBER)]
    model = world.start_model()
    trajectories = parity.play_python(model, load_chat(DEMO_AGENT), config, episodes)
    records = []
    for episode in played:
        row = {"input_ids": episode["ids"], "action_mask": episode["mask"]}
        row["logprobs"] = episode["logprobs"]
        record = {key: episode[key] for key in ("reward", "em")}
        records.append(record | {"rows": [row], "stop_reason": episode["stop"]})
    found = parity.compare(model, trajectories, records)
    assert found.different == 0 and found.equal >= NUMBER - 1, found
    assert found.largest_logprob_difference < 1e-4
    assert 0 < found.em_page < 1  # it has something to learn
    assert {episode["toolCalls"] for episode in played} > {1}


STEPS = """
const run = async (recipe, seed) => {
  session.trainer.reset(session.start);
  const learner = new Learner(session.trainer, session.agent, session.header.train, recipe, seed);
  const done = [];
  for (let step = 0; step < 2; step++) done.push(await learner.takeStep());
  return { hash: session.trainer.weightsHash(), done };
};
const small = { steps: 2, questions: 4, samples: 4 };
const first = await run(small, 3); // a seed of which both steps have something to compare
tell(first.done.map(({ figures }) => figures));
tell(first.done[0].episodes.map(({ group, ids, mask, reward, advantage }) =>
  ({ group, ids, mask, reward, advantage })));
const slower = { ...small, learningRate: 1e-4 };
const others = [];
for (const [recipe, seed] of [[small, 3], [small, 2], [slower, 3]]) {
  others.push(await run(recipe, seed));
}
tell([first, ...others].map(({ hash }) => hash));
const broken = [];
for (const name of Object.keys(SWITCHES)) {
  const { hash, done } = await run({ ...small, switches: [name] }, 3);
  broken.push({ name, hash, figures: done.map(({ figures }) => figures) });
}
tell(broken);
const { pay } = SWITCHES["malformed-penalty"];
tell(job.endings.map(({ stop, text }) => pay({ stop, steps: [{ text }] }, 1)));
"""
ENDINGS = [
    ("answered", "<think>so</think><answer>Sosnum</answer>"),
    ("answered", "<answer>Sosnum</answer> or so"),
    ("max_tokens", "<answer>Sosnum</answer>"),
]


@pytest.fixture(scope="module")
def steps(small):
    endings = [{"stop": stop, "text": text} for stop, text in ENDINGS]
    return run_node(STEPS, {"endings": endings}, small[2])


def test_a_step_compares_attempts_and_its_sampler_is_its_trainer(steps):
    figures, episodes, *_ = steps
    assert all(step["gap"] < 1e-6 and step["norm"] > 0 for step in figures)
    assert figures[0]["sampled"] == sum(sum(e["mask"]) for e in episodes)
    by_group = {}
    for episode in episodes:
        by_group.setdefault(episode["group"], []).append(episode)
    assert [len(group) for group in by_group.values()] == [4, 4, 4, 4]
    for group in by_group.values():
        prompts = {tuple(e["ids"][: e["mask"].index(1)]) for e in group}
        assert len(prompts) == 1
        assert sum(e["advantage"] for e in group) == pytest.approx(0, abs=1e-9)
        rewards = [e["reward"] for e in group]
        assert (len(set(rewards)) > 1) == any(e["advantage"] for e in group)
    assert len({tuple(e["ids"]) for e in episodes}) > 4


def test_a_run_has_one_hash_and_another_seed_or_setting_has_another(steps):
    first, again, other_seed, other_rate = steps[2]
    assert first == again and len({first, other_seed, other_rate}) == 3


def test_each_switch_changes_what_is_learnt(steps):
    healthy = steps[2][0]
    start = {name["name"]: name for name in steps[3]}
    hashes = {name: found["hash"] for name, found in start.items()}
    # One question's answer is rarely a part of another answer, and few attempts end without a
    # well-formed one: two steps may agree.
    different = {name for name, digest in hashes.items() if digest != healthy}
    assert different >= set(hashes) - {"substring-match", "malformed-penalty"}

    def largest(name, figure):
        return max(figures[figure] for figures in start[name]["figures"])

    assert largest("mask-forgotten", "trained") > 0.6
    assert largest("off-by-one", "gap") > 1
    assert largest("temperatures-differ", "gap") > 0.01
    assert largest("advantages-of-zero", "zero") == 1


def test_the_penalty_is_paid_for_endings_that_are_not_well_formed(steps):
    assert steps[4] == pytest.approx([1, 0.8, 0.8])


HELPER = """
require("worker_threads").parentPort.once("message", async ({ port, data, module }) =>
  serve(port, await openSession(data, module, () => {})));
"""
CREW = """
const { Worker } = require("worker_threads");
const { trainer, agent, header, start } = session;
const crew = new Crew(trainer, agent);
const helpers = Array.from({ length: 3 }, () => {
  const helper = new Worker(job.helper, { eval: true });
  const { port1, port2 } = new MessageChannel();
  crew.add(port1);
  helper.postMessage({ port: port2, data: job.data, module: bytesOf(job.module) }, [port2]);
  return helper;
});
while (crew.working().length < 3) await new Promise((resolve) => setTimeout(resolve, 5));
const recipe = { steps: 2, questions: 4, samples: 4 };
const begin = (most) => {
  crew.most = most;
  trainer.reset(start);
  return new Learner(trainer, agent, header.train, recipe, 3, crew);
};
const hashes = {};
for (const most of [1, 2, 4]) {
  const learner = begin(most);
  await learner.takeStep();
  await learner.takeStep();
  hashes[most] = trainer.weightsHash();
}
tell(hashes);
tell(crew.helpers.map(({ asked }) => asked));
const questions = header.test.slice(0, 21);
const answers = (await crew.answer(questions)).map(({ ids }) => ids);
tell([answers, answerGreedily(trainer, agent, questions).map(({ ids }) => ids)]);
// A helper dies in the middle of a step, and the worker goes on alone.
const dying = begin(2);
const step = dying.takeStep();
await helpers[0].terminate();
crew.helpers[0].lose();
await step;
crew.most = 1;
const state = dying.state();
await dying.takeStep();
tell(trainer.weightsHash());
// Another worker goes on after the first step.
const next = begin(4);
next.restore(state);
await next.takeStep();
tell(trainer.weightsHash());
for (const helper of helpers) helper.terminate();
for (const { port } of crew.helpers) port.close();
"""


@pytest.fixture(scope="module")
def crew(small):
    return run_node(CREW, {"helper": learning_script() + HELPER}, small[2])


def test_one_two_and_four_workers_give_one_hash(crew):
    hashes, tasks, *_ = crew
    assert len(set(hashes.values())) == 1
    # Weights are a task too; the two helpers that only four workers use do fewer.
    assert tasks[0] > tasks[1] > 10


def test_workers_answer_as_one_does(crew):
    together, alone = crew[2]
    assert together == alone and len(together) == 21


def test_a_dead_helper_and_a_new_worker_change_no_bit(crew):
    hashes, *_, without_helper, after_restore = crew
    assert without_helper == after_restore == hashes["1"]
