"use strict";
/*
 * Search as js/search.js of recipes/page does, fast enough for thousands of episodes: from a column to the passages
 * that have it, and each query once. In: a query. Out: hits, best first. Next: rollout.js.
 */

class QuickIndex extends SearchIndex {
  constructor(passages, dim, hash) {
    super(passages, dim, hash);
    this.columns = new Map(); // column -> [passage, value, passage, value, ...]
    this.vectors.forEach((vector, position) => {
      for (const [column, value] of vector) {
        if (!this.columns.has(column)) this.columns.set(column, []);
        this.columns.get(column).push(position, value);
      }
    });
    this.answers = new Map();
  }

  search(query, topK) {
    const key = `${topK} ${query}`;
    if (!this.answers.has(key)) this.answers.set(key, this.find(query, topK));
    return this.answers.get(key);
  }

  find(query, topK) {
    const scores = new Float64Array(this.passages.length);
    let empty = true;
    for (const [column, wanted] of this.encodeQuery(query)) {
      if (wanted === 0) continue;
      empty = false;
      const cells = this.columns.get(column) ?? [];
      for (let i = 0; i < cells.length; i += 2) scores[cells[i]] += cells[i + 1] * wanted;
    }
    if (empty) return [];
    // An insertion keeps the best: equal scores, to five digits, stay in the corpus's order.
    const best = [];
    scores.forEach((exact, position) => {
      const score = Math.round(exact * 1e5) / 1e5;
      if (best.length === topK && score <= best[topK - 1].score) return;
      let place = best.length;
      while (place > 0 && best[place - 1].score < score) place--;
      best.splice(place, 0, { ...this.passages[position], score, position });
      best.length = Math.min(best.length, topK);
    });
    return best;
  }
}
