"use strict";
/*
 * Make random numbers from counters. In: a seed and the place where a number is used. Out: the number.
 *
 * A number belongs to its place (seed, step, question, sample, token), as in model/sampling.py: it does not depend on
 * what was drawn before, so any number of workers, in any order, plays the same episodes. Whole numbers only, so all
 * engines agree. The mixing steps are those of MurmurHash3's finish.
 */

/** Mix whole numbers to one of 32 bits. */
function mix(...values) {
  let hash = 0x9e3779b9;
  for (const value of values) {
    hash = Math.imul(hash ^ value, 0x85ebca6b);
    hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
    hash ^= hash >>> 16;
    hash = Math.imul(hash, 0x85ebca6b) + 0x165667b1;
    hash ^= hash >>> 15;
  }
  return hash >>> 0;
}

/** Return a number in [0, 1) with 24 bits, as many as float32 holds. */
const uniformAt = (...place) => (mix(...place) >>> 8) / 16777216;

/** Shuffle a list (Fisher and Yates). */
function shuffled(list, ...place) {
  const order = [...list];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(uniformAt(...place, i) * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
