"use strict";
/*
 * Compute a Qwen2 decoder, as rollout/decoder.py does: pre-norm, rotary positions, SwiGLU, tied output.
 * In: one token id after the other. Out: hidden states and logits. Next: sampling.js. Sums are in float64, and
 * everything that is kept is float32.
 */

class Decoder {
  constructor(shape, weights) {
    this.shape = shape;
    this.weights = weights;
    this.blocks = Array.from({ length: shape.layers }, (_, layer) => {
      const own = (name) => weights[`blocks.${layer}.${name}`];
      return {
        inputNorm: own("input_norm.weight"),
        qkv: own("qkv.weight"),
        bias: own("qkv.bias"),
        o: own("o.weight"),
        postNorm: own("post_norm.weight"),
        gateUp: own("gate_up.weight"),
        down: own("down.weight"),
      };
    });
    [this.cos, this.sin] = ropeTables(shape);
  }

  /** Return an empty cache of keys and values for one conversation. */
  newCache(maxContext) {
    const empty = () => new Float32Array(maxContext * this.shape.kv_heads * this.shape.head_dim);
    const layers = this.blocks.map(() => ({ keys: empty(), values: empty() }));
    return { layers, ids: [] };
  }

  /** Read the tokens of `ids` that the cache lacks, and return the last hidden state. */
  read(cache, ids) {
    let known = 0;
    while (known < cache.ids.length && known < ids.length && cache.ids[known] === ids[known])
      known++;
    // At least one token must be read, because the cache has no hidden states.
    cache.ids.length = Math.min(known, ids.length - 1);
    let hidden;
    while (cache.ids.length < ids.length) hidden = this.step(cache, ids[cache.ids.length]);
    return hidden;
  }

  /** Read one more token and return its hidden state after the last norm. */
  step(cache, id) {
    const { hidden_size: d, intermediate_size: inner, rms_norm_eps: eps } = this.shape;
    const position = cache.ids.length;
    cache.ids.push(id);
    const x = this.weights["embed.weight"].slice(id * d, (id + 1) * d);
    this.blocks.forEach((block, layer) => {
      const qkv = product(block.qkv, norm(x, block.inputNorm, eps), block.bias);
      const attended = this.attend(cache.layers[layer], qkv, position);
      add(x, product(block.o, attended));
      const gateUp = product(block.gateUp, norm(x, block.postNorm, eps));
      const gated = new Float32Array(inner);
      for (let i = 0; i < inner; i++) {
        gated[i] = (gateUp[i] / (1 + Math.exp(-gateUp[i]))) * gateUp[inner + i]; // silu(gate) * up
      }
      add(x, product(block.down, gated));
    });
    return norm(x, this.weights["norm.weight"], eps);
  }

  /** Keep the token's key and value, and attend to all tokens so far. */
  attend({ keys, values }, qkv, position) {
    const { heads, kv_heads: kvHeads, head_dim: width } = this.shape;
    const row = kvHeads * width;
    for (let head = 0; head < heads + kvHeads; head++) this.rotate(qkv, head * width, position);
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

  /** Rotate each pair (x_i, x_{i + width/2}) of a head by its position's angle. */
  rotate(x, start, position) {
    const half = this.shape.head_dim / 2;
    for (let i = 0; i < half; i++) {
      const [cos, sin] = [this.cos[position * half + i], this.sin[position * half + i]];
      const [a, b] = [x[start + i], x[start + half + i]];
      x[start + i] = a * cos - b * sin;
      x[start + half + i] = b * cos + a * sin;
    }
  }

  /** Project a hidden state to one logit for each token. */
  logits(hidden) {
    return product(this.weights["embed.weight"], hidden);
  }
}

/** Return tables of cos and sin of position x frequency, rounded where PyTorch rounds them. */
function ropeTables(shape) {
  const half = shape.head_dim / 2;
  const cos = new Float32Array(shape.max_position * half);
  const sin = new Float32Array(shape.max_position * half);
  for (let i = 0; i < half; i++) {
    const frequency = Math.fround(
      Math.pow(shape.rope_theta, Math.fround((-2 * i) / shape.head_dim)),
    );
    for (let position = 0; position < shape.max_position; position++) {
      const angle = Math.fround(position * frequency);
      cos[position * half + i] = Math.cos(angle);
      sin[position * half + i] = Math.sin(angle);
    }
  }
  return [cos, sin];
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
