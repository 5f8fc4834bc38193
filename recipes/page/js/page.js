"use strict";
/*
 * Show the agent at work: one episode, the same question at each checkpoint, a group of eight. Text from the model,
 * the passages and the reader enters the page as textContent only. The address may name a state:
 * #ask=QUESTION or #test=3, with &step=80, &temperature=1 and &group=1.
 */

// Node has no document: tests play episodes without the page.
const byId = (id) => document.getElementById(id);
const GROUP = 8;
const PACE =
  typeof matchMedia === "function" && !matchMedia("(prefers-reduced-motion: reduce)").matches
    ? 14
    : 0;
const CANCELLED = Symbol("another question was asked");
const page = { turn: 0, number: -1, records: [], tokens: [], now: -1 };

/** Make an element with a class and text, and append it. */
function put(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return parent.appendChild(element);
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const plural = (count, noun, many = `${noun}s`) => `${count} ${count === 1 ? noun : many}`;
const percent = (logprob) =>
  `${(100 * Math.exp(logprob)).toFixed(Math.exp(logprob) > 0.1 ? 0 : 2)} %`;
/** Make blanks, line ends and characters that reverse text visible. */
const visible = (text) => text.replace(/\n/g, "↵").replace(/[\p{Cc}\p{Cf}]/gu, "�");

/** Add a token's span to `parent`. */
function putToken(parent, token) {
  const control = page.agent.chat.tokenizer.controlIds.has(token.id);
  const span = put(parent, "span", `token${control ? " control" : ""}`, visible(token.text));
  if (token.text.endsWith("\n")) span.append("\n");
  span.style.setProperty("--doubt", 1 - Math.exp(token.logprob));
  page.tokens.push([span, token]);
  return span;
}

/** Draw an episode as it comes. A control token opens or closes a part of the turn. */
class Transcript {
  constructor(stage) {
    Object.assign(this, { stage, turn: null, part: null, turns: 0 });
    stage.replaceChildren();
    [page.tokens, page.now] = [[], -1];
  }

  onRead(tokens, result) {
    this.turn = null;
    const box = put(this.stage, result ? "div" : "details", "turn result");
    const title = result
      ? "Search result: read, not written by the agent"
      : `The agent reads ${tokens.length} tokens first`;
    put(box, result ? "h3" : "summary", "", title);
    if (!result)
      put(
        box,
        "div",
        "part read",
        visible(tokens.map(({ text }) => text).join("")).replace(/↵/g, "\n"),
      );
    for (const { content } of result?.results ?? []) {
      for (const line of content.split("\n")) put(box, "p", "passage", visible(line));
    }
  }

  onToken(token) {
    if (!this.turn) {
      this.turn = put(this.stage, "div", "turn agent");
      put(this.turn, "h3", "", `Agent, turn ${++this.turns}`);
      this.part = null;
    }
    const opened = /^<(think|tool_call|answer)>$/.exec(token.text);
    if (opened || !this.part) this.part = put(this.turn, "div", `part ${opened?.[1] ?? ""}`);
    putToken(this.part, token);
  }

  verdict(record, seconds) {
    const line = put(this.stage, "p", "verdict");
    const known = record.ground_truth.length > 0;
    const said =
      record.answer === null
        ? `No answer (${record.stop_reason.replace(/_/g, " ")}).`
        : visible(record.answer);
    put(
      line,
      "b",
      known ? (record.em ? "right" : "wrong") : "",
      `${known ? (record.em ? "✓ " : "✗ ") : ""}${said}`,
    );
    const written = record.tokens.filter((token) => token.sampled).length;
    const expected = known
      ? record.em
        ? ""
        : ` Expected: ${record.ground_truth.join(" or ")}.`
      : " No right answer is known.";
    const paid = known ? ` Reward ${record.reward.toFixed(1)}.` : "";
    const speed = seconds ? ` at ${Math.round(written / seconds)} tokens per second` : "";
    put(
      line,
      "span",
      "small",
      `${expected}${paid} ${plural(searchesOf(record), "search", "searches")}, ${written} tokens${speed}.`,
    );
  }
}

const searchesOf = (record) =>
  record.steps.reduce((sum, step) => sum + (step.results?.length ?? 0), 0);

/** Play one episode at a checkpoint. It ends early, with CANCELLED, once `turn` is over. */
async function play(checkpoint, { temperature, seed }, turn, watch = {}) {
  if (page.opened !== checkpoint)
    page.agent.decoder = new Decoder(page.header.shape, page.weightsOf(checkpoint));
  page.opened = checkpoint;
  const decoder = page.agent.decoder;
  let rested = performance.now();
  const onToken = async (token) => {
    await watch.onToken?.(token);
    if (performance.now() - rested > 12) {
      await pause(0);
      rested = performance.now();
    }
    if (turn !== page.turn) throw CANCELLED;
  };
  return runEpisode(
    { ...page.agent, decoder },
    page.question,
    page.answers,
    { temperature, seed },
    { ...watch, onToken },
  );
}

/** Play the question where everyone can see it, then at every checkpoint for the strip. */
async function show() {
  const turn = ++page.turn;
  const [checkpoint, temperature] = [
    byId("checkpoint").valueAsNumber,
    byId("temperature").valueAsNumber,
  ];
  label();
  byId("sample").disabled = true;
  byId("group").hidden = true;
  byId("microscope").replaceChildren();
  const transcript = new Transcript(byId("stage"));
  let waited = 0;
  const rest = async () => {
    const start = performance.now();
    await pause(PACE);
    waited += performance.now() - start;
  };
  const watch = {
    onRead: (tokens, result) => transcript.onRead(tokens, result),
    onToken: async (token) => {
      transcript.onToken(token);
      await rest();
    },
  };
  const start = performance.now();
  const record = await play(checkpoint, { temperature, seed: turn }, turn, watch);
  transcript.verdict(record, (performance.now() - start - waited) / 1000);
  if (temperature === 0) page.records[checkpoint] = record;
  byId("sample").disabled = false;
  await fillStrip(turn);
}

/** Play the question greedily at every checkpoint that has no record of it yet. */
async function fillStrip(turn) {
  mark();
  for (let other = page.header.checkpoints.length - 1; other >= 0; other--) {
    page.records[other] ??= await play(other, { temperature: 0, seed: 0 }, turn);
    mark();
  }
}

/** Ask a question: a number of the test set, or a text of the reader's. */
function ask(asked, action = show) {
  const text = typeof asked === "number" ? page.header.questions[asked].question : asked.trim();
  const number = page.header.questions.findIndex(({ question }) => question === text);
  Object.assign(page, {
    question: text,
    number,
    answers: page.header.questions[number]?.answers ?? [],
    records: [],
  });
  byId("question").value = text;
  if (text) start(action);
}

/** Start an action of the page. Only a cancelled one may fail. */
function start(action) {
  action().catch((error) => {
    if (error !== CANCELLED) fail(error);
  });
}

function fail(error) {
  byId("problem").hidden = false;
  byId("problem").textContent = `This page does not work here: ${error.message ?? error}`;
}

/** Write the labels of the sliders. */
function label() {
  const steps = page.header.checkpoints;
  const step = steps[byId("checkpoint").valueAsNumber];
  const [temperature, last] = [byId("temperature").valueAsNumber, steps.at(-1)];
  const said =
    step === 0 ? "before RL" : step === last ? `after RL, step ${step}` : `step ${step} of ${last}`;
  byId("checkpoint-says").textContent = said;
  byId("checkpoint").setAttribute("aria-valuetext", said);
  byId("temperature-says").textContent = temperature === 0 ? "0, greedy" : temperature.toFixed(1);
  mark();
}

/** Fill the strip under the slider: one cell for each checkpoint. */
function mark() {
  const current = byId("checkpoint").valueAsNumber;
  byId("strip").replaceChildren();
  page.header.checkpoints.forEach((step, number) => {
    const cell = put(byId("strip"), "button");
    const record = page.records[number];
    const known = page.answers.length > 0;
    const look = record && known ? (record.em ? "right" : "wrong") : "";
    put(cell, "b", look, record ? (known ? (record.em ? "✓" : "✗") : "•") : "·");
    put(cell, "small", "", record ? String(searchesOf(record)) : " ");
    cell.title = `step ${step}${record ? `: ${visible(record.answer ?? "no answer")}` : ""}`;
    cell.setAttribute("aria-label", cell.title);
    cell.tabIndex = -1; // the slider has the same function, and the keyboard
    cell.setAttribute("aria-current", number === current);
    cell.addEventListener("click", () => {
      byId("checkpoint").value = number;
      start(show);
    });
  });
}

/** Sample eight attempts and draw the tree of their tokens. */
async function sampleGroup() {
  const turn = ++page.turn;
  const temperature = byId("temperature").valueAsNumber || 1;
  const checkpoint = byId("checkpoint").valueAsNumber;
  byId("group").hidden = false;
  byId("tree").replaceChildren();
  const records = [];
  for (let sample = 0; sample < GROUP; sample++) {
    byId("group-says").textContent = `Sampling attempt ${sample + 1} of ${GROUP} …`;
    records.push(await play(checkpoint, { temperature, seed: `${turn}/${sample}` }, turn));
  }
  const credit = advantagesOf(records.map(({ reward }) => reward));
  records.forEach((record, i) => (record.advantage = credit[i]));
  const known = page.answers.length > 0;
  const right = records.filter(({ em }) => em).length;
  const told = credit.every((advantage) => advantage === 0)
    ? "All rewards are equal, so every advantage is 0 and this group would teach nothing."
    : "A better attempt than the group's mean is made more likely, a worse one less likely.";
  byId("group-says").textContent =
    `Eight attempts at temperature ${temperature.toFixed(1)}` +
    (known ? `, ${right} of them right. ${told}` : ".") +
    " A red frame marks the first token in which attempts part.";
  drawTree(
    put(byId("tree"), "ul"),
    records,
    records[0].tokens.findIndex((token) => token.sampled),
    known,
  );
  byId("microscope").replaceChildren();
  if (typeof microscope === "function" && known) {
    put(byId("microscope"), "h2", "", "The group under the microscope");
    microscope(put(byId("microscope"), "div", "card"), { group: records });
  }
  await fillStrip(turn);
}

/** Compare the rewards of a group as GRPO does: (reward - mean) / (standard deviation + 1e-6). */
function advantagesOf(rewards) {
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  if (Math.max(...rewards) - Math.min(...rewards) < 1e-9) return rewards.map(() => 0);
  const deviation = Math.sqrt(
    rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length - 1),
  );
  return rewards.map((reward) => (reward - mean) / (deviation + 1e-6));
}

