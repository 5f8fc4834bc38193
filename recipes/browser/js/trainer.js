"use strict";
/*
 * Call the trainer of c/trainer.c. In: arrays of JavaScript. Out: arrays, copied from the module's memory.
 *
 * Memory is a stack. Each call marks its top, puts arrays on it, and releases them. Growing replaces the buffer, so
 * views of it are made when they are needed and never kept.
 */

const LAYERS = 2;
const CONTEXT = 320;
const WIDTH = 128; // of the residual stream
const WORDS = 757;
const PADDED_WORDS = 760; // with rows of zeros
/**
 * The parameters in the order of c/trainer.c, with PyTorch's names and their sizes. Rows of zeros follow the embedding's
 * WORDS.
 */
const PARAMETERS = [
  ["embed.weight", PADDED_WORDS * WIDTH],
  ...Array.from({ length: LAYERS }, (_, layer) => [
    [`blocks.${layer}.input_norm.weight`, 128],
    [`blocks.${layer}.qkv.weight`, 384 * 128],
    [`blocks.${layer}.qkv.bias`, 384],
    [`blocks.${layer}.o.weight`, 128 * 128],
    [`blocks.${layer}.post_norm.weight`, 128],
    [`blocks.${layer}.gate_up.weight`, 512 * 128],
    [`blocks.${layer}.down.weight`, 128 * 256],
  ]).flat(),
  ["norm.weight", 128],
];

/** What the loss of a healthy run is made of; c/trainer.c explains the names. */
const LOSS = { clipLow: 0.2, clipHigh: 0.28, clipDual: 3, temperature: 1, kl: 0, imitate: false };
/** The optimiser's constants in RL; c/trainer.c explains them. Muon's learning rate of 0 leaves all weights to AdamW. */
const ADAMW = { beta2: 0.999, decay: 0, muon: 0 };

/** Write rows one after the other, and name the place of each action and of its logits. */
function flatten(rows, shift = 0) {
  const starts = [0];
  const [ids, positions, at, targets] = [[], [], [], []];
  const columns = { advantage: [], old: [], reference: [], weight: [] };
  for (const row of rows) {
    const start = ids.length;
    row.ids.forEach((id, t) => {
      ids.push(id);
      positions.push(t);
    });
    for (const action of row.actions) {
      at.push(start + action.place + shift - 1); // the token before it has its logits
      targets.push(row.ids[action.place]);
      for (const [name, list] of Object.entries(columns)) list.push(action[name] ?? 0);
    }
    starts.push(ids.length);
  }
  return { starts, ids, positions, at, targets, columns };
}

const TOO_LITTLE_MEMORY =
  "this device gave the page too little memory (300 MB); close other tabs and reload";

class Trainer {
  /** Compile the module. Raises an Error in words for the reader. */
  static async open(bytes, slots) {
    let instance;
    try {
      ({ instance } = await WebAssembly.instantiate(bytes, {}));
    } catch (error) {
      // A module that compiles, and has no room, raises a RangeError.
      if (error instanceof RangeError) throw new Error(TOO_LITTLE_MEMORY);
      throw new Error(
        "this browser cannot run WebAssembly with SIMD; update it (since 2023 all have it)",
      );
    }
    return new Trainer(instance.exports, slots);
  }

  constructor(module, slots) {
    this.module = module;
    this.slots = slots;
    this.updates = 0;
    if (!module.setup() || !module.open_cache(slots)) throw new Error(TOO_LITTLE_MEMORY);
    this.count = module.parameters();
  }

  floats(pointer, count) {
    return new Float32Array(this.module.memory.buffer, pointer, count);
  }

  /** Put a list on the stack, as float32 or int32. Returns its address. */
  put(list, Kind) {
    const pointer = this.module.allocate(4 * Math.max(list.length, 1));
    if (!pointer) throw new Error("the page ran out of memory; close other tabs and reload");
    new Kind(this.module.memory.buffer, pointer, list.length).set(list);
    return pointer;
  }

  putInts(list) {
    return this.put(list, Int32Array);
  }

  putFloats(list) {
    return this.put(list, Float32Array);
  }

  /** Run `task`, and release what it puts on the stack. */
  onStack(task) {
    const top = this.module.mark();
    try {
      return task();
    } finally {
      this.module.release(top);
    }
  }

  /** Return a copy of all weights, in the order of PARAMETERS. */
  weights() {
    return this.floats(this.module.weights(), this.count).slice();
  }

  setWeights(values) {
    this.floats(this.module.weights(), this.count).set(values);
    this.module.pack_weights();
  }

  /** Return the SHA-256 of the weights, which are little-endian float32 on every machine that runs WebAssembly. */
  weightsHash() {
    return this.sha256At(this.module.weights(), 4 * this.count);
  }

