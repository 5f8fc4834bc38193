"use strict";
/*
 * Train in the background. In: messages of the page. Out: messages with figures, groups and answers.
 *
 * A step runs without a pause, about a second. Between steps the worker reads its messages, so a question waits for
 * the end of a step. The steps of the page are counted here: a page that is hidden or slow loses none.
 */

const LIVE_PAUSE = 60; // milliseconds between pictures of the group that is being sampled
const work = { session: null, learner: null, running: false, left: 0, asked: [], lastLive: 0 };

const send = (type, facts = {}) => postMessage({ type, ...facts });
const nextTask = () => new Promise((resolve) => setTimeout(resolve, 0));

/** Describe an episode for the page: tokens as text, who wrote them, what they earned. */
function recordOf(episode, chat) {
  const { asked, ids, mask, logprobs, steps, stop, answer, em, reward, advantage, group } = episode;
  let step = -1;
  const stepIds = mask.map((acted, t) => {
    if (acted && !mask[t - 1]) step++;
    return acted ? step : -1;
  });
  const last = mask.lastIndexOf(1);
  const rewards = mask.map((_, t) => (t === last ? (reward ?? 0) : 0));
  const tokens = ids.map((id) => chat.tokenizer.decode([id]));
  const row = { input_ids: ids, tokens, action_mask: mask, logprobs, step_ids: stepIds, rewards };
  const calls = steps.reduce((sum, { results }) => sum + (results?.length ?? 0), 0);
  return {
    question: asked.question, ground_truth: asked.answers, stop_reason: stop, group_id: String(group),
    answer, em, reward, advantage, calls, rows: [row], steps: steps.map(() => ({})),
  }; // prettier-ignore
}

/** Choose the group to show: the first whose attempts earned differently, because it teaches something. */
function groupToShow(episodes) {
  const groups = [...groupsOf(episodes).values()];
  return groups.find((members) => members.some(({ advantage }) => advantage !== 0)) ?? groups[0];
}

const handlers = {
  async open({ data, module }) {
    work.session = await openSession(data, module, (text) => send("stage", { text }));
    const { header, trainer } = work.session;
    const titles = Object.entries(SWITCHES).map(([name, { title, says, shows }]) => ({
      name, title, says, shows,
    })); // prettier-ignore
    send("ready", {
      switches: titles,
      questions: header.test.slice(0, 40),
      passages: header.corpus.length,
      training: header.train.length,
      parameters: trainer.count,
      hash: trainer.weightsHash(),
    });
  },

  /** Begin a run with the start weights. */
  train({ steps, seed, switches }) {
    const { trainer, agent, header, start } = work.session;
    trainer.reset(start);
    work.learner = new Learner(trainer, agent, header.train, { steps, switches }, seed);
    Object.assign(work, { running: true, left: steps });
  },

  pause() {
    work.running = false;
    send("paused");
  },

  resume() {
    work.running = work.left > 0;
  },

  /** Take one step, then stand still. */
  step() {
    work.running = false;
    if (work.left > 0) takeOneStep();
  },

  /** Answer a question with the weights as they are now. */
  ask({ question, answers }) {
    const { trainer, agent } = work.session;
    const [episode] = answerGreedily(trainer, agent, [{ question, answers }]);
    send("answer", { record: recordOf(episode, agent.chat), step: work.learner?.step ?? 0 });
  },

  /** Score the weights on test questions, of a world that training never asks about. */
  evaluate({ count }) {
    const { trainer, agent, header } = work.session;
    const episodes = answerGreedily(trainer, agent, header.test.slice(0, count));
    const em = episodes.reduce((sum, episode) => sum + episode.em, 0) / episodes.length;
    send("evaluated", { em, count: episodes.length, step: work.learner?.step ?? 0 });
  },
};

function takeOneStep() {
  const { learner, session } = work;
  const { chat } = session.agent;
  const began = performance.now();
  const live = new Map();
  const watch = (episode) => {
    if (episode.group !== 0) return;
    live.set(episode.sample, episode);
    if (performance.now() - work.lastLive < LIVE_PAUSE) return;
    work.lastLive = performance.now();
    send("live", { records: [...live.values()].map((one) => recordOf(one, chat)) });
  };
  const { step, steps, episodes, figures } = learner.takeStep(watch);
  work.left--;
  const group = groupToShow(episodes).map((episode) => recordOf(episode, chat));
  const seconds = (performance.now() - began) / 1000;
  send("step", { step, steps, figures, seconds, group, hash: session.trainer.weightsHash() });
  if (work.left === 0) {
    work.running = false;
    send("done");
  }
}

/** Take steps while the run goes on, and let messages in between two of them. */
async function keepTraining() {
  for (;;) {
    await nextTask();
    while (work.asked.length) await handle(work.asked.shift());
    if (!work.running) return;
    takeOneStep();
  }
}

async function handle(message) {
  try {
    await handlers[message.type](message);
  } catch (error) {
    work.running = false;
    send("problem", { text: error.message });
  }
}

let busy = Promise.resolve();
onmessage = ({ data }) => {
  work.asked.push(data);
  busy = busy.then(keepTraining).catch((error) => send("problem", { text: error.message }));
};
