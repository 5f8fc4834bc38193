"use strict";
/*
 * Sample a token, as model/sampling.py does. In: logits, and a random number. Out: a token with its log-probability. Next: episode.js.
 */

/**
 * Sample from softmax(logits / temperature) by inverting its cumulative distribution at `uniform` in [0, 1).
 * Temperature 0 takes the most likely token, measured at temperature 1.
 */
function sampleToken(logits, temperature, uniform) {
  const heat = temperature || 1;
  const most = logits.reduce((a, b) => Math.max(a, b));
  let total = 0;
  for (const logit of logits) total += Math.exp((logit - most) / heat);
  let token = logits.indexOf(most);
  if (temperature > 0) {
    let below = uniform * total;
    for (token = 0; token < logits.length - 1; token++) {
      below -= Math.exp((logits[token] - most) / heat);
      if (below < 0) break;
    }
  }
  return { token, logprob: (logits[token] - most) / heat - Math.log(total) };
}
