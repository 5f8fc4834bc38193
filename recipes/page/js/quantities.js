"use strict";
/*
 * Compute what training computes, in float64 and in the same words: training/advantages.py,
 * training/losses.py, recipes/credit, recipes/robustness. tests/test_quantities.py compares them.
 *
 * A batch has rows of tokens (mask, rewards, values, steps, states) and one entry for each row
 * (groups, trajectory, baseline). Results are 0 where the mask is 0. Next: microscope.js.
 */

const total = (values) => values.reduce((a, b) => a + b, 0);
const average = (values) => total(values) / values.length;

/** Divide the squared deviations by n - 1, as torch and verl do. */
function variance(values) {
  const middle = average(values);
  return total(values.map((value) => (value - middle) ** 2)) / (values.length - 1);
}

/** Compute a number for each action token. */
function toTokens({ mask }, compute) {
  return mask.map((row, b) => row.map((acted, t) => (acted ? compute(b, t) : 0)));
}

/** Replace values with an equal key by `compare(these values)`. */
function compareWithin(keys, values, compare) {
  const compared = [];
  for (const places of Map.groupBy(keys.keys(), (i) => keys[i]).values()) {
    const results = compare(places.map((i) => values[i]));
    places.forEach((i, n) => (compared[i] = results[n]));
  }
  return compared;
}

// ------------------------------------------------------------------------------------ advantages

/** Sum the rewards of each row's trajectory. */
function scoresOf(batch) {
  const earned = batch.rewards.map((row, b) => total(row.filter((_, t) => batch.mask[b][t])));
  return compareWithin(batch.trajectory, earned, (rows) => rows.map(() => total(rows)));
}

/** Give each trajectory `compare(scores of its group)`, and copy that to its action tokens. */
function compareScores(batch, compare) {
  const scores = scoresOf(batch);
  const first = [...new Set(batch.trajectory)].map((number) => batch.trajectory.indexOf(number));
  const groups = first.map((b) => batch.groups[b]);
  const compared = compareWithin(
    groups,
    first.map((b) => scores[b]),
    compare,
  );
  const credit = new Map(first.map((b, i) => [batch.trajectory[b], compared[i]]));
  return toTokens(batch, (b) => credit.get(batch.trajectory[b]));
}

/** Subtract the mean; optionally divide by the standard deviation. Equal scores give exactly 0. */
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
  const [middle, scale] = [average(values), 1 / Math.sqrt(variance(values) + 1e-8)];
  return values.map((value) => (value - middle) * scale);
}

/** Run generalised advantage estimation over actions (tokens or steps), ordered by trajectory. */
function gae(actions, gamma, lam) {
  let next = null;
  const backwards = actions.toReversed().map(({ reward, value, trajectory }) => {
    const after = next?.trajectory === trajectory ? next : { value: 0, advantage: 0 };
    const advantage = reward + gamma * (after.value + lam * after.advantage) - value;
    next = { value, advantage, trajectory };
    return advantage;
  });
  return backwards.toReversed();
}

/** Make each token a step of its own. */
const tokensAsSteps = (batch) => ({ ...batch, steps: toTokens(batch, (_, t) => t) });

/** List the steps as actions, with the state and the value at their first tokens. */
function stepsOf({ mask, rewards, values, steps, states, groups, trajectory }) {
  const found = [];
  const numbers = mask.map((row, b) => {
    let latest = -1;
    return row.map((acted, t) => {
      if (acted && steps[b][t] > latest) {
        latest = steps[b][t];
        const place = JSON.stringify([groups[b], states[b][t]]);
        found.push({ reward: 0, value: values[b][t], trajectory: trajectory[b], place });
      }
      if (acted) found.at(-1).reward += rewards[b][t];
      return found.length - 1;
    });
  });
  return { steps: found, spread: (credit) => toTokens({ mask }, (b, t) => credit[numbers[b][t]]) };
}

