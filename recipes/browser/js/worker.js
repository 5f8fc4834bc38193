"use strict";
/*
 * Train in the background. In: messages of the page. Out: messages with figures, groups and answers.
 *
 * A step runs without a pause, about a second. Between steps the worker reads its messages, so a question waits for
 * the end of a step. The steps of the page are counted here: a page that is hidden or slow loses none. The same file
 * runs as a helper (crew.js), if its first message is `help`.
 */

const LIVE_PAUSE = 60; // milliseconds between pictures of the group that is being sampled
const IMITATED_AT_ONCE = 20; // steps of the cold start between two messages; they take about a second
const START_QUESTIONS = 300; // of the test of a cold start
const work = {
  session: null, crew: null, cold: null, learner: null, running: false, left: 0, asked: [], lastLive: 0,
}; // prettier-ignore

const send = (type, facts = {}, parts = []) => postMessage({ type, ...facts }, parts);
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
    const { header, trainer, agent } = work.session;
    work.crew = new Crew(trainer, agent);
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

  /** Become a helper of the worker at the other end of the port. */
  async help({ data, module, port }) {
    serve(port, await openSession(data, module, () => {}));
  },

  /** Let a helper in. It takes part as soon as it has opened its session. */
  helper({ port }) {
    work.crew?.add(port); // a worker that could not open has no crew
  },

  /**
   * Begin a run with the start weights, or go on with the state that another worker left. With demonstrations
   * (`plays`), the run begins with random weights and a cold start.
   */
  async train({ steps, seed, switches, workers, plays, state }) {
    const { trainer, agent, start } = work.session;
    trainer.reset(start);
    Object.assign(work, { cold: null, learner: null, running: true, left: steps });
    work.crew.most = workers ?? Infinity;
    work.begin = () => beginLearning({ steps, switches }, seed);
    if (plays) {
      work.cold = new ColdStart(trainer, agent, await unpackPlays(plays), seed, { switches });
      if (state) work.cold.restore(state);
      return;
    }
    work.begin();
    if (state) work.learner.restore(state);
    work.left = steps - work.learner.step;
  },

  pause() {
    work.running = false;
    send("paused");
  },

  resume() {
    work.running = work.left > 0;
  },

  /** Take one step, then stand still. */
  async step() {
    work.running = false;
    if (work.left > 0) await takeOneStep();
  },

  /** Answer a question with the weights as they are now. */
  async ask({ question, answers }) {
    const [episode] = await work.crew.answer([{ question, answers }]);
    const record = recordOf(episode, work.session.agent.chat);
    send("answer", { record, step: work.learner?.step ?? 0 });
  },

  /** Score the weights on test questions, of a world that training never asks about. `run` comes back. */
  async evaluate({ count, run }) {
    const episodes = await work.crew.answer(work.session.header.test.slice(0, count));
    const em = episodes.reduce((sum, episode) => sum + episode.em, 0) / episodes.length;
    send("evaluated", { em, hops: byHops(episodes), step: work.learner?.step ?? 0, run });
  },
};

/** Begin RL with the weights as they are. */
function beginLearning(recipe, seed) {
  const { trainer, agent, header } = work.session;
  trainer.reset(trainer.weights());
  work.learner = new Learner(trainer, agent, header.train, recipe, seed, work.crew);
}

/** Take some steps of the cold start. After the last, test the weights, and begin RL with them. */
async function imitate() {
  const { cold, session } = work;
  const losses = [];
  let found = { done: false };
  for (let i = 0; i < IMITATED_AT_ONCE && !found.done; i++) {
    found = cold.takeStep();
    losses.push(found.loss);
  }
  const loss = losses.reduce((a, b) => a + b) / losses.length;
  const state = found.done ? null : cold.state();
  const { step } = found;
  send("cold", { step, steps: cold.steps, loss, state }, buffersOf(state));
  if (!found.done) return;
  work.cold = null;
  work.begin();
  await handlers.evaluate({ count: START_QUESTIONS });
  send("taught", { hash: session.trainer.weightsHash() });
}

/** List what a state hands over instead of copying it. */
const buffersOf = (state) =>
  state ? [state.weights, ...state.moments].map(({ buffer }) => buffer) : [];

async function takeOneStep() {
  if (work.cold) return imitate();
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
  const { step, steps, episodes, figures } = await learner.takeStep(watch);
  work.left--;
  const group = groupToShow(episodes).map((episode) => recordOf(episode, chat));
  const seconds = (performance.now() - began) / 1000;
  const hash = session.trainer.weightsHash();
  const workers = 1 + work.crew.working().length;
  // The page keeps the state: if this worker dies, another one goes on from it.
  const state = learner.state();
  send("step", { step, steps, figures, seconds, group, hash, workers, state }, buffersOf(state));
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
    await takeOneStep();
  }
}

async function handle(message) {
  try {
    await handlers[message.type](message);
  } catch (error) {
    work.running = false;
    send("problem", { text: error.message, opened: work.session !== null });
  }
}

let busy = Promise.resolve();
onmessage = ({ data }) => {
  // A step that waits for a lost helper must hear of it now.
  if (data.type === "lost") return work.crew?.helpers[data.number]?.lose();
  work.asked.push(data);
  busy = busy.then(keepTraining).catch((error) => {
    work.running = false;
    send("problem", { text: error.message, opened: true });
  });
};
