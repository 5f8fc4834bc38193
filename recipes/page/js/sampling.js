"use strict";
/*
 * Sample tokens, as rollout/sampling.py does, from the same random numbers: equal seeds give Python's episode.
 * In: logits. Out: a token with its log-probability. Next: episode.js.
 */

/**
 * Sample from softmax(logits / temperature) by inverting its cumulative distribution at `uniform` in [0, 1).
 * Temperature 0 takes the most likely token, measured at temperature 1. `others` are the most likely tokens.
 */
function sampleToken(logits, temperature, uniform) {
  const heat = temperature === 0 ? 1 : temperature;
  const most = logits.reduce((a, b) => Math.max(a, b));
  let total = 0;
  for (let id = 0; id < logits.length; id++) total += Math.exp((logits[id] - most) / heat);
  const logprob = (id) => (logits[id] - most) / heat - Math.log(total);
  let token = logits.indexOf(most);
  if (temperature > 0) {
    let below = uniform * total;
    for (token = 0; token < logits.length - 1; token++) {
      below -= Math.exp((logits[token] - most) / heat);
      if (below < 0) break;
    }
  }
  return { token, logprob: logprob(token), others: likeliest(logits, 4, logprob) };
}

/** List the `count` most likely tokens, the most likely first. */
function likeliest(logits, count, logprob) {
  const best = [];
  for (let id = 0; id < logits.length; id++) {
    if (best.length === count && logits[id] <= logits[best.at(-1)]) continue;
    let place = best.length;
    while (place > 0 && logits[best[place - 1]] < logits[id]) place--;
    best.splice(place, 0, id);
    best.length = Math.min(best.length, count);
  }
  return best.map((id) => ({ id, logprob: logprob(id) }));
}

/** Draw one uniform float32 in [0, 1) for each token of a turn: numpy's Philox4x64-10 with this key. */
function drawNoise(seed, count) {
  const word = (1n << 64n) - 1n;
  const noise = [];
  for (let counter = 1n; noise.length < count; counter++) {
    let [a, b, c, d] = [counter, 0n, 0n, 0n];
    let [left, right] = [seed, 0n];
    for (let round = 0; round < 10; round++) {
      const first = a * 0xd2e7470ee14c6c93n;
      const second = c * 0xca5a826395121157n;
      [a, b, c, d] = [
        (second >> 64n) ^ b ^ left,
        second & word,
        (first >> 64n) ^ d ^ right,
        first & word,
      ];
      [left, right] = [(left + 0x9e3779b97f4a7c15n) & word, (right + 0xbb67ae8584caa73bn) & word];
    }
    for (const value of [a, b, c, d]) {
      for (const half of [value & 0xffffffffn, value >> 32n])
        noise.push(Number(half >> 8n) / 2 ** 24);
    }
  }
  return noise.slice(0, count);
}

/** Derive a 64-bit seed from a path such as (seed, turn). */
function deriveSeed(...parts) {
  const [low, high] = blake2b64(parts.join("/"));
  return (BigInt(high) << 32n) | BigInt(low);
}