/** Draw what the attempts share from token `place`, then a branch for each way in which they go on. */
function drawTree(list, records, place, known, parted = false) {
  const item = put(list, "li");
  put(item, "span", "count", `${records.length} of ${GROUP}`);
  const line = put(item, "span", "part");
  const [first] = records;
  const shared = (at) =>
    at < first.tokens.length &&
    records.every(({ tokens }) => tokens[at]?.id === first.tokens[at].id);
  for (let from = place; shared(place); place++) {
    const token = first.tokens[place];
    if (token.sampled) {
      const span = putToken(line, token);
      if (parted && place === from) span.classList.add("parts");
    } else if (first.tokens[place - 1].sampled) {
      put(line, "span", "chip", "reads the result");
    }
  }
  if (records.length === 1 || place >= first.tokens.length) {
    const leaf = put(item, "p", "leaf");
    const look = known ? (first.em ? "right" : "wrong") : "";
    put(leaf, "b", look, visible(first.answer ?? first.stop_reason.replace(/_/g, " ")));
    if (known)
      put(
        leaf,
        "span",
        "small",
        `  reward ${first.reward.toFixed(1)}, advantage ${first.advantage.toFixed(2)}`,
      );
    return;
  }
  const ways = new Map();
  for (const record of records) {
    const id = record.tokens[place]?.id;
    ways.set(id, [...(ways.get(id) ?? []), record]);
  }
  const branches = put(item, "ul");
  const sorted = [...ways.values()].sort((a, b) => b.length - a.length);
  for (const branch of sorted) drawTree(branches, branch, place, known, true);
}

