"use strict";
/*
 * Compute a Qwen2 decoder, as model/decoder.py does: pre-norm, rotary positions, SwiGLU, tied output.
 * In: token ids. Out: logits. Next: sampling.js. Sums are in float64, and everything that is kept is float32.
 */

class Decoder {
  constructor(shape, weights) {
    this.shape = shape;
    this.weights = weights;
    // Rounded where PyTorch rounds them.
    const exponent = (i) => Math.fround((-2 * i) / shape.head_dim);
    this.frequencies = Array.from({ length: shape.head_dim / 2 }, (_, i) =>
      Math.fround(shape.rope_theta ** exponent(i)),
    );
  }

  /** Return an empty cache of keys and values for one conversation. */
  newCache(maxContext) {
    const empty = () => new Float32Array(maxContext * this.shape.kv_heads * this.shape.head_dim);
    const layers = Array.from({ length: this.shape.layers }, () => ({
      keys: empty(),
      values: empty(),
    }));
    return { layers, length: 0 };
  }

  /** Read the tokens of `ids` that the cache lacks, at least one, and return the next token's logits. */
  read(cache, ids) {
    let hidden;
    while (cache.length < ids.length) hidden = this.step(cache, ids[cache.length]);
    return product(this.weights["embed.weight"], hidden);
  }

  /** Read one more token and return its hidden state after the last norm. */
  step(cache, id) {
    const { hidden_size: d, intermediate_size: inner, rms_norm_eps: eps } = this.shape;
    const position = cache.length++;
    const angles = this.frequencies.map((frequency) => Math.fround(position * frequency));
    const turns = angles.map((angle) => [Math.cos(angle), Math.sin(angle)].map(Math.fround));
    const x = this.weights["embed.weight"].slice(id * d, (id + 1) * d);
    cache.layers.forEach((kept, layer) => {
      const own = (name) => this.weights[`blocks.${layer}.${name}`];
      const normed = norm(x, own("input_norm.weight"), eps);
      const qkv = product(own("qkv.weight"), normed, own("qkv.bias"));
      add(x, product(own("o.weight"), this.attend(kept, qkv, position, turns)));
      const gateUp = product(own("gate_up.weight"), norm(x, own("post_norm.weight"), eps));
      const gated = new Float32Array(inner);
      for (let i = 0; i < inner; i++) {
        gated[i] = (gateUp[i] / (1 + Math.exp(-gateUp[i]))) * gateUp[inner + i]; // silu(gate) * up
      }
      add(x, product(own("down.weight"), gated));
    });
    return norm(x, this.weights["norm.weight"], eps);
  }

  /** Keep the token's key and value, and attend to all tokens so far. */
  attend({ keys, values }, qkv, position, turns) {
    const { heads, kv_heads: kvHeads, head_dim: width } = this.shape;
    const row = kvHeads * width;
    for (let head = 0; head < heads + kvHeads; head++) rotate(qkv, head * width, turns);
    keys.set(qkv.subarray(heads * width, heads * width + row), position * row);
    values.set(qkv.subarray(heads * width + row), position * row);
    const out = new Float32Array(heads * width);
    const scores = new Float64Array(position + 1);
    for (let head = 0; head < heads; head++) {
      const shared = Math.floor((head * kvHeads) / heads) * width; // queries share keys in groups
      for (let t = 0; t <= position; t++) {
        let score = 0;
        for (let i = 0; i < width; i++) score += qkv[head * width + i] * keys[t * row + shared + i];
        scores[t] = score / Math.sqrt(width);
      }
      const most = scores.reduce((a, b) => Math.max(a, b));
      let total = 0;
      for (let t = 0; t <= position; t++) total += scores[t] = Math.exp(scores[t] - most);
      for (let i = 0; i < width; i++) {
        let mean = 0;
        for (let t = 0; t <= position; t++) mean += scores[t] * values[t * row + shared + i];
        out[head * width + i] = mean / total;
      }
    }
    return out;
  }
}

/** Rotate each pair (x_i, x_{i + width/2}) of a head by its angle, given as [cos, sin]. */
function rotate(x, start, turns) {
  turns.forEach(([cos, sin], i) => {
    const [first, second] = [start + i, start + turns.length + i];
    const [a, b] = [x[first], x[second]];
    x[first] = a * cos - b * sin;
    x[second] = b * cos + a * sin;
  });
}

/** Multiply a matrix, stored by rows, with a vector. Four sums at a time keep the processor busy. */
function product(matrix, x, bias) {
  const columns = x.length;
  const out = new Float32Array(matrix.length / columns);
  for (let row = 0; row < out.length; row++) {
    const start = row * columns;
    let [a, b, c, d] = [0, 0, 0, 0];
    for (let i = 0; i < columns; i += 4) {
      a += matrix[start + i] * x[i];
      b += matrix[start + i + 1] * x[i + 1];
      c += matrix[start + i + 2] * x[i + 2];
      d += matrix[start + i + 3] * x[i + 3];
    }
    out[row] = a + b + (c + d) + (bias ? bias[row] : 0);
  }
  return out;
}

function norm(x, weight, eps) {
  let squares = 0;
  for (let i = 0; i < x.length; i++) squares += x[i] * x[i];
  const scale = 1 / Math.sqrt(squares / x.length + eps);
  return x.map((value, i) => value * scale * weight[i]);
}

function add(x, other) {
  for (let i = 0; i < x.length; i++) x[i] += other[i];
}