  /** Begin a run: these weights, no momentum, no update so far. */
  reset(weights) {
    this.module.forget();
    this.updates = 0;
    this.setWeights(weights);
  }

  /** Return weights and momentum after the updates so far: a copy, which another worker can go on from. */
  state() {
    const moments = [this.module.moment_1(), this.module.moment_2()];
    const copies = moments.map((pointer) => this.floats(pointer, this.count).slice());
    return { updates: this.updates, weights: this.weights(), moments: copies };
  }

  /** Go on from a state. */
  restore({ updates, weights, moments }, { beta2 } = ADAMW) {
    this.reset(weights);
    this.floats(this.module.moment_1(), this.count).set(moments[0]);
    this.floats(this.module.moment_2(), this.count).set(moments[1]);
    this.module.count_updates(updates, beta2);
    this.updates = updates;
  }

  sha256(bytes) {
    return this.onStack(() => {
      const pointer = this.module.allocate(bytes.length + 1);
      new Uint8Array(this.module.memory.buffer, pointer, bytes.length).set(bytes);
      return this.sha256At(pointer, bytes.length);
    });
  }

  sha256At(pointer, length) {
    return this.onStack(() => {
      const digest = this.module.allocate(32);
      this.module.sha256(pointer, length, digest);
      const bytes = new Uint8Array(this.module.memory.buffer, digest, 32);
      return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    });
  }

  /** Hash a text to the [low, high] halves of 64 bits, for the search. */
  blake2b(text) {
    const bytes = new TextEncoder().encode(text);
    return this.onStack(() => {
      const digest = this.module.allocate(8);
      const pointer = this.module.allocate(bytes.length + 1);
      new Uint8Array(this.module.memory.buffer, pointer, bytes.length).set(bytes);
      this.module.blake2b(pointer, bytes.length, digest);
      return Array.from(new Uint32Array(this.module.memory.buffer, digest, 2));
    });
  }

  /**
   * Read tokens (lists of ids, slots, positions), and sample after each of the tokens `rows`.
   * Returns tokens and their log-probabilities.
   */
  read({ ids, slots, positions, rows, uniforms }, temperature) {
    return this.onStack(() => {
      const inputs = [ids, slots, positions].map((list) => this.putInts(list));
      const at = this.putInts(rows);
      const noise = this.putFloats(uniforms);
      const [tokens, logprobs] = [0, 1].map(() => this.module.allocate(4 * rows.length));
      const count = rows.length;
      this.module.read(ids.length, ...inputs, count, at, noise, temperature, tokens, logprobs);
      return {
        tokens: Array.from(new Int32Array(this.module.memory.buffer, tokens, count)),
        logprobs: Array.from(this.floats(logprobs, count)),
      };
    });
  }

  copyCache(from, to, length) {
    this.module.copy_cache(from, to, length);
  }

  /**
   * Add the gradient of some rows to the shard's. A row has ids and `actions`: for each sampled token its place,
   * advantage, weight in the loss, and log-probability under the sampler and under the reference model.
   * Returns the loss and the log-probabilities of all actions, now.
   */
  differentiate(rows, loss, learn = true) {
    const { starts, ids, positions, at, targets, columns } = flatten(rows, loss.shift);
    return this.onStack(() => {
      const lists = [starts, ids, positions].map((list) => this.putInts(list));
      const places = [at, targets].map((list) => this.putInts(list));
      const numbers = Object.values(columns).map((list) => this.putFloats(list));
      const logprobs = this.module.allocate(4 * at.length + 4);
      const value = this.module.differentiate(
        rows.length, ...lists, at.length, ...places, ...numbers,
        loss.clipLow, loss.clipHigh, loss.clipDual, loss.temperature, loss.kl, Number(loss.imitate),
        Number(learn), logprobs,
      ); // prettier-ignore
      return { loss: value, logprobs: Array.from(this.floats(logprobs, at.length)) };
    });
  }

  /** Return a copy of the shard's gradient, and clear it: a worker sends it to another. */
  takeGradient() {
    const own = this.floats(this.module.gradient(), this.count);
    const copy = own.slice();
    own.fill(0);
    return copy;
  }

  /** Add a shard's gradient, computed here (no argument) or by another worker, to the total. */
  addShard(gradient) {
    if (gradient) this.floats(this.module.gradient(), this.count).set(gradient);
    this.module.add_shard();
  }

  /** Take the optimiser's step. Returns the gradient's norm. Raises an Error if it is not a number. */
  update(learningRate, largestNorm, { beta2, decay, muon } = ADAMW) {
    const norm = this.module.update(learningRate, largestNorm, beta2, decay, muon);
    if (!Number.isFinite(norm)) {
      throw new Error(
        "the gradient is no longer a number, so the run ended; the last good weights are kept",
      );
    }
    this.updates++;
    return norm;
  }
}
