"use strict";
/*
 * Compute what training computes, in float64 and in the same words: training/advantages.py, training/losses.py,
 * recipes/credit and recipes/robustness. tests/test_quantities.py compares each function with Python.
 *
 * A batch has lists of rows of tokens (mask, rewards, values, steps, states) and lists of rows (groups, trajectory,
 * baseline). Every result is 0 where the mask is 0. Next: microscope.js.
 */

const total = (values) => values.reduce((a, b) => a + b, 0);
const average = (values) => total(values) / values.length;

/** Divide the squared deviations by n - 1, as torch and verl do. */
function variance(values) {
  const middle = average(values);
  return total(values.map((value) => (value - middle) ** 2)) / (values.length - 1);
}

/** Take the values of action tokens, row by row. */
function ofActions(values, { mask }) {
  return mask.flatMap((row, b) => values[b].filter((_, t) => row[t]));
}

/** Put values of action tokens, row by row, in their places. */
function atActions(values, { mask }) {
  let next = 0;
  return mask.map((row) => row.map((acted) => (acted ? values[next++] : 0)));
}

/** Copy each row's value to its action tokens. */
function toTokens(values, { mask }) {
  return mask.map((row, b) => row.map((acted) => (acted ? values[b] : 0)));
}

// ----------------------------------------------------------------------------------------------- advantages

/** Sum the rewards of each trajectory. */
function scoresOf({ mask, rewards, trajectory }) {
  const scores = new Map();
  trajectory.forEach((number, b) => {
    const earned = total(rewards[b].filter((_, t) => mask[b][t]));
    scores.set(number, (scores.get(number) ?? 0) + earned);
  });
  return scores;
}

/** Map each group to the numbers of its members, each once. */
function membersOf(groups, numbers) {
  const members = new Map(groups.map((group) => [group, new Set()]));
  groups.forEach((group, i) => members.get(group).add(numbers[i]));
  return members;
}

/** Subtract the group's mean; optionally divide by its standard deviation. Equal scores give exactly 0. */
function standardize(scores, normalizeStd) {
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) return scores.map(() => 0);
  const middle = average(scores);
  const divisor = normalizeStd ? Math.sqrt(variance(scores)) + 1e-6 : 1;
  return scores.map((score) => (score - middle) / divisor);
}

/** Scale to mean 0 and variance 1. A single value has nothing to compare with, and becomes 0. */
function whiten(values) {
  if (values.length < 2) return values.map(() => 0);
  const middle = average(values);
  const scale = 1 / Math.sqrt(variance(values) + 1e-8);
  return values.map((value) => (value - middle) * scale);
}

/** Give each trajectory `compare(scores of its group)`, and copy that to its action tokens. */
function compareInGroups(batch, compare) {
  const scores = scoresOf(batch);
  const credit = new Map();
  for (const members of membersOf(batch.groups, batch.trajectory).values()) {
    const numbers = [...members];
    const compared = compare(numbers.map((number) => scores.get(number)));
    numbers.forEach((number, i) => credit.set(number, compared[i]));
  }
  return toTokens(
    batch.trajectory.map((number) => credit.get(number)),
    batch,
  );
}

/** Run generalised advantage estimation over actions that are concatenated by trajectory. */
function gae(rewards, values, numbers, gamma, lam) {
  const advantages = new Array(rewards.length);
  let [nextValue, nextAdvantage] = [0, 0];
  for (let t = rewards.length - 1; t >= 0; t--) {
    if (numbers[t] !== numbers[t + 1]) [nextValue, nextAdvantage] = [0, 0]; // the episode is over
    const delta = rewards[t] + gamma * nextValue - values[t];
    nextAdvantage = delta + gamma * lam * nextAdvantage;
    nextValue = values[t];
    advantages[t] = nextAdvantage;
  }
  return advantages;
}

/** Group action tokens by step: the first token, the row, the trajectory and the summed reward of each step. */
function stepsOf(batch) {
  const steps = [];
  const ofAction = [];
  batch.mask.forEach((row, b) => {
    let latest = -1;
    row.forEach((acted, t) => {
      if (!acted) return;
      if (batch.steps[b][t] > latest) {
        latest = batch.steps[b][t];
        steps.push({ row: b, first: t, trajectory: batch.trajectory[b], reward: 0 });
      }
      steps.at(-1).reward += batch.rewards[b][t];
      ofAction.push(steps.length - 1);
    });
  });
  return {
    steps,
    toTokens: (values) =>
      atActions(
        ofAction.map((step) => values[step]),
        batch,
      ),
  };
}

