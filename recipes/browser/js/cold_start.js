"use strict";
/*
 * Teach random weights to play badly, as cold_start/clone.py and cold_start/stage.py do. In: demonstrations. Out: weights
 * from which RL can start. Next: worker.js begins RL with them.
 *
 * RL cannot start from random weights: they never earn a reward. Two phases of imitation come first. In the first, clean
 * one-hop episodes teach to copy names from passages. In the second, a demonstrator plays all kinds of questions, and
 * mostly stops too early. The initial weights are those of cold_start/tiny_model.py, which says why they look so.
 */

/** The settings of preset laptop. */
const COLD_START = {
  phases: [
    { name: "copy", steps: 600, tokens: 1024 },
    { name: "mix", steps: 1600, tokens: 2048 },
  ],
  learningRate: 1.5e-3,
  warmUp: 20, // steps
  finalShare: 0.05, // of the learning rate
  largestNorm: 1,
  optimizer: { beta2: 0.98, decay: 0.01 },
  switches: [],
};
const IMITATION = { ...LOSS, imitate: true };
/** Places of random numbers, after those of learn.js. */
const [FIRST_WEIGHTS, ORDER_OF_DEMONSTRATIONS] = [5, 6];

/** Make initial weights that soon learn to copy: `init_weights` of cold_start/tiny_model.py, with other random numbers. */
function initialWeights(seed) {
  const [D, HEAD, INNER] = [128, 32, 256];
  const [OUTPUT_SCALE, INDUCTION, PREVIOUS] = [0.2, 2, 6];
  const parts = new Map(PARAMETERS.map(([name, count]) => [name, new Float32Array(count)]));
  let drawn = 0;
  // The sum of twelve uniform numbers has variance 1, and needs no logarithm.
  const normal = () => {
    let sum = -6;
    for (let i = 0; i < 12; i++) sum += uniformAt(seed, FIRST_WEIGHTS, drawn, i);
    drawn++;
    return sum;
  };
  const fill = (array, deviation) => array.forEach((_, i) => (array[i] = deviation * normal()));
  const unit = 1 / Math.sqrt(D);
  fill(parts.get("embed.weight"), 0.1);
  for (let layer = 0; layer < LAYERS; layer++) {
    const part = (name) => parts.get(`blocks.${layer}.${name}`);
    for (const name of ["input_norm.weight", "post_norm.weight"]) part(name).fill(1);
    fill(part("qkv.weight"), unit);
    fill(part("gate_up.weight"), unit);
    fill(part("down.weight"), OUTPUT_SCALE / Math.sqrt(INNER));
    // Attention begins by copying what it attends to: the output matrix is the transpose of the values' matrix.
    const values = part("qkv.weight").subarray(2 * D * D);
    part("o.weight").forEach(
      (_, i, o) => (o[i] = OUTPUT_SCALE * values[(i % D) * D + Math.floor(i / D)]),
    );
  }
  parts.get("norm.weight").fill(1);
  // Layer 0, head 0 attends one position back, by its biases alone.
  const first = parts.get("blocks.0.qkv.weight");
  const bias = parts.get("blocks.0.qkv.bias");
  for (let i = 0; i < HEAD / 2; i++) {
    const [cosine, sine] = turnBy(frequencyOf(i, HEAD));
    bias[i] = PREVIOUS * cosine;
    bias[HEAD / 2 + i] = -PREVIOUS * sine;
    bias[D + i] = PREVIOUS;
  }
  for (let i = 0; i < HEAD * D; i++) {
    first[i] *= 0.1;
    first[D * D + i] *= 0.1;
  }
  // It writes into a subspace of its own; layer 1, head 0 compares the current token with it.
  const subspace = new Float32Array(HEAD * D);
  fill(subspace, unit);
  const output = parts.get("blocks.0.o.weight");
  const second = parts.get("blocks.1.qkv.weight");
  subspace.forEach((value, i) => {
    output[(i % D) * D + Math.floor(i / D)] = OUTPUT_SCALE * value;
    second[i] = INDUCTION * first[2 * D * D + i];
    second[D * D + i] = INDUCTION * value;
  });
  const weights = new Float32Array(PARAMETERS.reduce((sum, [, count]) => sum + count, 0));
  let place = 0;
  for (const part of parts.values()) {
    weights.set(part, place);
    place += part.length;
  }
  return weights;
}

/** Return 10000^(-2i / head): the square root of the square root of 10 divides it by itself, eight times over. */
function frequencyOf(i, head) {
  const ratio = 1 / Math.sqrt(Math.sqrt(10)); // 10000^(-2 / 32)
  let frequency = 1;
  for (let k = 0; k < i * (32 / head); k++) frequency *= ratio;
  return frequency;
}

