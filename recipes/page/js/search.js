"use strict";
/*
 * Search passages by n-grams, as search/encoders.py and search/index.py do; their formulas are explained there.
 * In: passages with title and text. Out: hits, best first. Next: episode.js.
 */

const DF_SLOTS = 262144; // 2^18
const [PIECE_LENGTHS, PIECE_WEIGHT, PAIR_WEIGHT, LONGEST_WORD] = [[3, 4, 5], 0.7, 0.5, 64];

class SearchIndex {
  /** `hash` maps a text to the [low, high] halves of its BLAKE2b hash; recipes/browser has a faster one. */
  constructor(passages, dim, hash = blake2b64) {
    this.passages = passages;
    this.dim = dim;
    this.hash = hash;
    this.hashed = new Map(); // words and names recur, and hashing is nearly all the work
    this.idf = this.fit();
    this.vectors = passages.map(({ title, text }) => this.encodePassage(title, text));
  }

  /** Count the passages in which each gram occurs, and return the inverse document frequencies. */
  fit() {
    const df = new Int32Array(DF_SLOTS);
    for (const { title, text } of this.passages) {
      for (const slot of new Set(this.grams(`${title} ${text}`).map((gram) => gram.slot)))
        df[slot]++;
    }
    const n = this.passages.length;
    return Float32Array.from(df, (count) =>
      count > 0 ? logOnePlus((n - count + 0.5) / (count + 0.5)) : 0,
    );
  }

  /** Return a text's unit vector: column -> value. */
  encodeQuery(text) {
    const cells = new Map();
    for (const { column, slot, weight } of this.grams(text)) {
      cells.set(column, (cells.get(column) ?? 0) + Math.fround(weight * this.idf[slot]));
    }
    return unit(cells);
  }

  encodePassage(title, text) {
    const cells = this.encodeQuery(title);
    for (const [column, value] of this.encodeQuery(text)) {
      cells.set(column, (cells.get(column) ?? 0) + value);
    }
    return [...unit(cells)];
  }

  /** Return the `topK` best passages. Equal scores, to five digits, are in the corpus's order. */
  search(query, topK) {
    const wanted = this.encodeQuery(query);
    if (![...wanted.values()].some((value) => value !== 0)) return [];
    const scored = this.vectors.map((vector, position) => {
      let score = 0;
      for (const [column, value] of vector) score += value * (wanted.get(column) ?? 0);
      return { ...this.passages[position], score: Math.round(score * 1e5) / 1e5, position };
    });
    return scored.sort((a, b) => b.score - a.score || a.position - b.position).slice(0, topK);
  }

  /** List all grams of a text, with repetitions. */
  grams(text) {
    const words = caseFold(text.normalize("NFKC")).match(/[\p{L}\p{N}_]+/gu) ?? [];
    const pairs = words.slice(1).map((word, i) => `${words[i]} ${word}`);
    return [...words, ...pairs].flatMap((token) => {
      if (!this.hashed.has(token)) {
        this.hashed.set(
          token,
          weightedGrams(token).map((gram) => this.locate(...gram)),
        );
      }
      return this.hashed.get(token);
    });
  }

  /** Give a gram its column, its slot and its signed weight, from different bits of one hash. */
  locate(gram, weight) {
    const [low, high] = this.hash(gram);
    const column = ((high % this.dim) * (4294967296 % this.dim) + (low % this.dim)) % this.dim;
    return {
      column,
      slot: (high >>> 8) % DF_SLOTS,
      weight: Math.fround(high >>> 31 ? weight : -weight),
    };
  }
}

/** List a token's grams with their weights. */
function weightedGrams(token) {
  if (token.includes(" ")) return [[`pair:${token}`, PAIR_WEIGHT]];
  const marked = [..."<", ...[...token].slice(0, LONGEST_WORD), ">"];
  const pieces = PIECE_LENGTHS.flatMap((length) =>
    marked.slice(length - 1).map((_, i) => marked.slice(i, i + length).join("")),
  );
  const share = PIECE_WEIGHT / Math.sqrt(Math.max(pieces.length, 1));
  return [[`word:${token}`, 1], ...pieces.map((piece) => [`piece:${piece}`, share])];
}

/**
 * Compute log(1 + x) for x > 0 with + - * / only, whose results are the same in every engine: those of Math.log1p may
 * differ in the last bit. log(1 + x) = halvings x log(2) + 2 artanh(r), and r <= .172, so twelve terms are exact.
 */
