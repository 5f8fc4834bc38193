"use strict";
/*
 * Share a step among workers. In: questions or rows. Out: episodes or gradients, in the order that one worker gives.
 *
 * The worker that decides has the optimiser; its helpers have the same module and the same weights. They play some of
 * the questions, and differentiate some of the eight shards. An episode depends on its seed and its question, and a
 * gradient on its shard, not on the worker. So any number of workers gives the same bits. A page from the disk has no
 * SharedArrayBuffer, so parts travel as messages; a gradient has 1.84 MB.
 *
 * A helper that dies loses nothing: its tasks are done here. Next: learn.js asks for the parts of a step.
 */

/** What a worker can be asked for. */
const TASKS = {
  play(trainer, agent, { questions, first, place, samples, temperature, switches }, onToken) {
    const noise = (group, sample, at) => uniformAt(...place, group, sample, at);
    const pay = switches.map((name) => SWITCHES[name]).find((one) => one.pay)?.pay;
    return playGroups(trainer, agent, questions, {
      first, samples, temperature, noise, pay, onToken,
    }); // prettier-ignore
  },

  differentiate(trainer, agent, { rows, loss }) {
    return { ...trainer.differentiate(rows, loss), gradient: trainer.takeGradient() };
  },

  weights(trainer, agent, { weights }) {
    trainer.setWeights(weights);
  },
};

/** Do the tasks that come through a port, for the worker at its other end. */
function serve(port, { trainer, agent }) {
  port.onmessage = ({ data: { number, kind, facts } }) => {
    let value = null; // the other worker does what fails here, for example for memory
    try {
      value = TASKS[kind](trainer, agent, facts);
    } finally {
      port.postMessage({ number, value }, value?.gradient ? [value.gradient.buffer] : []);
    }
  };
  port.postMessage({ ready: true });
}

/** A helper, seen from the worker that decides. */
class Helper {
  constructor(port, slots) {
    Object.assign(this, { port, slots, ready: false, asked: 0, waiting: new Map() });
    port.onmessage = ({ data: { ready, number, value } }) => {
      if (ready) return (this.ready = true);
      this.waiting.get(number)?.(value);
      this.waiting.delete(number);
    };
  }

  /** Ask for a task. The promise gives null if the helper cannot do it. */
  ask(kind, facts) {
    const number = this.asked++;
    this.port.postMessage({ number, kind, facts });
    return new Promise((resolve) => this.waiting.set(number, resolve));
  }

  /** The helper is gone: no answer will come. */
  lose() {
    this.ready = false;
    for (const resolve of this.waiting.values()) resolve(null);
    this.waiting.clear();
  }
}

class Crew {
  /** A crew of one; `add` gives it helpers. */
  constructor(trainer, agent) {
    Object.assign(this, { trainer, agent, helpers: [], most: Infinity });
  }

  /** Add a helper, whose worker calls `serve` on the other end of the port. */
  add(port, slots = SLOTS) {
    const helper = new Helper(port, slots);
    this.helpers.push(helper);
    // A port keeps what was sent before its worker listens.
    helper.ask("weights", { weights: this.trainer.weights() });
    return helper;
  }

  /** List the helpers that work now. `most` limits the workers, this one included. */
  working() {
    return this.helpers.filter(({ ready }) => ready).slice(0, this.most - 1);
  }

  /** Tell the helpers the weights, after these changed. */
  share() {
    const weights = this.helpers.length ? this.trainer.weights() : null;
    for (const helper of this.helpers) helper.ask("weights", { weights });
  }

  here(kind, facts, onToken) {
    return TASKS[kind](this.trainer, this.agent, facts, onToken);
  }

  /** Do tasks, one in turn for each worker. Results have the order of the tasks. */
  async each(kind, tasks, helpers, onToken) {
    const members = [null, ...helpers];
    const asked = tasks.map((facts, i) => members[i % members.length]?.ask(kind, facts));
    const own = tasks.map((facts, i) => (asked[i] ? null : this.here(kind, facts, onToken)));
    const results = [];
    for (const [i, facts] of tasks.entries()) {
      results.push(own[i] ?? (await asked[i]) ?? this.here(kind, facts));
    }
    return results;
  }

  /**
   * Play `samples` attempts at each question. `place` begins the place of each random number, and `switches` names
   * those that are on. `onToken` sees the tokens that are sampled here, the first question's among them.
   */
  async play(questions, options, onToken) {
    const helpers = this.working();
    const slots = Math.min(this.trainer.slots, ...helpers.map((helper) => helper.slots));
    const most = (1 + helpers.length) * Math.floor(slots / options.samples); // questions at once
    const up = (numerator, denominator) => Math.floor((numerator + denominator - 1) / denominator);
    const parts = (1 + helpers.length) * up(questions.length, most);
    const border = (i) => up(i * questions.length, parts); // the first part has a question, even of one
    const tasks = Array.from({ length: parts }, (_, i) => {
      const first = border(i);
      return { ...options, first, questions: questions.slice(first, border(i + 1)) };
    });
    return (await this.each("play", tasks, helpers, onToken)).flat();
  }

  /** Compute the loss and gradient of each shard; of an empty one, nothing. */
  async differentiate(shards, loss) {
    const full = shards.filter((rows) => rows.length);
    const tasks = full.map((rows) => ({ rows, loss }));
    const found = await this.each("differentiate", tasks, this.working());
    return shards.map((rows) => (rows.length ? found.shift() : null));
  }

  /** Answer questions greedily. Returns the episodes; exact match is the mean of their `em`. */
  answer(questions) {
    const options = { place: [0], samples: 1, temperature: 0, switches: [] };
    return this.play(questions, options);
  }
}
