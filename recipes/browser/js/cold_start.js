"use strict";
/*
 * Teach random weights what an explorer shows, as cold_start/clone.py and cold_start/stage.py do. In: demonstrations. Out:
 * weights from which RL can start. Next: worker.js begins RL with them.
 *
 * RL cannot start from random weights: they never earn a reward. The explorer (recipes/laptop/explorer.py) plans, searches
 * and quotes, and no play of it solves a question of two or three searches. Names are exchanged in each play, so only
 * copying can be learned. The initial weights are those of cold_start/tiny_model.py, which says why they look so.
 */

/** The settings of preset smoke. */
const COLD_START = {
  steps: 450,
  tokens: 1024, // per step
  learningRate: 1e-2, // of AdamW, for the embedding, norms and biases
  matrixRate: 2e-3, // of Muon, for the layers' matrices
  warmUp: 20, // steps
  finalShare: 0.05, // of the learning rates
  largestNorm: 1,
  optimizer: { beta2: 0.98, decay: 0.01 },
  switches: [],
};
const IMITATION = { ...LOSS, imitate: true };
/** Places of random numbers, after those of learn.js. */
const [FIRST_WEIGHTS, ORDER_OF_DEMONSTRATIONS, NAMES] = [5, 6, 7];

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
  fill(parts.get("embed.weight").subarray(0, WORDS * D), 0.1);
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
  const [first, bias] = ["weight", "bias"].map((name) => parts.get(`blocks.0.qkv.${name}`));
  const output = parts.get("blocks.0.o.weight");
  const second = parts.get("blocks.1.qkv.weight");
  /** Let a head of layer 0 attend to the token some places back, by its biases alone. */
  const lookBack = (head, distance) => {
    for (let i = 0; i < HEAD / 2; i++) {
      const [cosine, sine] = turnBy(distance * frequencyOf(i, HEAD));
      bias[head * HEAD + i] = PREVIOUS * cosine;
      bias[head * HEAD + HEAD / 2 + i] = -PREVIOUS * sine;
      bias[D + head * HEAD + i] = PREVIOUS;
    }
    for (let i = head * HEAD * D; i < (head + 1) * HEAD * D; i++) {
      first[i] *= 0.1;
      first[D * D + i] *= 0.1;
    }
  };
  /** Let a head of layer 0 write into a subspace of its own. Returns the subspace. */
  const writeApart = (head) => {
    const subspace = new Float32Array(HEAD * D);
    fill(subspace, unit);
    subspace.forEach((value, i) => {
      output[(i % D) * D + head * HEAD + Math.floor(i / D)] = OUTPUT_SCALE * value;
    });
    return subspace;
  };
  const size = HEAD * D; // of a head's part of a matrix
  // Layer 0, head 0 writes the token before into each place. Layer 1, head 0 compares the current token with it.
  lookBack(0, 1);
  const before = writeApart(0);
  for (let i = 0; i < size; i++) {
    second[i] = INDUCTION * first[2 * D * D + i];
    second[D * D + i] = INDUCTION * before[i];
  }
  // A second pair of heads compares the token before the current one, too: some names begin with the same syllable.
  lookBack(1, 2);
  const twoBefore = writeApart(1);
  for (let i = 0; i < size; i++) {
    first[2 * D * D + size + i] = first[2 * D * D + i];
    second[size + i] = (INDUCTION / 4) * before[i];
    second[D * D + size + i] = INDUCTION * twoBefore[i];
  }
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

/** Return cosine and sine of an angle up to 2, by their series. */
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
  /** Begin with random weights. `plays` has the demonstrations, with questions and passages. */
  constructor(trainer, agent, plays, seed, recipe = {}) {
    this.recipe = { ...COLD_START, ...recipe };
    Object.assign(this, { trainer, agent, plays, seed, step: 0, order: [], epoch: 0 });
    this.remasks = this.recipe.switches.map((name) => SWITCHES[name].remask).filter(Boolean);
    this.pieces = new Map(); // text -> ids: the same passages and turns come again and again
    // Each play comes with several sets of names.
    this.names = plays.plays.flatMap((_, play) =>
      Array.from({ length: plays.renames }, (_, copy) => [play, copy]),
    );
    trainer.reset(initialWeights(seed));
  }

  get steps() {
    return this.recipe.steps;
  }

  /** Return all that another worker needs to go on after this step. */
  state() {
    return { step: this.step, ...this.trainer.state() };
  }

  /** Go on after the step of a state. The demonstrations of the steps before it are skipped. */
  restore({ step, ...state }) {
    for (; this.step < step; this.step++) this.nextRows();
    this.trainer.restore(state, this.recipe.optimizer);
  }

  /** Take one step: imitate some demonstrations. Returns the step's number and its loss. */
  takeStep() {
    const { recipe, trainer } = this;
    const rows = this.nextRows();
    const count = rows.reduce((sum, { actions }) => sum + actions.length, 0);
    for (const { actions } of rows) for (const action of actions) action.weight = 1 / count;
    const { loss } = trainer.differentiate(rows, IMITATION);
    trainer.addShard();
    const warm = Math.min(1, (this.step + 1) / recipe.warmUp);
    const share = warm * Math.max(recipe.finalShare, 1 - this.step / recipe.steps);
    trainer.update(recipe.learningRate * share, recipe.largestNorm, {
      ...recipe.optimizer,
      muon: recipe.matrixRate * share,
    });
    this.step++;
    return { step: this.step, loss, done: this.step === recipe.steps };
  }

  /** Return the next demonstrations in random order, of about as many tokens as a step has. */
  nextRows() {
    const rows = [];
    for (let sum = 0; sum < this.recipe.tokens; sum += rows.at(-1).ids.length) {
      if (!this.order.length)
        this.order = shuffled(this.names, this.seed, ORDER_OF_DEMONSTRATIONS, this.epoch++);
      const [play, copy] = this.order.pop();
      const { ids, actions } = this.rowOf(this.plays.plays[play]);
      rows.push({ ids: this.rename(ids, play, copy), actions });
    }
    return rows;
  }

  /** Exchange the syllables of all names for others, one to one: `rename` of recipes/laptop/demonstrator.py. */
  rename(ids, play, copy) {
    const others = new Map();
    this.plays.syllables.forEach((syllables, part) => {
      const mixed = shuffled(syllables, this.seed, NAMES, play, copy, part);
      syllables.forEach((id, i) => others.set(id, mixed[i]));
    });
    return ids.map((id) => others.get(id) ?? id);
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