/** The settings of an estimator are gamma, lam, normalizeStd and stepWeight. */
const ESTIMATORS = {
  grpo: (batch, { normalizeStd }) =>
    compareInGroups(batch, (scores) => standardize(scores, normalizeStd)),
  rloo: (batch) =>
    compareInGroups(batch, (scores) => {
      const others = scores.length > 1 ? scores.length / (scores.length - 1) : 0;
      return standardize(scores, false).map((centred) => others * centred);
    }),
  "reinforce++-baseline": (batch, { normalizeStd }) => {
    const centred = ofActions(ESTIMATORS.grpo(batch, { normalizeStd: false }), batch);
    return atActions(normalizeStd ? whiten(centred) : centred, batch);
  },
  remax: (batch) => {
    const scores = scoresOf(batch);
    const better = batch.trajectory.map(
      (number, b) => scores.get(number) - (batch.baseline[b] ?? NaN),
    );
    return toTokens(
      better.map((value) => (Number.isFinite(value) ? value : 0)),
      batch,
    );
  },
  "reinforce++": (batch, settings) => {
    const nothing = batch.rewards.map((row) => row.map(() => 0));
    return ESTIMATORS.ppo({ ...batch, values: nothing }, { ...settings, lam: 1 });
  },
  ppo: (batch, { gamma, lam, normalizeStd }) => {
    const numbers = ofActions(
      batch.mask.map((row, b) => row.map(() => batch.trajectory[b])),
      batch,
    );
    const advantages = gae(
      ofActions(batch.rewards, batch),
      ofActions(batch.values, batch),
      numbers,
      gamma,
      lam,
    );
    return atActions(normalizeStd ? whiten(advantages) : advantages, batch);
  },
  steppo: (batch, { gamma, lam, normalizeStd }) => {
    const { steps, toTokens: spread } = stepsOf(batch);
    const values = steps.map(({ row, first }) => batch.values[row][first]);
    const advantages = gae(
      steps.map((s) => s.reward),
      values,
      steps.map((s) => s.trajectory),
      gamma,
      lam,
    );
    return spread(normalizeStd ? whiten(advantages) : advantages);
  },
  gigpo: (batch, { gamma, normalizeStd, stepWeight }) => {
    const { steps, toTokens: spread } = stepsOf(batch);
    const zeros = steps.map(() => 0);
    const returns = gae(
      steps.map((s) => s.reward),
      zeros,
      steps.map((s) => s.trajectory),
      gamma,
      1,
    );
    const places = steps.map(({ row, first }) =>
      JSON.stringify([batch.groups[row], batch.states[row][first]]),
    );
    for (const met of membersOf(
      places,
      steps.map((_, s) => s),
    ).values()) {
      const numbers = [...met];
      const compared = standardize(
        numbers.map((s) => returns[s]),
        normalizeStd,
      );
      numbers.forEach((s, i) => (zeros[s] = compared[i]));
    }
    const [episode, step] = [ESTIMATORS.grpo(batch, { normalizeStd }), spread(zeros)];
    return episode.map((row, b) => row.map((value, t) => value + stepWeight * step[b][t]));
  },
};

// --------------------------------------------------------------------------------------------------- losses

/** Average log-ratios over each run of tokens with an equal number; run 0 has the unsampled tokens. */
function spanRatios(logRatio, runs) {
  const means = new Map(
    membersOf(
      runs,
      runs.map((_, t) => t),
    ),
  );
  for (const [run, places] of means)
    means.set(run, Math.exp(average([...places].map((t) => logRatio[t]))));
  return runs.map((run) => (run ? means.get(run) : 1));
}

/** Map the log-ratios of a row to ratios: one per token, step or sequence. */
const RATIOS = {
  token: (logRatio) => logRatio.map(Math.exp),
  step: (logRatio, mask) => {
    let run = 0;
    return spanRatios(
      logRatio,
      mask.map((acted, t) => (acted ? (run += Number(!mask[t - 1])) : 0)),
    );
  },
  sequence: (logRatio, mask) => spanRatios(logRatio, mask.map(Number)),
};

/** Compute PPO's clipped loss of a row's tokens, and its gradient with respect to their log-probabilities. */
function policyLoss(
  logRatio,
  advantages,
  mask,
  { clipLow, clipHigh, clipDual },
  ratios = RATIOS.token,
) {
  const clamped = logRatio.map((value, t) => (mask[t] ? Math.min(Math.max(value, -20), 20) : 0));
  const ratio = ratios(clamped, mask);
  const loss = [];
  const gradient = [];
  mask.forEach((acted, t) => {
    const advantage = acted ? advantages[t] : 0;
    const unclipped = -advantage * ratio[t];
    const clipped = -advantage * Math.min(Math.max(ratio[t], 1 - clipLow), 1 + clipHigh);
    const bound = clipDual > 1 && advantage < 0 ? -advantage * clipDual : Infinity;
    const larger = Math.max(unclipped, clipped);
    loss.push(Math.min(larger, bound));
    const stopped = clipped > unclipped || larger > bound || Math.abs(logRatio[t]) > 20;
    gradient.push(stopped ? 0 : unclipped);
  });
  return { loss, gradient };
}

/** Estimate KL(pi || ref) from d = log pi(x) - log ref(x) at a token x that pi sampled. */
const KL_ESTIMATORS = {
  k1: (d) => d,
  k2: (d) => d ** 2 / 2,
  k3: (d) => {
    const back = Math.min(Math.max(-d, -20), 20);
    return Math.min(Math.expm1(back) - back, 10);
  },
};

/** Weigh each token so that the sum of loss x weight is the aggregated loss. */
function lossWeights({ mask, trajectory }, mode, horizon) {
  const lengths = mask.map((row) => total(row.map(Number)));
  const tokens = new Map();
  trajectory.forEach((number, b) => tokens.set(number, (tokens.get(number) ?? 0) + lengths[b]));
  const episodes = [...tokens.values()].filter(Boolean).length;
  const divisor = {
    "token-mean": () => total(lengths),
    "seq-mean-token-mean": (b) => episodes * tokens.get(trajectory[b]),
    "seq-mean-token-sum": () => episodes,
    "seq-mean-token-sum-norm": () => episodes * horizon,
  }[mode];
  return mask.map((row, b) => row.map((acted) => (acted ? 1 / divisor(b) : 0)));
}

/** Divide the trainer's probability by the sampler's, at most `cap`: truncated importance sampling. */
const truncatedWeight = (trainer, sampler, cap) => Math.min(Math.exp(trainer - sampler), cap);
