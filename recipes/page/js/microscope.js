"use strict";
/*
 * Draw attempts token by token, with their numbers in layers, and recompute these when a dial moves.
 * In: an element, and a step as microscope.py writes it. `lessons` is the address of the lessons.
 * All text is set as text, never as markup.
 */

const AUTHORS = ["policy", "tool", "user", "template"];
const CREDIT = ["estimator", "normalizeStd", "lam", "gamma"];
/** Layer -> its lesson, one sentence, and its dials. */
const LAYERS = {
  author: ["02-a-rollout", "The colour of a token is its author.", []],
  mask: ["03-masks", "Only tokens that the policy sampled have mask 1 and a loss.", []],
  "log-probability": [
    "02-a-rollout",
    "The darker a token, the less likely it was when sampled.",
    [],
  ],
  gap: [
    "11-spans-steps-drift",
    "Log-probability in the trainer minus log-probability in the sampler, which is some steps older.",
    ["age"],
  ],
  reward: [
    "04-rewards",
    "The outcome is paid to the last sampled token, a call's reward to the call.",
    [],
  ],
  value: [
    "05-advantages",
    "Before each token, the critic predicts the sum of the rewards from it on.",
    [],
  ],
  advantage: [
    "05-advantages",
    "How much better than expected the episode went after the token.",
    CREDIT,
  ],
  gradient: [
    "06-losses",
    "The derivative of the loss in the token's log-probability: negative makes the token likelier.",
    [...CREDIT, "loss", "weights", "low", "high", "dual", "cap", "age"],
  ],
};
/** Dial -> label, smallest value, largest value, and step. */
const RANGES = {
  lam: ["lambda", 0, 1, 0.05],
  gamma: ["gamma", 0, 1, 0.05],
  low: ["clip low", 0, 1, 0.01],
  high: ["clip high", 0, 2, 0.01],
  dual: ["dual clip", 1, 10, 0.5],
  cap: ["cap of weights", 1, 10, 0.5],
  age: ["staleness in steps", 0, 8, 1],
};
const LOSSES = [
  "clip by token",
  "clip by step",
  "clip by sequence",
  "no clip",
  "truncated weights",
];
const CHOICES = {
  estimator: Object.keys(ESTIMATORS),
  loss: LOSSES,
  weights: ["each token", ...Object.keys(LOSS_DIVISORS)],
};
const DEFAULTS = {
  ...{ layer: "author", estimator: "grpo", normalizeStd: true, lam: 1, gamma: 1, stepWeight: 1 },
  ...{ loss: LOSSES[0], weights: "each token", low: 0.2, high: 0.28, dual: 3, cap: 2, age: 0 },
};
const CONTROL = /^(<\|[^<>|]+\|>|<\/?[a-z_]+>)$/;
const DRIFT = 0.1;
const MODELLED = `Modelled: a step adds ${DRIFT} x advantage x (1 - probability). `;