function logOnePlus(x) {
  let [rest, halvings] = [1 + x, 0];
  while (rest > 1.4142135623730951) {
    rest /= 2;
    halvings++;
  }
  const ratio = halvings ? (rest - 1) / (rest + 1) : x / (2 + x);
  let [power, sum] = [ratio, 0];
  for (let i = 1; i < 24; i += 2) {
    sum += power / i;
    power *= ratio * ratio;
  }
  return halvings * Math.LN2 + 2 * sum;
}

/** Scale a vector to length 1; a vector of zeros stays. */
function unit(cells) {
  let squares = 0;
  for (const value of cells.values()) squares += Math.fround(value) * Math.fround(value);
  const length = Math.fround(Math.sqrt(squares)) || 1;
  for (const [column, value] of cells) cells.set(column, Math.fround(Math.fround(value) / length));
  return cells;
}

/** Python's casefold for the letters that differ from lower case in European languages. */
function caseFold(text) {
  return text.toLowerCase().replace(/ß/g, "ss").replace(/ς/g, "σ");
}

// ------------------------------------------------------------------------------------------------ BLAKE2b (RFC 7693)

const BLAKE_WORDS = 8;
const BLAKE_START = new Uint32Array([
  0xf3bcc908, 0x6a09e667, 0x84caa73b, 0xbb67ae85, 0xfe94f82b, 0x3c6ef372, 0x5f1d36f1, 0xa54ff53a,
  0xade682d1, 0x510e527f, 0x2b3e6c1f, 0x9b05688c, 0xfb41bd6b, 0x1f83d9ab, 0x137e2179, 0x5be0cd19,
]); // of 64-bit words: the low half, then the high half
const BLAKE_ORDER = [
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
].map((row) => Array.from(row, (digit) => parseInt(digit, 16))); // prettier-ignore
const blakeState = new Uint32Array(32);
const blakeInput = new Uint32Array(32);

/** Hash a text to 8 bytes, as Python's blake2b with digest_size=8 does: [low, high] halves. */
function blake2b64(text) {
  const bytes = new TextEncoder().encode(text);
  const hash = BLAKE_START.slice();
  hash[0] ^= 0x01010000 ^ BLAKE_WORDS;
  for (let start = 0; start === 0 || start < bytes.length; start += 128) {
    const end = Math.min(start + 128, bytes.length);
    blakeInput.fill(0);
    for (let i = start; i < end; i++) blakeInput[(i - start) >> 2] |= bytes[i] << (8 * (i & 3));
    blakeState.set(hash);
    blakeState.set(BLAKE_START, 16);
    blakeState[24] ^= end;
    if (end === bytes.length) {
      blakeState[28] = ~blakeState[28];
      blakeState[29] = ~blakeState[29];
    }
    for (let round = 0; round < 12; round++) blakeRound(BLAKE_ORDER[round % 10]);
    for (let i = 0; i < 16; i++) hash[i] ^= blakeState[i] ^ blakeState[i + 16];
  }
  return [hash[0], hash[1]];
}

function blakeRound(order) {
  for (let i = 0; i < 4; i++) blakeMix(i, i + 4, i + 8, i + 12, order[2 * i], order[2 * i + 1]);
  for (let i = 0; i < 4; i++) {
    const [b, c, d] = [4 + ((i + 1) % 4), 8 + ((i + 2) % 4), 12 + ((i + 3) % 4)];
    blakeMix(i, b, c, d, order[8 + 2 * i], order[9 + 2 * i]);
  }
}

function blakeMix(a, b, c, d, first, second) {
  blakeAdd(a, b, first);
  blakeTurn(d, a, 32);
  blakeAdd(c, d, -1);
  blakeTurn(b, c, 24);
  blakeAdd(a, b, second);
  blakeTurn(d, a, 16);
  blakeAdd(c, d, -1);
  blakeTurn(b, c, 63);
}

/** Add word b, and a word of the input, to word a: modulo 2^64. */
function blakeAdd(a, b, input) {
  const v = blakeState;
  const low = v[2 * a] + v[2 * b] + (input < 0 ? 0 : blakeInput[2 * input]);
  const high = v[2 * a + 1] + v[2 * b + 1] + (input < 0 ? 0 : blakeInput[2 * input + 1]);
  v[2 * a] = low;
  v[2 * a + 1] = high + Math.floor(low / 4294967296);
}

/** Set word a to (a xor b), rotated right. */
function blakeTurn(a, b, bits) {
  const v = blakeState;
  const low = v[2 * a] ^ v[2 * b];
  const high = v[2 * a + 1] ^ v[2 * b + 1];
  const [from, to] = bits < 32 ? [low, high] : [high, low];
  const by = bits % 32;
  v[2 * a] = by ? (from >>> by) | (to << (32 - by)) : from;
  v[2 * a + 1] = by ? (to >>> by) | (from << (32 - by)) : to;
}