/** The settings of an estimator are gamma, lam, normalizeStd and stepWeight. */
const ESTIMATORS = {
  grpo: (batch, { normalizeStd }) =>
    compareScores(batch, (scores) => standardize(scores, normalizeStd)),
  rloo: (batch) =>
    compareScores(batch, (scores) => {
      const others = scores.length > 1 ? scores.length / (scores.length - 1) : 0;
      return standardize(scores, false).map((centred) => others * centred);
    }),
  "reinforce++-baseline": (batch, { normalizeStd }) => {
    const centred = ESTIMATORS.grpo(batch, { normalizeStd: false });
    const credit = centred.flatMap((row, b) => row.filter((_, t) => batch.mask[b][t]));
    return normalizeStd ? stepsOf(tokensAsSteps(batch)).spread(whiten(credit)) : centred;
  },
  remax: (batch) => {
    const scores = scoresOf(batch);
    return toTokens(batch, (b) => scores[b] - (batch.baseline[b] ?? scores[b]));
  },
  "reinforce++": (batch, settings) => {
    const nothing = batch.rewards.map((row) => row.map(() => 0));
    return ESTIMATORS.ppo({ ...batch, values: nothing }, { ...settings, lam: 1 });
  },
  ppo: (batch, settings) => ESTIMATORS.steppo(tokensAsSteps(batch), settings),
  steppo: (batch, { gamma, lam, normalizeStd }) => {
    const { steps, spread } = stepsOf(batch);
    const advantages = gae(steps, gamma, lam);
    return spread(normalizeStd ? whiten(advantages) : advantages);
  },
  gigpo: (batch, { gamma, normalizeStd, stepWeight = 1 }) => {
    const { steps, spread } = stepsOf(batch);
    const places = steps.map(({ place }) => place);
    const unvalued = steps.map((step) => ({ ...step, value: 0 }));
    const returns = gae(unvalued, gamma, 1);
    const compare = (met) => standardize(met, normalizeStd);
    const ofStep = spread(compareWithin(places, returns, compare));
    const ofEpisode = ESTIMATORS.grpo(batch, { normalizeStd });
    return toTokens(batch, (b, t) => ofEpisode[b][t] + stepWeight * ofStep[b][t]);
  },
};

// ---------------------------------------------------------------------------------------- losses

/** Average log-ratios over each run of sampled tokens with an equal number. */
function spanRatios(logRatio, runs) {
  return compareWithin(runs, logRatio, (span) => span.map(() => Math.exp(average(span))));
}

/** Number the runs of action tokens from 0, and give all other tokens -1. */
function runsOf(mask) {
  let run = -1;
  return mask.map((acted, t) => (acted ? (run += Number(!mask[t - 1])) : -1));
}

/** Map the log-ratios of a row to ratios: one per token, step or sequence. */
const RATIOS = {
  token: (logRatio) => logRatio.map(Math.exp),
  step: (logRatio, mask) => spanRatios(logRatio, runsOf(mask)),
  sequence: (logRatio, mask) => spanRatios(logRatio, mask.map(Number)),
};

/** Compute PPO's clipped loss of a row's tokens, and its gradient in their log-probabilities. */
function policyLoss(logRatio, advantages, mask, clip, ratios = RATIOS.token) {
  const bounded = logRatio.map((value, t) => (mask[t] ? Math.min(Math.max(value, -20), 20) : 0));
  const ratio = ratios(bounded, mask);
  const [loss, gradient] = [[], []];
  mask.forEach((acted, t) => {
    const advantage = acted ? advantages[t] : 0;
    const unclipped = -advantage * ratio[t];
    const clipped = -advantage * Math.min(Math.max(ratio[t], 1 - clip.low), 1 + clip.high);
    const bound = clip.dual > 1 && advantage < 0 ? -advantage * clip.dual : Infinity;
    const larger = Math.max(unclipped, clipped);
    const stopped = clipped > unclipped || larger > bound || Math.abs(logRatio[t]) > 20;
    loss.push(Math.min(larger, bound));
    gradient.push(stopped ? 0 : unclipped);
  });
  return { loss, gradient };
}

/** Map a mode to the divisor of a token's loss, given its episode's number of tokens. */
const LOSS_DIVISORS = {
  "token-mean": ({ tokens }) => tokens,
  "seq-mean-token-mean": ({ episodes }, length) => episodes * length,
  "seq-mean-token-sum": ({ episodes }) => episodes,
  "seq-mean-token-sum-norm": ({ episodes, horizon }) => episodes * horizon,
};

/** Weigh each token so that the sum of loss x weight is the aggregated loss. */
function lossWeights(batch, mode, horizon) {
  const lengths = batch.mask.map((row) => total(row.map(Number)));
  const ofEpisode = compareWithin(batch.trajectory, lengths, (rows) => rows.map(() => total(rows)));
  const episodes = new Set(batch.trajectory.filter((_, b) => lengths[b])).size;
  const counts = { tokens: total(lengths), episodes, horizon };
  return toTokens(batch, (b) => 1 / LOSS_DIVISORS[mode](counts, ofEpisode[b]));
}

/** Divide the trainer's probability by the sampler's, at most `cap`: truncated importance sampling. */
const truncatedWeight = (trainer, sampler, cap) => Math.min(Math.exp(trainer - sampler), cap);
