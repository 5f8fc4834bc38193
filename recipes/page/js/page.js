"use strict";
/*
 * Show the agent at work: one episode, the same question at each checkpoint, a group of eight. Text from the model,
 * the passages and the reader enters the page as text only.
 */

const byId = (id) => document.getElementById(id);
const GROUP = 8;
/** A word in small letters: the names of a question may be new. */
const WORD = /(?<![\p{L}\p{N}_])\p{Ll}{2,}/gu;
const CANCELLED = Symbol("another question was asked");
/** The unpacked data, the agent, the question, its greedy records by checkpoint. `turn` counts actions. */
const page = { turn: 0, records: [] };

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;
const said = ({ answer, stop_reason: stop }) =>
  visible(answer ?? `no answer (${stop.replace("_", " ")})`);
const searchesOf = ({ steps }) => total(steps.map(({ results }) => results?.length ?? 0));
/** Judge a record, if a right answer is known. */
const judge = ({ ground_truth: known, em }) => (known.length ? (em ? "right" : "wrong") : "open");
const MARKS = { right: "✓", wrong: "✗", open: "•" };

// ----------------------------------------------------------------------------------------- an episode

/** Make the span of a sampled token: green where the model was sure, amber where it doubted. */
function sampledSpan(row, t) {
  const span = tokenSpan(row.tokens[t], () => sampledFacts(row, t));
  span.classList.toggle("control", CONTROL.test(row.tokens[t]));
  span.style.setProperty("--doubt", 1 - Math.exp(row.logprobs[t]));
  return span;
}

/** Describe a sampled token, and the most likely tokens in its place. */
function sampledFacts(row, t) {
  const logits = row.logits[t];
  const best = [...logits.keys()].sort((a, b) => logits[b] - logits[a]).slice(0, 4);
  const other = (id) => {
    const logprob = row.logprobs[t] + (logits[id] - logits[row.input_ids[t]]) / row.heat;
    return `${JSON.stringify(visible(page.agent.chat.tokenizer.decode([id])))} ${percent(logprob)}`;
  };
  return {
    token: `${JSON.stringify(visible(row.tokens[t]))}, number ${t}, mask 1`,
    probability: percent(row.logprobs[t]),
    instead: best
      .filter((id) => id !== row.input_ids[t])
      .map(other)
      .join(", "),
  };
}

/** Draw an episode as it comes. A control token opens a part of a turn. */
function drawEpisode(stage) {
  let [turn, part, turns] = [null, null, 0];
  const onRead = (row, start, result) => {
    turn = null;
    const lines = result?.results.flatMap(({ content }) => content.split("\n")) ?? [];
    const passages = lines.map((line) => make("p", "passage", visible(line)));
    const read = row.tokens.slice(start).join("").split("\n").map(visible).join("\n");
    const box = result
      ? make("div", "turn result", make("h3", "", "Search result: read, not written by the agent"))
      : make(
          "details",
          "turn result",
          make("summary", "", `The agent reads ${row.tokens.length} tokens first`),
        );
    box.append(...(result ? passages : [make("div", "part read", read)]));
    stage.append(box);
  };
  const onToken = (row, t) => {
    if (!turn) {
      turn = make("div", "turn agent", make("h3", "", `Agent, turn ${++turns}`));
      stage.append(turn);
      part = null;
    }
    const opened = /^<(think|tool_call|answer)>$/.exec(row.tokens[t]);
    if (opened || !part) part = make("div", `part ${opened?.[1] ?? ""}`);
    turn.append(part);
    part.append(sampledSpan(row, t));
  };
  return { onRead, onToken };
}

/** Say why the answer to a question of the reader's is not to be trusted; "" for no reason. */
function doubt(question) {
  const { corpus, questions } = page.header;
  const names = corpus.map(({ title }) => title.split(" (")[0]);
  if (!names.some((name) => question.includes(name))) {
    return " This agent knows one small world, and your question names nothing in it: do not trust the answer.";
  }
  const words = new Set(questions.flatMap((known) => known.question.match(WORD) ?? []));
  const unknown = (question.match(WORD) ?? []).filter((word) => !words.has(word));
  return unknown.length
    ? ` No known question has the words ${unknown.slice(0, 5).join(", ")}: do not trust the answer.`
    : "";
}