/** Compute every layer, for every estimator and loss. Rows of members that are off count for nothing. */
function computeLayers({ rows }, state) {
  const here = rows.filter((row) => !state.off.has(row.trajectory));
  const column = (name) => here.map((row) => row[name] ?? row.mask.map(() => 0));
  const sampled = here.map((row) => row.mask.map(Boolean));
  const batch = {
    mask: sampled.map((row) =>
      row.map((acted, t) => acted || (state.forget && t > row.indexOf(true))),
    ),
    rewards: here.map((row) => {
      const paid = row === rows.findLast(({ trajectory }) => trajectory === row.trajectory);
      const last = paid && state.paid.has(row.trajectory) ? row.mask.lastIndexOf(1) : -1;
      return row.rewards.map((reward, t) => (t === last ? state.paid.get(row.trajectory) : reward));
    }),
    ...Object.fromEntries(["values", "steps", "states"].map((name) => [name, column(name)])),
    groups: here.map((row) => row.group),
    trajectory: here.map((row) => row.trajectory),
    baseline: here.map((row) => row.baseline ?? null),
  };
  const credit = {};
  for (const [name, estimate] of Object.entries(ESTIMATORS)) credit[name] = estimate(batch, state);
  const old = column("logprobs");
  const gap = toTokens({ mask: sampled }, (b, t) => {
    if (state.age === 0) return 0;
    if (here[b].later?.length) return here[b].later[state.age - 1][t] - old[b][t];
    return state.age * DRIFT * credit[state.estimator][b][t] * (1 - Math.exp(old[b][t]));
  });
  const share =
    state.weights === "each token"
      ? toTokens(batch, () => 1)
      : lossWeights(batch, state.weights, Math.max(...here.map((row) => row.mask.length)));
  const weigh = (name) => (_, b) => {
    const [mask, chosen] = [batch.mask[b], credit[state.estimator][b]];
    const stale = name === "truncated weights"; // log pi_old is recomputed, so every ratio is 1
    const clip = stale || name === "no clip" ? { low: 1, high: Infinity, dual: 0 } : state;
    const weight = gap[b].map((d) => (stale ? truncatedWeight(d, 0, state.cap) : 1));
    const ratios = RATIOS[name.split(" ").at(-1)] ?? RATIOS.token;
    const logRatio = stale ? gap[b].map(() => 0) : gap[b];
    const advantages = chosen.map((value, t) => value * weight[t] * share[b][t]);
    return policyLoss(logRatio, advantages, mask, clip, ratios).gradient;
  };
  const gradient = Object.fromEntries(LOSSES.map((name) => [name, here.map(weigh(name))]));
  const numbers = { author: null, mask: batch.mask.map((row) => row.map(Number)) };
  Object.assign(numbers, {
    "log-probability": old,
    gap,
    reward: batch.rewards,
    value: batch.values,
  });
  Object.assign(numbers, { advantage: credit[state.estimator], gradient: gradient[state.loss] });
  return { here, batch, sampled, credit, gradient, gap, numbers };
}

/** Write a number with at most five decimals. */
const format = (number) => String(Number(number.toFixed(5))).replace("-", "−");

/** Make an element with properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Describe records of episodes that the page has played (episode.js), as microscope.py does. */
function stepOf(records) {
  const states = new Map();
  const number = (prefix) => states.set(prefix, states.get(prefix) ?? states.size).get(prefix);
  const rows = records.map(({ rows: [row], stop_reason: stop }, trajectory) => {
    const [mask, steps] = [row.action_mask, row.step_ids];
    const start = mask.indexOf(1);
    const author = (text, t) => {
      if (mask[t]) return "policy";
      const before = row.tokens[t - 1] ?? "";
      if (CONTROL.test(text) || /start/.test(before) || !text.trim()) return "template";
      return t < start ? "user" : "tool";
    };
    return {
      ...{ name: `attempt ${trajectory + 1}, ${stop}`, group: "", trajectory, mask, steps },
      ...{ tokens: row.tokens, authors: row.tokens.map(author), logprobs: row.logprobs },
      ...{ rewards: row.rewards, values: null },
      states: steps.map((step) => number(row.input_ids.slice(0, steps.indexOf(step)).join())),
    };
  });
  return { rows };
}

