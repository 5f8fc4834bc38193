"use strict";
/*
 * Train with GRPO, as training/loop.py does: play, compare within groups, update twice. In: questions and a recipe.
 * Out: better weights, and the figures of each step. crew.js shares the work. Next: worker.js sends figures to the page.
 *
 * All that decides a weight is computed here, in rollout.js or in the WebAssembly module, with + - * / and sqrt only:
 * exp, log and cos may differ between engines. tests/test_trainer.py refuses them in these files.
 */

/** The settings of preset smoke, with 40 instead of 30 steps. */
const RECIPE = {
  steps: 40,
  questions: 24, // per step
  samples: 8, // attempts at each question
  minibatches: 2, // updates per step
  learningRate: 3e-4,
  finalShare: 0.1, // of the learning rate, in the last step
  largestNorm: 1, // of the gradient
  samplerTemperature: 1,
  loss: LOSS,
  switches: [],
};
/** Gradients are sums of this many parts, in order: one worker or eight give the same bits. */
const SHARDS = 8;
/** Places of random numbers that belong to no token. */
const [ORDER_OF_QUESTIONS, ORDER_OF_EPISODES, EPISODE] = [1, 2, 3];

class Learner {
  /** `agent` has chat, index and settings; `questions` are the training questions. A crew shares the work. */
  constructor(trainer, agent, questions, recipe, seed, crew = new Crew(trainer, agent)) {
    Object.assign(this, { trainer, agent, crew, seed, step: 0, start: null });
    this.recipe = { ...RECIPE, ...recipe };
    this.switches = this.recipe.switches.map((name) => SWITCHES[name]);
    for (const { change } of this.switches) Object.assign(this.recipe, change?.(this.recipe));
    this.order = shuffled(questions, seed, ORDER_OF_QUESTIONS);
    if (this.recipe.loss.kl) this.start = trainer.weights(); // the KL's reference
    crew.share();
  }

  /** Return all that another worker needs to go on after this step. */
  state() {
    return { step: this.step, start: this.start, ...this.trainer.state() };
  }

  /** Go on after the step of a state. */
  restore({ step, start, ...state }) {
    Object.assign(this, { step, start });
    this.trainer.restore(state);
    this.crew.share();
  }

  /** Take one step. Returns its episodes and figures. `onToken` sees each token as it is sampled. */
  async takeStep(onToken) {
    const { recipe } = this;
    this.step++;
    const episodes = await this.play(onToken);
    this.credit(episodes);
    const figures = { ...(await this.update(episodes)), ...describe(episodes) };
    return { step: this.step, steps: recipe.steps, episodes, figures };
  }

  /** Sample attempts at the next questions. */
  async play(onToken) {
    const { questions: count, samples, samplerTemperature: temperature, switches } = this.recipe;
    const first = (this.step - 1) * count;
    const asked = Array.from(
      { length: count },
      (_, i) => this.order[(first + i) % this.order.length],
    );
    const place = [this.seed, EPISODE, this.step];
    const options = { place, samples, temperature, switches };
    const episodes = await this.crew.play(asked, options, onToken);
    for (const { regroup } of this.switches) regroup?.(episodes, this.recipe);
    return episodes;
  }

  /** Give each episode its advantage: how much better it did than the others at the same question. */
  credit(episodes) {
    for (const members of groupsOf(episodes).values()) {
      const advantages = standardize(members.map(({ reward }) => reward));
      members.forEach((episode, i) => (episode.advantage = advantages[i]));
    }
    for (const { recredit } of this.switches) recredit?.(episodes);
  }

  /** List the tokens of an episode that are trained on: those that the agent sampled. */
  actionsOf(episode) {
    let places = [...episode.mask.keys()].filter((place) => episode.mask[place]);
    for (const { remask } of this.switches) {
      if (remask) places = remask(episode, places, this.agent);
    }
    return places;
  }

  /** Turn episodes into rows of the trainer. A row ends with its last action: what follows teaches nothing. */
  rowsOf(episodes) {
    return episodes.map((episode) => {
      const { advantage, logprobs } = episode;
      const actions = this.actionsOf(episode).map((place) => ({
        place,
        advantage,
        old: logprobs[place],
      }));
      return { ids: episode.ids.slice(0, actions.at(-1).place + 1), actions };
    });
  }