/** Write what an episode was worth. */
function verdict(record) {
  const look = judge(record);
  const written = total(record.rows[0].action_mask);
  const expected = look === "wrong" ? ` Expected: ${record.ground_truth.join(" or ")}.` : "";
  const paid =
    look === "open"
      ? ` No right answer is known.${doubt(page.asked.question)}`
      : ` Reward ${record.reward.toFixed(1)}.`;
  const searches = searchesOf(record);
  const counts = ` ${searches} search${searches === 1 ? "" : "es"}, ${written} tokens.`;
  const answer = make("b", look, `${MARKS[look]} ${said(record)}`);
  return make("p", "verdict", answer, make("span", "small", expected + paid + counts));
}

/** Play an episode at a checkpoint. It ends early, with CANCELLED, once `turn` is over. */
async function play(checkpoint, temperature, turn, watch = {}) {
  if (page.opened !== checkpoint) {
    page.agent.decoder = new Decoder(page.header.shape, page.weightsOf(checkpoint));
  }
  page.opened = checkpoint;
  let rested = performance.now();
  const onToken = async (row, t) => {
    row.heat = temperature || 1;
    await watch.onToken?.(row, t);
    if (performance.now() - rested > 12) {
      await pause(0);
      rested = performance.now();
    }
    if (turn !== page.turn) throw CANCELLED;
  };
  const { question, answers } = page.asked;
  return runEpisode(page.agent, question, answers, temperature, { ...watch, onToken });
}

/** Play the question where the reader sees it, then greedily at every checkpoint for the strip. */
async function show() {
  const turn = ++page.turn;
  const [stage, temperature] = [byId("stage"), byId("temperature").valueAsNumber];
  byId("sample").disabled = true;
  byId("group").hidden = true;
  for (const id of ["stage", "facts"]) byId(id).replaceChildren();
  const { onRead, onToken } = drawEpisode(stage);
  const slowly = async (row, t) => {
    onToken(row, t);
    await pause(page.pace);
  };
  const watch = { onRead, onToken: slowly };
  stage.append(verdict(await play(byId("checkpoint").valueAsNumber, temperature, turn, watch)));
  byId("sample").disabled = false;
  for (let other = page.header.checkpoints.length - 1; other >= 0; other--) {
    page.records[other] ??= await play(other, 0, turn);
    label();
  }
}

// -------------------------------------------------------------------------------------------- a group

/** Sample eight attempts, draw the tree of their tokens, and put them under the microscope. */
async function sampleGroup() {
  const turn = ++page.turn;
  const temperature = byId("temperature").valueAsNumber || 1;
  byId("group").hidden = false;
  for (const id of ["tree", "facts-of-tree", "microscope-of-group"]) byId(id).replaceChildren();
  const records = [];
  while (records.length < GROUP) {
    byId("group-says").textContent = `Sampling attempt ${records.length + 1} of ${GROUP} …`;
    records.push(await play(byId("checkpoint").valueAsNumber, temperature, turn));
  }
  const rewards = records.map(({ reward }) => reward);
  const credit = standardize(rewards, true);
  records.forEach((record, i) => (record.advantage = credit[i]));
  const lessons = {
    open: "No right answer is known: drag the rewards under the microscope.",
    apart:
      "RL makes an attempt above the group's mean likelier, and an attempt below it less likely.",
    equal: "All rewards are equal, so every advantage is 0, and this group would teach nothing.",
  };
  const known = page.asked.answers.length > 0;
  const right = known ? `, ${total(records.map(({ em }) => em))} of them right` : "";
  const lesson = lessons[!known ? "open" : credit.some(Boolean) ? "apart" : "equal"];
  byId("group-says").textContent =
    `Eight attempts at temperature ${temperature.toFixed(1)}${right}. ${lesson} ` +
    "A red frame marks the first token in which attempts part.";
  byId("tree").append(drawBranch(records, records[0].rows[0].action_mask.indexOf(1)));
  selectable(byId("tree"), byId("facts-of-tree"));
  microscope(byId("microscope-of-group"), { records });
}

