"use strict";
/*
 * Encode and decode text, as cold_start/tiny_model.py's tokenizer and chat/format.py do.
 * In: messages. Out: the ids of an observation. Text from a reader or a passage never becomes a control token.
 * Next: episode.js.
 */

class Tokenizer {
  /** `tokens` are byte strings, one letter for each byte; `merges` are triples left, right, merged, by rank. */
  constructor({ pattern, tokens, merges, controls }) {
    this.pattern = new RegExp(pattern, "gu");
    this.bytes = tokens.map((token) => Uint8Array.from(token, (letter) => letter.charCodeAt(0)));
    this.controls = new Map(Object.entries(controls));
    this.controlIds = new Set(this.controls.values());
    this.ofByte = new Uint32Array(256);
    this.bytes.forEach((bytes, id) => {
      if (bytes.length === 1) this.ofByte[bytes[0]] = id;
    });
    this.merged = new Map(); // pair -> [rank, id]
    for (let i = 0; i < merges.length; i += 3) {
      this.merged.set(merges[i] * tokens.length + merges[i + 1], [i, merges[i + 2]]);
    }
  }

  /** Encode text as data: a control token that it spells is cut after its first letter. */
  encodeData(text) {
    const ids = [];
    let start = 0;
    for (let place = 0; place < text.length; place++) {
      if ([...this.controls.keys()].some((control) => text.startsWith(control, place))) {
        ids.push(...this.encode(text.slice(start, place + 1)));
        start = place + 1;
      }
    }
    return [...ids, ...this.encode(text.slice(start))];
  }

  /** Encode text that spells no control token. A lone half of a surrogate pair has no UTF-8 form. */
  encode(text) {
    const pieces = text.replace(/\p{Surrogate}/gu, "?").match(this.pattern) ?? [];
    return pieces.flatMap((piece) => this.merge(new TextEncoder().encode(piece)));
  }

  /** Join the pair of lowest rank, the leftmost first, until no pair can be joined. */
  merge(bytes) {
    const ids = Array.from(bytes, (byte) => this.ofByte[byte]);
    for (;;) {
      let best = null;
      for (let i = 0; i + 1 < ids.length; i++) {
        const found = this.merged.get(ids[i] * this.bytes.length + ids[i + 1]);
        if (found && (!best || found[0] < best.rank)) best = { rank: found[0], id: found[1], i };
      }
      if (!best) return ids;
      ids.splice(best.i, 2, best.id);
    }
  }

  /** Decode sampled ids, control tokens included. Never encode the result. */
  decode(ids) {
    const bytes = new Uint8Array(ids.reduce((total, id) => total + this.bytes[id].length, 0));
    let end = 0;
    for (const id of ids) {
      bytes.set(this.bytes[id], end);
      end += this.bytes[id].length;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  }
}

/** Encoder of observations. The chat template was rendered at export, with a mark for each content. */
class ChatFormat {
  constructor(tokenizer, { prompt, continuations, mark, closingIds, stopIds, opened }) {
    Object.assign(this, { tokenizer, prompt, continuations, mark, opened });
    this.closingIds = new Set(closingIds);
    this.stopIds = new Set(stopIds);
  }

  /** Encode a question up to the point where the agent speaks. */
  promptIds(question) {
    return this.fill(this.prompt, [question]);
  }

  /** Encode tool results, and the next opening. An agent's turn that is not closed is closed here. */
  continuationIds(results, closed) {
    const skeleton = this.continuations[results.length - 1];
    return this.fill(closed ? skeleton.slice(1) : skeleton, results);
  }

  /** Fill a skeleton: control ids, and runs of text with marks. Text and contents are encoded together, as data. */
  fill(skeleton, contents) {
    let next = 0;
    return skeleton.flatMap((part) => {
      if (typeof part === "number") return [part];
      const pieces = part.split(this.mark);
      const text = pieces.reduce((sofar, piece) => sofar + contents[next++] + piece);
      return this.tokenizer.encodeData(text);
    });
  }

  /** Decode a sampled turn, without its end token. */
  turnText(ids) {
    const ended = ids.length > 0 && this.stopIds.has(ids.at(-1));
    return this.opened + this.tokenizer.decode(ended ? ids.slice(0, -1) : ids);
  }
}
