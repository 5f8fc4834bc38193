"use strict";
/*
 * Draw the attempts at a question token by token, with their numbers in layers, and recompute these when a dial moves.
 * In: an element, and records in the form of rollouts/*.jsonl. Layers, sentences and dials stand in microscope.html.
 * All text is set as text, never as markup.
 */

const LOSSES = [
  "clip by token",
  "clip by step",
  "clip by sequence",
  "no clip",
  "truncated weights",
];
const DRIFT = 0.1;
const CONTROL = /^(<\|[^<>|]+\|>|<\/?[a-z_]+>)$/;

/** Name the author of each token. From a token <|...|> to the end of the line, the template speaks. */
function authorsOf({ tokens, action_mask: mask }) {
  const start = mask.indexOf(1);
  let [framed, header] = [false, ""];
  return tokens.map((text, t) => {
    const control = CONTROL.test(text);
    const template = control || framed || /^system/.test(header);
    if (control && text.startsWith("<|")) [framed, header] = [true, ""];
    else if (framed) [framed, header] = [!text.includes("\n"), header + text];
    if (mask[t]) return "policy";
    return template || /^system/.test(header) ? "template" : t < start ? "user" : "tool";
  });
}

/** Describe the rows of the records. A step's state is what the environment recorded, or all tokens before it. */
function rowsOf(records) {
  return records.flatMap((record, trajectory) => {
    const { rows, steps, group_id: groups, stop_reason: stop } = record;
    const name = record.name ?? `attempt ${trajectory + 1}, ${stop}`;
    const baseline = steps[0]?.greedy_score ?? null;
    return rows.map((row) => {
      const numbers = row.step_ids ?? runsOf(row.action_mask);
      const before = (step) => row.tokens.slice(0, numbers.indexOf(step)).join("");
      const states = numbers.map((step) => steps[step]?.state ?? before(step));
      const last = row === rows.at(-1);
      const told = { name, trajectory, groups, baseline, last, states, authors: authorsOf(row) };
      return { ...row, ...told, mask: row.action_mask, steps: numbers };
    });
  });
}

/** Compute every layer, for every estimator and loss. `state` has the dials; rows of absent members are left out. */
function computeLayers(rows, state) {
  const here = rows.filter(({ trajectory }) => state[`member ${trajectory}`]);
  const column = (name) => here.map((row) => row[name] ?? row.mask.map(() => 0));
  const sampled = here.map((row) => row.mask.map(Boolean));
  const forget = (row) => row.map((acted, t) => acted || t > row.indexOf(true));
  const batch = {
    mask: state.forget ? sampled.map(forget) : sampled,
    rewards: here.map(({ rewards, mask, last, trajectory }) =>
      rewards.map((reward, t) =>
        last && t === mask.lastIndexOf(1) ? (state[`reward ${trajectory}`] ?? reward) : reward,
      ),
    ),
  };
  for (const name of ["values", "steps", "states"]) batch[name] = column(name);
  for (const name of ["groups", "trajectory", "baseline"]) {
    batch[name] = here.map((row) => row[name]);
  }
  const credit = {};
  for (const [name, estimate] of Object.entries(ESTIMATORS)) credit[name] = estimate(batch, state);
  const [chosen, old] = [credit[state.estimator], column("logprobs")];
  const gap = toTokens({ mask: sampled }, (b, t) => {
    const later = here[b].later?.[state.age - 1];
    if (state.age === 0 || later) return later ? later[t] - old[b][t] : 0;
    return state.age * DRIFT * chosen[b][t] * (1 - Math.exp(old[b][t]));
  });
  const share =
    state.weights === "each token"
      ? toTokens(batch, () => 1)
      : lossWeights(batch, state.weights, Math.max(...here.map((row) => row.mask.length)));
  const gradientOf = (name) => (_, b) => {
    const stale = name === "truncated weights"; // log pi_old is recomputed, so every ratio is 1
    const clip = stale || name === "no clip" ? { low: 1, high: Infinity, dual: 0 } : state;
    const weight = (d) => (stale ? truncatedWeight(d, 0, state.cap) : 1);
    const advantages = chosen[b].map((value, t) => value * weight(gap[b][t]) * share[b][t]);
    const ratios = RATIOS[name.split(" ").at(-1)] ?? RATIOS.token;
    return policyLoss(
      gap[b].map((d) => (stale ? 0 : d)),
      advantages,
      batch.mask[b],
      clip,
      ratios,
    ).gradient;
  };
  const gradient = Object.fromEntries(LOSSES.map((name) => [name, here.map(gradientOf(name))]));
  const numbers = { mask: batch.mask.map((row) => row.map(Number)), "log-probability": old, gap };
  Object.assign(numbers, { reward: batch.rewards, value: batch.values, advantage: chosen });
  numbers.gradient = gradient[state.loss];
  return { here, batch, sampled, credit, gradient, gap, numbers };
}