/** Draw the microscope of a step, or of a group that the page has played. */
function microscope(element, given, { lessons = null } = {}) {
  const step = given.rows ? given : stepOf(given.group);
  const state = { ...DEFAULTS, ...step.settings, forget: false, off: new Set(), paid: new Map() };
  const oldest = step.rows[0].later?.length;
  const few = step.rows.every((row) => row.tokens.length <= 16);
  const dials = {};
  let [layers, selected] = [null, null];

  const change = (name, value) => {
    state[name] = value;
    update();
  };
  const range = (label, low, high, by, value, act) => {
    const input = make("input", { type: "range", min: low, max: high, step: by, value });
    const output = make("output", { value: format(value) });
    input.oninput = () => {
      output.value = format(input.valueAsNumber);
      act(input.valueAsNumber);
    };
    return make("label", {}, make("span", { textContent: label }), input, output);
  };
  const tick = (label, checked, act) => {
    const input = make("input", { type: "checkbox", checked });
    input.onchange = () => act(input.checked);
    return make("label", {}, input, make("span", { textContent: label }));
  };
  for (const [name, options] of Object.entries(CHOICES)) {
    const select = make(
      "select",
      {},
      ...options.map((value) => make("option", { value, textContent: value })),
    );
    select.value = state[name];
    select.onchange = () => change(name, select.value);
    dials[name] = make("label", {}, make("span", { textContent: name }), select);
  }
  for (const [name, [label, low, high, by]] of Object.entries(RANGES)) {
    const most = name === "age" && oldest ? oldest : high;
    const said = name === "age" && step.ages ? "later checkpoint of the run" : label;
    dials[name] = range(said, low, most, by, state[name], (value) => change(name, value));
  }
  const normalized = (checked) => change("normalizeStd", checked);
  dials.normalizeStd = tick("divide or whiten", state.normalizeStd, normalized);
  const tabs = Object.keys(LAYERS).map((name) => {
    const button = make("button", { type: "button", textContent: name });
    button.onclick = () => change("layer", name);
    return button;
  });
  const forget = tick("forget the mask", false, (checked) => change("forget", checked));
  const [sentence, summary] = [make("p"), make("p", { className: "summary" })];
  const detail = make("dl", { className: "detail" });

  const attempts = step.rows.map((row, b) => {
    const spans = row.tokens.map((text) => make("span", { textContent: text }));
    const tokens = make("div", { className: few ? "tokens few" : "tokens", tabIndex: 0 });
    const first = few ? 0 : Math.max(row.mask.indexOf(1), 0);
    const prompt = make("summary", { textContent: `prompt: ${first} tokens` });
    const folded = make(
      "details",
      { open: step.rows.length === 1 },
      prompt,
      ...spans.slice(0, first),
    );
    tokens.append(...(first ? [folded] : []), ...spans.slice(first));
    tokens.setAttribute("aria-label", `tokens of ${row.name}; arrow keys select one`);
    tokens.setAttribute("role", "group");
    const select = (t) => {
      selected = [b, Math.min(Math.max(t, 0), spans.length - 1)];
      describe();
    };
    tokens.onclick = tokens.onmouseover = ({ target }) => {
      if (spans.includes(target)) select(spans.indexOf(target));
    };
    tokens.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      select(selected?.[0] === b ? selected[1] + by : row.mask.indexOf(1));
    };
    const own = row === step.rows.findLast(({ trajectory }) => trajectory === row.trajectory);
    const reward = row.rewards[row.mask.lastIndexOf(1)];
    const pay = (value) => {
      state.paid.set(row.trajectory, value);
      update();
    };
    const member = (checked) => {
      state.off[checked ? "delete" : "add"](row.trajectory);
      update();
    };
    const [low, high] = [Math.min(-1, reward), Math.max(1, reward)];
    const controls = own
      ? [tick(row.name, true, member), range("reward", low, high, 0.05, reward, pay)]
      : [];
    return { row, spans, element: make("section", {}, make("header", {}, ...controls), tokens) };
  });

  function describe() {
    for (const { spans } of attempts) for (const span of spans) span.classList.remove("at");
    const [b, t] = selected ?? [-1, 0];
    const row = step.rows[b];
    const here = layers.here.indexOf(row);
    if (here < 0) return detail.replaceChildren();
    attempts[b].spans[t].classList.add("at");
    const each = (table, number) =>
      Object.entries(table)
        .map(([name, of]) => `${name} ${format(number(of))}`)
        .join(", ");
    const { batch, credit, gradient, gap } = layers;
    const acted = batch.mask[here][t];
    const facts = { token: `${JSON.stringify(row.tokens[t])}, number ${t} of ${row.name}` };
    facts.author = `${row.authors[t]}, mask ${Number(acted)}`;
    if (row.mask[t]) {
      const [old, d] = [row.logprobs[t], gap[here][t]];
      facts["log-probability"] = `${format(old)} in the sampler, ${format(old + d)} in the trainer`;
      facts.ratio = each(RATIOS, (ratios) => ratios(gap[here], row.mask)[t]);
      facts["KL from the sampler"] = each(KL_ESTIMATORS, (kl) => kl(d));
    }
    facts["reward, value"] = `${format(batch.rewards[here][t])}, ${format(batch.values[here][t])}`;
    if (acted) facts.advantage = each(credit, (rows) => rows[here][t]);
    if (acted) facts.gradient = each(gradient, (rows) => rows[here][t]);
    detail.replaceChildren(
      ...Object.entries(facts).flatMap(([name, said]) => [
        make("dt", { textContent: name }),
        make("dd", { textContent: said }),
      ]),
    );
  }

  function update() {
    layers = computeLayers(step, state);
    const [lesson, words, shown] = LAYERS[state.layer];
    tabs.forEach((tab) =>
      tab.setAttribute("aria-pressed", String(tab.textContent === state.layer)),
    );
    const title = `Lesson ${Number(lesson.slice(0, 2))}`;
    const href = `${lessons}${lesson}.html`;
    const link = lessons === null ? title : make("a", { href, textContent: title });
    const modelled = shown.includes("age") && !oldest ? MODELLED : "";
    sentence.replaceChildren(`${words} ${modelled}`, link);
    for (const [name, dial] of Object.entries(dials)) dial.hidden = !shown.includes(name);
    const numbers = layers.numbers[state.layer];
    const most = Math.max(1e-9, ...(numbers ?? []).flat().map(Math.abs));
    for (const { row, spans, element: section } of attempts) {
      const here = layers.here.indexOf(row);
      section.classList.toggle("off", here < 0);
      spans.forEach((span, t) => {
        const known =
          here >= 0 && numbers && (state.layer === "mask" || layers.batch.mask[here][t]);
        const value = known ? numbers[here][t] : 0;
        const sign = ["down", "none", "up"][Math.sign(value) + 1];
        const look = state.layer === "author" ? row.authors[t] : sign;
        span.className = `${look} ${state.layer === "mask" ? "flat" : ""}`;
        span.style.setProperty("--share", `${Math.round(70 * Math.abs(value / most))}%`);
        span.dataset.number = known ? format(value) : "";
      });
    }
    const acted = layers.batch.mask.flatMap((row, b) => row.flatMap((m, t) => (m ? [[b, t]] : [])));
    const taught = acted.filter(([b, t]) => !layers.sampled[b][t]);
    const size = (places) =>
      total(places.map(([b, t]) => Math.abs(layers.gradient[state.loss][b][t])));
    const part = Math.round((100 * size(taught)) / (size(acted) || 1));
    summary.textContent = state.forget
      ? `${taught.length} of ${acted.length} tokens with a loss are not the policy's. They have ${part} % of the gradient.`
      : `${acted.length} of ${total(layers.here.map((row) => row.tokens.length))} tokens have a loss.`;
    describe();
  }

  const legend = make(
    "p",
    { className: "legend" },
    ...AUTHORS.map((name) => make("span", { className: name, textContent: name })),
  );
  element.classList.add("microscope");
  element.replaceChildren(
    make("div", { className: "tabs" }, ...tabs),
    sentence,
    make("div", { className: "dials" }, ...Object.values(dials), forget),
    legend,
    summary,
    make("div", { className: "attempts" }, ...attempts.map((attempt) => attempt.element)),
    detail,
  );
  update();
}