/** Return cosine and sine of an angle up to 1, by their series. */
function turnBy(angle) {
  let [cosine, sine, term] = [0, 0, 1];
  for (let i = 1; i < 24; i += 2) {
    cosine += term;
    term = (term * angle) / i;
    sine += term;
    term = (-term * angle) / (i + 1);
  }
  return [cosine, sine];
}

/** Unpack the demonstrations that world.py packed. */
async function unpackPlays(base64) {
  const packed = Uint8Array.from(atob(base64.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

class ColdStart {
  /** Begin with random weights. `plays` has the demonstrations of both phases, with questions and passages. */
  constructor(trainer, agent, plays, seed, recipe = {}) {
    this.recipe = { ...COLD_START, ...recipe };
    Object.assign(this, { trainer, agent, plays, seed, phase: 0, step: 0, order: [], epoch: 0 });
    this.remasks = this.recipe.switches.map((name) => SWITCHES[name].remask).filter(Boolean);
    this.pieces = new Map(); // text -> ids: the same passages and turns come again and again
    trainer.reset(initialWeights(seed));
  }

  /** Return the number of steps of both phases. */
  get steps() {
    return this.recipe.phases.reduce((sum, { steps }) => sum + steps, 0);
  }

  /** Return all that another worker needs to go on after this step. */
  state() {
    return { phase: this.phase, step: this.step, ...this.trainer.state() };
  }

  /** Go on after the step of a state. The demonstrations of the steps before it are skipped. */
  restore({ phase, step, ...state }) {
    const { phases, optimizer } = this.recipe;
    this.phase = phase;
    for (; this.step < step; this.step++) this.nextRows(phases[phase]);
    this.trainer.restore(state, optimizer);
  }

  /** Take one step: imitate some demonstrations. Returns the step's number in both phases, and its loss. */
  takeStep() {
    const { recipe, trainer } = this;
    const { name, steps } = recipe.phases[this.phase];
    const rows = this.nextRows(recipe.phases[this.phase]);
    const count = rows.reduce((sum, { actions }) => sum + actions.length, 0);
    for (const { actions } of rows) for (const action of actions) action.weight = 1 / count;
    const { loss } = trainer.differentiate(rows, IMITATION);
    trainer.addShard();
    const warm = Math.min(1, (this.step + 1) / recipe.warmUp);
    const rate = recipe.learningRate * warm * Math.max(recipe.finalShare, 1 - this.step / steps);
    trainer.update(rate, recipe.largestNorm, recipe.optimizer);
    this.step++;
    const before = recipe.phases.slice(0, this.phase).reduce((sum, phase) => sum + phase.steps, 0);
    const figures = { phase: name, step: before + this.step, loss };
    if (this.step === steps) {
      // Each phase has an optimiser of its own.
      Object.assign(this, { phase: this.phase + 1, step: 0, order: [], epoch: 0 });
      trainer.reset(trainer.weights());
    }
    return { ...figures, done: this.phase === recipe.phases.length };
  }

  /** Return the next demonstrations in random order, of about `tokens` tokens. */
  nextRows({ name, tokens }) {
    const rows = [];
    for (let sum = 0; sum < tokens; sum += rows.at(-1).ids.length) {
      if (!this.order.length) {
        const place = [this.seed, ORDER_OF_DEMONSTRATIONS, this.phase, this.epoch++];
        this.order = shuffled(this.plays[name], ...place);
      }
      rows.push(this.rowOf(this.order.pop()));
    }
    return rows;
  }

  /** Turn a play, [question, turn, results, turn, ...], into a row whose actions are the turns' tokens. */
  rowOf([question, ...turns]) {
    const { agent, plays } = this;
    const ids = [...this.idsOf(plays.questions[question], (text) => agent.chat.promptIds(text))];
    let places = [];
    for (const turn of turns) {
      const start = ids.length;
      if (typeof turn === "string") {
        ids.push(...this.idsOf(turn, (text) => this.turnIds(text)));
        for (let place = start; place < ids.length; place++) places.push(place);
      } else {
        const content = turn.map((passage) => plays.passages[passage]).join("\n") || "no results";
        ids.push(...this.idsOf(content, (text) => agent.chat.continuationIds([text], true)));
      }
    }
    for (const remask of this.remasks) places = remask({ ids }, places, agent);
    return { ids, actions: places.map((place) => ({ place, advantage: 1 })) };
  }

  /** Encode a demonstrator's turn, which may spell control tokens, and the token that ends it. */
  turnIds(text) {
    const { tokenizer, stopIds } = this.agent.chat;
    const parts = text.split(/(<\/?[a-z_]+>)/).filter(Boolean);
    const ids = parts.flatMap((part) => tokenizer.controls.get(part) ?? tokenizer.encode(part));
    return [...ids, Math.max(...stopIds)];
  }

  idsOf(text, encode) {
    if (!this.pieces.has(text)) this.pieces.set(text, encode(text));
    return this.pieces.get(text);
  }
}