/** Report how many tokens have a loss, and how much of the gradient goes to tokens that the policy did not sample. */
function summaryOf({ here, batch, sampled, gradient }, { forget, loss }) {
  const acted = batch.mask.flatMap((row, b) => row.flatMap((on, t) => (on ? [[b, t]] : [])));
  const taught = acted.filter(([b, t]) => !sampled[b][t]);
  const size = (places) => total(places.map(([b, t]) => Math.abs(gradient[loss][b][t])));
  const part = Math.round((100 * size(taught)) / (size(acted) || 1));
  return forget
    ? `${taught.length} of ${acted.length} tokens with a loss are not the policy's. They have ${part} % of the gradient.`
    : `${acted.length} of ${total(here.map((row) => row.mask.length))} tokens have a loss.`;
}

/** List all that is known of token `t` of a row. */
function factsOf(row, t, { here, batch, credit, gradient, gap, numbers }) {
  const b = here.indexOf(row);
  const facts = { token: `${JSON.stringify(row.tokens[t])}, number ${t} of ${row.name}` };
  if (b < 0) return facts;
  const each = (table, number) =>
    Object.entries(table)
      .map(([name, of]) => `${name} ${format(number(of))}`)
      .join(", ");
  facts.author = `${row.authors[t]}, mask ${Number(batch.mask[b][t])}`;
  if (row.mask[t]) {
    const [old, d] = [numbers["log-probability"][b][t], gap[b][t]];
    facts["log-probability"] = `${format(old)} in the sampler, ${format(old + d)} in the trainer`;
    facts.ratio = each(RATIOS, (ratios) => ratios(gap[b], row.mask)[t]);
  }
  facts["reward, value"] = `${format(batch.rewards[b][t])}, ${format(batch.values[b][t])}`;
  if (!batch.mask[b][t]) return facts;
  facts.advantage = each(credit, (rows) => rows[b][t]);
  facts.gradient = each(gradient, (rows) => rows[b][t]);
  return facts;
}

// ------------------------------------------------------------------------------------------- elements

/** Write a number with at most five decimals. */
const format = (number) => String(Number(number.toFixed(5))).replace("-", "−");
/** Make line ends and characters that reverse text visible. */
const visible = (text) => text.replace(/\n/g, "↵").replace(/[\p{Cc}\p{Cf}]/gu, "�");
const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

/** Make an element with a class and children. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

/** Make the span of a token; `facts` computes what is told of it when it is selected. */
function tokenSpan(text, facts) {
  const span = make("span", "token", visible(text), text.endsWith("\n") ? "\n" : "");
  return Object.assign(span, { facts });
}

/** Let pointer and arrow keys select one of the tokens in `element`. Its facts are told in the <dl> `list`. */
function selectable(element, list) {
  element.tabIndex = 0;
  const select = (span) => {
    for (const other of document.querySelectorAll(".at")) other.classList.remove("at");
    span.classList.add("at");
    tell(list, span);
  };
  element.onclick = element.onmouseover = ({ target }) => {
    if (target.matches(".token")) select(target);
  };
  element.onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.target !== element) return;
    event.preventDefault();
    const seen = [...element.querySelectorAll(".token")].filter((span) => span.checkVisibility());
    const at = seen.findIndex((span) => span.matches(".at"));
    const next = seen[at < 0 ? 0 : at + by];
    if (next) select(next);
    next?.scrollIntoView({ block: "nearest" });
  };
}