/** Show the numbers of a token: of a span, or of the token `by` places on. */
function tip(span, by = 0) {
  let place = span ? page.tokens.findIndex(([one]) => one === span) : page.now + by;
  if (!span && by) place = Math.max(0, Math.min(page.tokens.length - 1, place));
  page.tokens[page.now]?.[0].classList.remove("now");
  byId("tip").hidden = place < 0 || !page.tokens[place];
  if (byId("tip").hidden) return;
  const [shown, token] = page.tokens[place];
  page.now = place;
  shown.classList.add("now");
  if (by) shown.scrollIntoView({ block: "nearest" });
  const text = ({ id }) => JSON.stringify(visible(page.agent.chat.tokenizer.decode([id])));
  const others = token.others.filter(({ id }) => id !== token.id).slice(0, 3);
  byId("tip").textContent =
    `${text(token)} · token ${token.id} · probability ${percent(token.logprob)} · mask 1\n` +
    `instead: ${others.map((other) => `${text(other)} ${percent(other.logprob)}`).join(", ")}`;
}

/** Connect the controls, and play what the address or the first test question asks. */
function connect() {
  const { checkpoints, questions } = page.header;
  const another = () => ask(Math.floor(Math.random() * questions.length));
  byId("checkpoint").max = checkpoints.length - 1;
  for (const element of [byId("checkpoint"), byId("strip")])
    element.style.setProperty("--n", checkpoints.length);
  const wanted = new URLSearchParams(location.hash.slice(1));
  const step = checkpoints.indexOf(Number(wanted.get("step") ?? checkpoints.at(-1)));
  byId("checkpoint").value = step < 0 ? checkpoints.length - 1 : step;
  byId("temperature").value = wanted.get("temperature") ?? 0;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("question").value);
  });
  byId("another").addEventListener("click", another);
  for (const slider of ["checkpoint", "temperature"]) {
    byId(slider).addEventListener("input", label);
    byId(slider).addEventListener("change", () => start(show));
  }
  byId("sample").addEventListener("click", () => start(sampleGroup));
  document.addEventListener("pointerover", ({ target }) => tip(target.closest(".token")));
  document.addEventListener("click", ({ target }) => tip(target.closest(".token")));
  byId("stage").addEventListener("blur", () => tip(null));
  byId("stage").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) event.preventDefault();
    if (by) tip(null, by);
  });
  for (const kind of [...new Set(questions.map((one) => one.kind))].sort()) {
    const number = questions.findIndex((one) => one.kind === kind);
    const chip = put(byId("suggestions"), "button", "");
    put(chip, "b", "", `${kind} `);
    chip.append(questions[number].question);
    chip.addEventListener("click", () => ask(number));
  }
  for (const element of document.querySelectorAll("[disabled]")) element.disabled = false;
  const asked =
    wanted.get("ask") ?? Math.min(Number(wanted.get("test") ?? 0), questions.length - 1);
  ask(asked, wanted.get("group") ? () => show().then(sampleGroup) : show);
}