  /** Update the weights once per minibatch. Returns the figures of the update. */
  async update(episodes) {
    const { recipe, trainer, crew } = this;
    const rows = this.rowsOf(episodes);
    this.addLogprobs(rows);
    const share = (this.step - 1) / Math.max(recipe.steps - 1, 1);
    const decay = 1 - (1 - recipe.finalShare) * Math.min(share, 1);
    const seen = { loss: 0, gap: 0, clipped: 0, kl: 0, first: 0, all: 0, norm: 0, learned: 0 };
    shuffled(rows, this.seed, ORDER_OF_EPISODES, this.step).forEach((row, i) => {
      row.minibatch = i % recipe.minibatches;
    });
    for (let minibatch = 0; minibatch < recipe.minibatches; minibatch++) {
      const members = rows.filter((row) => row.minibatch === minibatch);
      const count = members.reduce((sum, { actions }) => sum + actions.length, 0);
      // Each token counts equally (token-mean); skipped rows count in the divisor, or others would weigh more.
      for (const { actions } of members) for (const action of actions) action.weight = 1 / count;
      const learns = members.filter(({ actions }) => recipe.loss.kl || actions[0].advantage !== 0);
      for (const { ids } of learns) seen.learned += ids.length;
      // Without any advantage there is no gradient, and momentum alone must not move the weights.
      if (!learns.length) continue;
      const shards = shardsOf(learns);
      for (const [i, found] of (await crew.differentiate(shards, recipe.loss)).entries()) {
        if (!found) continue; // fewer rows than shards
        this.notice(seen, minibatch, shards[i], found);
        trainer.addShard(found.gradient);
      }
      seen.norm = trainer.update(recipe.learningRate * decay, recipe.largestNorm);
      crew.share();
    }
    const tokens = rows.reduce((sum, { ids }) => sum + ids.length, 0);
    const actions = rows.reduce((sum, row) => sum + row.actions.length, 0);
    return {
      loss: seen.loss,
      norm: seen.norm,
      learned: seen.learned, // tokens of the rows with a gradient
      gap: seen.gap / Math.max(seen.first, 1),
      clipped: seen.clipped / Math.max(seen.all, 1),
      kl: seen.kl / Math.max(seen.all, 1),
      trained: actions / tokens, // share of tokens that have a loss
    };
  }

  /** Add what a switch needs: log-probabilities of tokens that no one sampled, and those of the reference. */
  addLogprobs(rows) {
    const { trainer, recipe, start } = this;
    const fill = (name) => {
      for (const shard of shardsOf(rows)) {
        const { logprobs } = trainer.differentiate(shard, recipe.loss, false);
        shard
          .flatMap(({ actions }) => actions)
          .forEach((action, i) => (action[name] = logprobs[i]));
      }
    };
    if (this.switches.some((one) => one.recompute)) fill("old");
    if (!start) return;
    const now = trainer.weights();
    trainer.setWeights(start);
    fill("reference");
    trainer.setWeights(now);
  }

  /** Add a shard's figures up. The gap compares sampler and trainer before the first update: it should be 0. */
  notice(seen, minibatch, shard, { loss, logprobs }) {
    seen.loss += loss;
    const { clipLow, clipHigh } = this.recipe.loss;
    shard.flatMap(({ actions }) => actions).forEach(({ old, advantage, reference = old }, i) => {
      const moved = logprobs[i] - old;
      if (minibatch === 0) seen.gap += Math.abs(moved);
      if (minibatch === 0) seen.first++;
      seen.all++;
      // To first order the ratio is 1 + moved; figures decide nothing.
      if (advantage > 0 ? moved > clipHigh : moved < -clipLow) seen.clipped++;
      seen.kl += logprobs[i] - reference; // of the start model, if the loss has a KL
    }); // prettier-ignore
  }
}

/** Gather the episodes that are compared with one another. */
function groupsOf(episodes) {
  const groups = new Map();
  for (const episode of episodes) {
    if (!groups.has(episode.group)) groups.set(episode.group, []);
    groups.get(episode.group).push(episode);
  }
  return groups;
}

/** Subtract the mean and divide by the standard deviation (n - 1). Equal rewards give exactly 0. */
function standardize(rewards) {
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) return rewards.map(() => 0);
  const mean = rewards.reduce((a, b) => a + b) / rewards.length;
  const squares = rewards.reduce((sum, reward) => sum + (reward - mean) * (reward - mean), 0);
  const deviation = Math.sqrt(squares / (rewards.length - 1));
  return rewards.map((reward) => (reward - mean) / (deviation + 1e-6));
}

/** Cut rows into SHARDS parts of nearly equal length, in order. */
function shardsOf(rows) {
  const border = (i) => Math.floor((i * rows.length) / SHARDS);
  return Array.from({ length: SHARDS }, (_, i) => rows.slice(border(i), border(i + 1)));
}

/** Describe a step's episodes. */
function describe(episodes) {
  const mean = (number) =>
    episodes.reduce((sum, episode) => sum + number(episode), 0) / episodes.length;
  return {
    reward: mean(({ reward }) => reward),
    em: mean(({ em }) => em),
    hops: byHops(episodes),
    calls: mean(({ toolCalls }) => toolCalls),
    zero: mean(({ advantage }) => (advantage === 0 ? 1 : 0)), // share that teaches nothing
    tokens: episodes.reduce((sum, { ids }) => sum + ids.length, 0),
    sampled: episodes.reduce((sum, { mask }) => sum + mask.reduce((a, b) => a + b, 0), 0),
  };
}

/** The kinds of questions, by the number of searches that they take. */
const KINDS = ["1-hop", "2-hop", "3-hop"];

/** Return the share of right answers for each kind of question; null for a kind that no one asked. */
function byHops(episodes) {
  return KINDS.map((kind) => {
    const members = episodes.filter(({ asked }) => asked.kind === kind);
    return members.length ? members.reduce((sum, { em }) => sum + em, 0) / members.length : null;
  });
}

/** Answer questions greedily. Returns the episodes; exact match is the mean of their `em`. */
function answerGreedily(trainer, agent, questions) {
  const episodes = [];
  for (let start = 0; start < questions.length; start += trainer.slots) {
    const part = questions.slice(start, start + trainer.slots);
    episodes.push(
      ...playGroups(trainer, agent, part, { samples: 1, temperature: 0, noise: () => 0 }),
    );
  }
  return episodes;
}
