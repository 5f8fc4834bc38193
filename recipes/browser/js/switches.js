"use strict";
/*
 * Break the training, with known bugs of agent RL (recipes/museum tells where each was seen). In: the name of a switch.
 * Out: what it changes in js/learn.js: settings (`change`), rewards (`pay`), groups (`regroup`), advantages
 * (`recredit`) or the tokens that are trained on (`remask`). `shows` is the figure that reveals the bug.
 */

const SWITCHES = {
  "mask-forgotten": {
    title: "Forget the mask",
    says: "Tool results are trained on, as if the agent had written them.",
    shows: "trained",
    recompute: true, // no one sampled a result, so its log-probability is computed
    remask: (episode, places) =>
      Array.from({ length: places.at(-1) - places[0] + 1 }, (_, i) => places[0] + i),
  },
  "off-by-one": {
    title: "Read the logits one token late",
    says: "A token is scored with the logits after it, not before it.",
    shows: "gap",
    change: ({ loss }) => ({ loss: { ...loss, shift: 1 } }),
  },
  "temperatures-differ": {
    title: "Sample at half the temperature",
    says: "The sampler uses temperature 0.5, the trainer 1.",
    shows: "gap",
    change: () => ({ samplerTemperature: 0.5 }),
  },
  "advantages-of-zero": {
    title: "Multiply advantages by zero",
    says: "Every group teaches nothing.",
    shows: "zero",
    recredit: (episodes) => episodes.forEach((episode) => (episode.advantage = 0)),
  },
  "sign-flipped": {
    title: "Flip the sign of the loss",
    says: "Good attempts become less likely.",
    shows: "reward",
    recredit: (episodes) => episodes.forEach((episode) => (episode.advantage *= -1)),
  },
  "kl-of-the-wrong-sign": {
    title: "Flip the sign of the KL",
    says: "The distance to the start model, weight 2, is rewarded instead of penalised.",
    shows: "kl",
    change: ({ loss }) => ({ loss: { ...loss, kl: -2 } }), // with -0.2, 20 steps show nothing,
  },
  "minibatches-miscounted": {
    title: "Update ten times instead of twice",
    says: "Minibatches are five times as small, so there are five times as many updates.",
    shows: "norm",
    change: () => ({ minibatches: 10 }),
  },
  "groups-mixed": {
    title: "Compare different questions",
    says: "Attempt g at question p is compared in group p + g.",
    shows: "zero",
    regroup: (episodes, { questions }) =>
      episodes.forEach((episode) => (episode.group = (episode.group + episode.sample) % questions)),
  },
  "malformed-penalty": {
    title: "Pay a penalty of .2 for malformed endings",
    says: "An attempt that ends without a well-formed answer earns .2 less. This is no bug, but a choice.",
    shows: "reward",
    pay: ({ stop, steps }, reward) => {
      const last = stop === "answered" ? steps.at(-1).text : "";
      return reward - (isWellFormed(last) ? 0 : 0.2);
    },
  },
  "substring-match": {
    title: "Pay for a substring",
    says: "An answer that contains the right one is right.",
    shows: "em",
    pay: ({ answer, asked }, reward) => {
      const found = answer !== null && asked.answers.some((right) => answer.includes(right));
      return found ? Math.max(reward, 1) : reward;
    },
  },
  "stop-token-untrained": {
    title: "Mask the stop token",
    says: "The token that ends a turn has no loss.",
    shows: "trained",
    remask: ({ ids }, places, { chat }) => {
      const kept = places.filter((place) => !chat.stopIds.has(ids[place]));
      return kept.length ? kept : places;
    },
  },
  "baseline-forgotten": {
    title: "Forget the baseline",
    says: "The advantage is the reward itself: only failures have a negative sign.",
    shows: "zero",
    recredit: (episodes) => episodes.forEach((episode) => (episode.advantage = episode.reward)),
  },
};