/** Unpack the model and describe it. */
async function openPage() {
  const began = performance.now();
  const { header, weightsOf } = await unpack(byId("data").textContent);
  Object.assign(page, { header, weightsOf, agent: openAgent(header) });
  const { run, parameters, corpus, checkpoints } = header;
  const million = (parameters / 1e6).toFixed(2);
  const name = run.algorithm.toUpperCase();
  byId("lead").textContent =
    `A language model of ${million} million parameters runs in this page. It thinks, searches ${corpus.length.toLocaleString("en")} ` +
    `passages about an invented world, and answers. It began by imitating a demonstrator; ${checkpoints.at(-1)} steps of ${name} ` +
    "taught it the rest. Nothing leaves your browser.";
  byId("facts").textContent =
    `Preset ${run.preset}, ${name}, seed ${run.seed}: ${plural(checkpoints.length, "checkpoint")} of one run in 8-bit weights, ` +
    `unpacked and indexed in ${((performance.now() - began) / 1000).toFixed(1)} seconds. The scripts compute in plain JavaScript ` +
    "what the project's Python computes; a test compares them token by token.";
  if (header.recorded && typeof microscope === "function") {
    put(byId("recorded"), "h2", "", "A group of the run under the microscope");
    put(byId("recorded"), "p", "", header.recorded.title);
    microscope(put(byId("recorded"), "div", "card"), header.recorded);
  }
  connect();
}

if (typeof document !== "undefined") openPage().catch(fail);