/** List the facts of a token. */
function tell(list, span) {
  const line = ([name, said]) => [make("dt", "", name), make("dd", "", said)];
  list.replaceChildren(...Object.entries(span.facts()).flatMap(line));
}

/** Draw a row: its tokens, the prompt folded; and for the last row of a member its dials. */
function drawRow(row, few, open, facts) {
  const section = copyOf("attempt").firstElementChild;
  const [header, tokens] = section.children;
  const spans = row.tokens.map((text, t) => tokenSpan(text, () => facts(row, t)));
  const first = few ? 0 : Math.max(row.mask.indexOf(1), 0);
  const prompt = make("summary", "", `prompt: ${first} tokens`);
  const folded = make("details", "", prompt, ...spans.slice(0, first));
  folded.open = open;
  tokens.append(...(first ? [folded] : []), ...spans.slice(first));
  tokens.classList.toggle("few", few);
  tokens.ariaLabel = `tokens of ${row.name}; the arrow keys move from token to token`;
  const [member, reward] = header.querySelectorAll("input");
  member.name = `member ${row.trajectory}`;
  member.nextElementSibling.textContent = row.name;
  reward.name = `reward ${row.trajectory}`;
  const paid = row.rewards[row.mask.lastIndexOf(1)];
  [reward.min, reward.max, reward.value] = [paid - 1, paid + 1, paid];
  if (!row.last) header.remove();
  return { row, section, tokens, spans };
}

/** Colour the tokens of a row in a layer, and write their numbers where there is room. */
function paint({ row, section, spans }, { here, batch, numbers }, layer) {
  const b = here.indexOf(row);
  section.classList.toggle("off", b < 0);
  const shown = b < 0 ? undefined : numbers[layer];
  const most = Math.max(1e-9, ...(shown ?? []).flat().map(Math.abs));
  spans.forEach((span, t) => {
    const known = shown && (layer === "mask" || batch.mask[b][t]);
    const value = known ? shown[b][t] : 0;
    const at = span.classList.contains("at") ? "at" : "";
    const look = layer === "author" ? row.authors[t] : ["down", "none", "up"][Math.sign(value) + 1];
    span.className = `token ${look} ${layer === "mask" ? "flat" : ""} ${at}`;
    span.style.setProperty("--share", `${Math.round(70 * Math.abs(value / most))}%`);
    span.dataset.number = known ? format(value) : "";
  });
}

/** Draw the microscope of some records. `settings` are those of its dials that differ from microscope.html. */
function microscope(element, { records, settings = {} }) {
  element.replaceChildren(copyOf("microscope"));
  element.classList.add("microscope");
  const form = element.querySelector("form");
  for (const [name, value] of Object.entries(settings)) {
    form.elements[name][typeof value === "boolean" ? "checked" : "value"] = value;
  }
  const rows = rowsOf(records);
  const few = rows.every(({ tokens }) => tokens.length <= 16);
  let layers;
  const facts = (row, t) => factsOf(row, t, layers);
  const drawn = rows.map((row) => drawRow(row, few, rows.length === 1, facts));
  form.querySelector(".attempts").append(...drawn.map(({ section }) => section));
  if (rows[0].later) {
    form.elements.age.max = rows[0].later.length;
    form.querySelector(".modelled").remove();
  }
  const list = form.querySelector(".facts");
  for (const { tokens } of drawn) selectable(tokens, list);
  form.oninput = () => {
    const state = {};
    for (const [name, value] of new FormData(form))
      state[name] = isNaN(value) ? value : Number(value);
    layers = computeLayers(rows, state);
    for (const part of form.querySelectorAll("[data-for]")) {
      part.hidden = !part.dataset.for.split(" ").includes(state.layer);
    }
    for (const output of form.querySelectorAll("output")) {
      output.value = format(output.previousElementSibling.valueAsNumber);
    }
    form.querySelector(".summary").textContent = summaryOf(layers, state);
    for (const one of drawn) paint(one, layers, state.layer);
    const at = form.querySelector(".at");
    if (at) tell(list, at);
  };
  form.oninput();
}