/** Draw what the attempts share from token `start` on, then a branch for each way in which they go on. */
function drawBranch(records, start, parted = "") {
  const rows = records.map(({ rows: [row] }) => row);
  const [row] = rows;
  const line = make("div", `part ${parted}`, make("span", "count", `${rows.length} of ${GROUP}`));
  let t = start;
  for (
    ;
    t < row.tokens.length && rows.every(({ input_ids: ids }) => ids[t] === row.input_ids[t]);
    t++
  ) {
    if (row.action_mask[t]) line.append(sampledSpan(row, t));
    else if (row.action_mask[t - 1]) line.append(make("span", "chip", "reads the result"));
  }
  if (t === row.tokens.length) {
    const [look, { reward, advantage }] = [judge(records[0]), records[0]];
    const worth = ` reward ${reward.toFixed(1)}, advantage ${advantage.toFixed(2)}`;
    const answer = make("b", look, said(records[0]));
    line.append(make("p", "leaf", answer, make("span", "small", look === "open" ? "" : worth)));
    return make("li", "", line);
  }
  const ways = [...Map.groupBy(records, (record) => record.rows[0].input_ids[t]).values()];
  ways.sort((a, b) => b.length - a.length);
  return make("li", "", line, make("ul", "", ...ways.map((way) => drawBranch(way, t, "parted"))));
}

// ------------------------------------------------------------------------------------------- controls

/** Ask a question of the test set, or a text of the reader's. */
function ask(text) {
  const known = page.header.questions.find(({ question }) => question === text.trim());
  page.asked = known ?? { question: text.trim(), answers: [] };
  page.records = [];
  byId("question").value = page.asked.question;
  label();
  if (page.asked.question) start(show);
}

/** Start an action. Only a cancelled one may fail. */
function start(action) {
  action().catch((error) => {
    if (error !== CANCELLED) fail(error);
  });
}

function fail(error) {
  byId("problem").hidden = false;
  byId("problem").textContent = `This page does not work here: ${error.message ?? error}`;
}

/** Label the sliders; the strip shows what became of the question at each checkpoint. */
function label() {
  const steps = page.header.checkpoints;
  const [slider, heat] = [byId("checkpoint"), byId("temperature").valueAsNumber];
  const step = steps[slider.valueAsNumber];
  const name =
    step === 0 ? "before RL" : `${step === steps.at(-1) ? "after RL, " : ""}step ${step}`;
  slider.ariaValueText = byId("checkpoint-says").textContent = name;
  byId("temperature-says").textContent = heat === 0 ? "0, greedy" : heat.toFixed(1);
  const cells = steps.map((at, number) => {
    const record = page.records[number];
    const look = record ? judge(record) : "open";
    const searches = make("small", "", record ? searchesOf(record) : " ");
    const cell = make(
      "span",
      at === step ? "now" : "",
      make("b", look, record ? MARKS[look] : "·"),
      searches,
    );
    cell.title = `step ${at}: ${record ? said(record) : "not played yet"}`;
    return cell;
  });
  byId("strip").replaceChildren(...cells);
}

/** Connect the controls, and play a question that RL turned from wrong to right, if one is known. */
function connect() {
  const { checkpoints, questions } = page.header;
  const [slider, form] = [byId("checkpoint"), byId("ask")];
  slider.max = slider.value = checkpoints.length - 1;
  byId("training").hidden = checkpoints.length < 2;
  byId("training").style.setProperty("--n", checkpoints.length);
  page.pace = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 14;
  form.onsubmit = () => ask(byId("question").value);
  byId("another").onclick = () =>
    ask(questions[Math.floor(Math.random() * questions.length)].question);
  for (const control of [slider, byId("temperature")]) {
    control.oninput = label;
    control.onchange = () => start(show);
  }
  byId("sample").onclick = () => start(sampleGroup);
  selectable(byId("stage"), byId("facts"));
  for (const [kind, [{ question }]] of Map.groupBy(questions, (one) => one.kind)) {
    const chip = make("button", "", make("b", "", `${kind} `), question);
    chip.onclick = () => ask(question);
    byId("suggestions").append(chip);
  }
  for (const element of document.querySelectorAll("[disabled]")) element.disabled = false;
  ask(questions[page.header.first].question);
}

/** Unpack the data, and show the recorded group. */
async function openPage() {
  const began = performance.now();
  const { header, weightsOf } = await unpack(byId("data").textContent);
  Object.assign(page, { header, weightsOf, agent: openAgent(header) });
  byId("loading").textContent =
    `Unpacked and indexed in ${((performance.now() - began) / 1000).toFixed(1)} seconds.`;
  byId("recorded").hidden = !header.recorded;
  if (header.recorded) microscope(byId("microscope-of-run"), header.recorded);
  connect();
}

// Node has no document: tests play episodes without the page.
if (typeof document !== "undefined") openPage().catch(fail);
