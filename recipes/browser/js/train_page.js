"use strict";
/*
 * Show a run while it learns: its curve, one group of attempts, and the agent that answers. In: messages of worker.js.
 * All text is set as text, never as markup. `make`, `visible`, `selectable` and `microscope` are of recipes/page.
 * `#switch=NAME` in the address turns a switch on; the lessons link to the switches that they are about.
 */

const byId = (id) => document.getElementById(id);
const GROUP = 8;
const BEFORE_AND_AFTER = 300; // questions of the evaluation at the start and at the end
const MORE = 40; // steps that a finished run can go on for
const SEEDS = [1, 2, 3, 4, 5];
const SILENCE = 60; // seconds without a message, after which a worker that trains counts as dead
const COLD_STEPS = 450;
const RESTARTS = 3; // a worker that dies more often will die again
const MOST_WORKERS = 4; // a step has eight shards; more workers would wait more than work
/** The runs so far, the run that is going on, and what the page waits for. */
const page = {
  runs: [], run: null, switches: [], workers: [], open: false, group: null, heard: 0, restarts: 0,
}; // prettier-ignore
const recorded = JSON.parse(byId("recorded").textContent);

const plain = (name) => page.switches.find((one) => one.name === name)?.title ?? name;
const nameOf = (run) => {
  const name = run.switches.length ? run.switches.map(plain).join(" + ") : "healthy";
  return run.scratch ? `${name}, from random weights` : name;
};

// -------------------------------------------------------------------------------------------- worker

/** Start the workers from a text in this file: a page from the disk has no other file to start them from. */
function startWorkers() {
  const text = byId("worker").textContent;
  const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const opened = { data: byId("data").textContent, module: moduleBytes() };
  const cores = navigator.hardwareConcurrency || 1;
  const count = cores >= MOST_WORKERS ? MOST_WORKERS : cores >= 2 ? 2 : 1;
  try {
    page.workers = Array.from({ length: count }, () => new Worker(address));
  } catch {
    return fail(
      "this browser does not let a page from the disk train in the background; use Chromium or Firefox",
    );
  }
  const [worker, ...helpers] = page.workers;
  page.heard = performance.now();
  worker.onmessage = ({ data }) => {
    if (worker !== page.workers[0]) return; // it was given up
    page.heard = performance.now();
    hear[data.type](data);
  };
  worker.onerror = (event) => {
    event.preventDefault();
    startAgain(event.message || "the browser ended it, perhaps for memory");
  };
  send("open", opened);
  helpers.forEach((helper, number) => {
    const { port1, port2 } = new MessageChannel();
    const lose = (event) => {
      event.preventDefault?.();
      helper.terminate();
      send("lost", { number });
      if (page.failed) return; // the page has said why no worker can train
      notice(
        "A helper stopped; the training goes on with fewer workers, and gives the same weights.",
      );
    };
    helper.onerror = lose;
    helper.onmessage = ({ data }) => data.type === "problem" && lose(data);
    send("helper", { port: port1 }, [port1]);
    helper.postMessage({ type: "help", ...opened, port: port2 }, [port2]);
  });
}

/** Start new workers in place of a dead one. They go on after the last step, whose state the page has. */
function startAgain(reason) {
  for (const worker of page.workers) worker.terminate();
  if (!page.open || ++page.restarts > RESTARTS)
    return fail(`the training stopped: ${reason}; reload the page`);
  const { run } = page;
  const cold = run?.scratch && !run.figures.length;
  const step = cold ? (run.losses.at(-1)?.[0] ?? 0) : run?.figures.length;
  const after = run && !run.done ? ` after step ${step}, and no step is lost` : "";
  notice(`The worker stopped (${reason}). Another one goes on${after}.`);
  page.open = false;
  buttons();
  startWorkers();
}

function watchForSilence() {
  const { run } = page;
  const waiting = run && !run.done && run.going && !document.hidden;
  if (waiting && performance.now() - page.heard > 1000 * SILENCE)
    startAgain(`it was silent for ${SILENCE} seconds`);
}

function moduleBytes() {
  const text = atob(byId("module").textContent.trim());
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

const send = (type, facts = {}, parts = []) =>
  page.workers[0].postMessage({ type, ...facts }, parts);

/** Tell what happened, in a sentence that stays. */
function notice(text) {
  byId("notice").hidden = false;
  byId("notice").textContent = text;
}

function fail(text) {
  page.failed = true;
  for (const worker of page.workers) worker.terminate();
  byId("notice").hidden = true;
  byId("problem").hidden = false;
  byId("problem").textContent = `Something is wrong: ${text}.`;
  for (const control of document.querySelectorAll("main button")) control.disabled = true;
}

/** What the page does with each message. */
const hear = {
  stage: ({ text }) => status(text),

  ready({ switches, questions, passages, training, parameters, hash }) {
    const { run } = page;
    const again = page.switches.length > 0;
    Object.assign(page, { open: true, switches, questions });
    if (again) {
      if (run && !run.done) begin(run);
      return buttons();
    }
    byId("size").textContent = `${(parameters / 1e6).toFixed(2)} million`;
    byId("passages").textContent = passages.toLocaleString("en");
    byId("questions").textContent = training.toLocaleString("en");
    byId("start-hash").textContent = hash;
    for (const one of switches) byId("switches").append(switchOf(one));
    page.workers.forEach(
      (_, i) => [1, 2, 4].includes(i + 1) && byId("workers").append(new Option(i + 1)),
    );
    byId("workers").value = page.workers.length;
    const on = readAddress();
    status(
      on.length
        ? `Ready, with a switch on: ${on.map(plain).join(" + ")}. Press Train, and compare with the dashed curve.`
        : "Ready. The agent answers questions of one search; press Train.",
    );
    recall();
    buttons();
    send("evaluate", { count: BEFORE_AND_AFTER, run: null });
    send("ask", questions[0]);
    byId("question").value = questions[0].question;
    drawCurve();
  },

  live({ records }) {
    drawGroup(records, "Sampling now");
  },

  step({ step, steps, figures, seconds, group, hash, workers, state }) {
    const { run } = page;
    run.figures[step - 1] = figures;
    run.seconds += seconds;
    Object.assign(run, { hash, group, state });
    const rate = Math.round(figures.tokens / seconds).toLocaleString("en");
    const who = workers > 1 ? `, ${workers} workers` : "";
    status(
      `Step ${step} of ${steps}: ${run.seconds.toFixed(1)} s, ${rate} tokens per second${who}.`,
    );
    remember();
    drawGroup(group, `Step ${step}`);
    page.group = group;
    page.groupStep = step;
    byId("no-figures").hidden = true;
    byId("figures").replaceChildren(...figureLines(run));
    drawCurve();
    drawRuns();
    buttons();
  },

  /** Some steps of the cold start are done. */
  cold({ step, steps, loss, state }) {
    const { run } = page;
    run.losses.push([step, loss]);
    run.state = state;
    const wall = (performance.now() - run.began) / 1000;
    const left = Math.ceil(wall * (steps / step - 1));
    status(
      `Cold start, step ${step} of ${steps}, ${wall.toFixed(0)} s, about ${left} s left. Loss ${loss.toFixed(3)}.`,
    );
    drawColdStart();
  },

  /** The cold start is done, and RL begins. */
  taught({ hash }) {
    page.run.taught = hash;
    status("The cold start is done. Sampling the first attempts …");
  },

  paused() {
    const { figures, steps, scratch, losses, done } = page.run;
    if (done) return; // its last step ended meanwhile
    const cold = scratch && !figures.length;
    const place = cold
      ? `${losses.at(-1)?.[0] ?? 0} of the cold start`
      : `${figures.length} of ${steps}`;
    status(`Paused after step ${place}.`);
    buttons();
  },

  done() {
    const { run } = page;
    run.done = true; // its state stays, for more steps
    run.wall = (performance.now() - run.began) / 1000;
    const wall = run.wall.toFixed(1);
    const pressed = run.more ? "the button" : "Train";
    status(
      `Done: ${run.figures.length} steps, ${wall} seconds after you pressed ${pressed}. The weights' SHA-256 is ${run.hash}.`,
    );
    remember();
    compareHash(run);
    buttons();
    drawRuns();
    send("evaluate", { count: BEFORE_AND_AFTER, run: page.runs.length - 1 });
    ask();
  },

  /** Weights were tested: the start weights (`run` is null), a run's at its end, or those of a cold start. */
  evaluated({ em, hops, step, run: number }) {
    const { run } = page;
    const score = { em, hops, step };
    if (number === null) page.before = score;
    else if (step === 0) run.before = score;
    else page.runs[number].after = score;
    drawRuns();
    drawCurve();
    const asked = number === null ? !run?.scratch : step === 0 || page.runs[number] === run;
    if (!asked) return; // another run began meanwhile
    const before = run?.scratch ? run.before : page.before;
    showScore(before, step > 0 ? score : null);
    byId("score").dataset.after = step > 0 ? em : "";
  },

  answer({ record, step }) {
    byId("answer").replaceChildren(...answerLines(record, step));
  },

  problem({ text, opened }) {
    if (!opened) return fail(text);
    if (page.run) page.run.done = true; // a run that cannot go on; the agent still answers
    notice(`The run ended: ${text}.`);
    buttons();
    drawRuns();
  },
};

const status = (text) => (byId("status").textContent = text);

/** Tell exact match before training, and what came of it, with the shares of one, two and three searches. */
function showScore(before, after) {
  const tell = ({ em, hops }) =>
    `${em.toFixed(3)} right (one, two, three searches: ${hops.map((share) => share.toFixed(3)).join(", ")})`;
  const then = after ? `; ${tell(after)} after step ${after.step}` : "";
  byId("score").textContent =
    `${BEFORE_AND_AFTER} test questions, answered greedily: ${tell(before)} before training${then}.`;
}

/** Forget what is said of the run before. */
function clearWords(scratch) {
  page.hidden = false;
  byId("hidden").hidden = byId("notice").hidden = true;
  byId("same").textContent = "";
  byId("score").dataset.after = "";
  if (scratch) byId("score").textContent = "Random weights are tested after their cold start.";
  else if (page.before) showScore(page.before, null);
}

// ------------------------------------------------------------------------------------------ controls

function switchOf({ name, title, says }) {
  const box = Object.assign(document.createElement("input"), { type: "checkbox", value: name });
  return make(
    "label",
    "switch",
    box,
    make("span", "", make("b", "", title), make("span", "small", says)),
  );
}

function train(scratch) {
  const boxes = [...byId("switches").querySelectorAll(":checked")];
  const run = {
    switches: boxes.map(({ value }) => value),
    seed: Number(byId("seed").value),
    steps: Number(byId("steps").value),
    workers: Number(byId("workers").value),
    scratch,
    more: false,
    losses: [],
    figures: [],
    seconds: 0,
    going: true,
    done: false,
    state: null,
    began: performance.now(),
  };
  page.run = run;
  page.runs.push(run);
  clearWords(scratch);
  status(
    scratch
      ? "Random weights, which know nothing. The cold start begins …"
      : "Sampling the first attempts …",
  );
  begin(run);
  buttons();
  drawRuns();
  drawCurve();
  drawColdStart();
}

/** Go on with a run that is done. The learning rate then falls as in a run of all these steps. */
function trainMore() {
  const { run } = page;
  Object.assign(run, { more: true, done: false, going: true, steps: run.steps + MORE });
  run.began = performance.now();
  byId("same").textContent = "";
  byId("score").dataset.after = "";
  status("Sampling more attempts …");
  begin(run);
  buttons();
  drawRuns();
  drawCurve();
}

/** Begin a run, or go on with it after its last step. */
function begin(run) {
  const { steps, seed, switches, workers, state } = run;
  page.heard = performance.now();
  const plays = run.scratch && !run.figures.length ? byId("plays").textContent : null;
  send("train", { steps, seed, switches, workers, state, plays });
  if (!run.going) send("pause");
}

/** Turn on what the address names, such as `#switch=sign-flipped`. Returns the names. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1)).getAll("switch");
  const boxes = [...byId("switches").querySelectorAll("input")];
  const on = boxes.filter(({ value }) => wanted.includes(value));
  for (const box of on) box.checked = true;
  return on.map(({ value }) => value);
}

const KEPT = "agent-r1-train-page";

/** Remember what was trained. Weights are not kept: they belong to the open page. */
function remember() {
  const { figures, steps, seed, done } = page.run;
  try {
    localStorage.setItem(KEPT, JSON.stringify({ taken: figures.length, steps, seed, done }));
  } catch {
    // The browser keeps nothing for pages from the disk.
  }
}

/** Say what became of the run that the page had when it was last open. */
function recall() {
  try {
    const { taken, steps, seed, done } = JSON.parse(localStorage.getItem(KEPT));
    if (done !== false) return;
    localStorage.removeItem(KEPT);
    notice(
      `When this page was closed, a run of seed ${seed} had taken ${taken} of ${steps} steps. They went with the page; press Train to take the same steps again.`,
    );
  } catch {
    // Nothing was kept.
  }
}

/** Show which buttons do something now. */
function buttons() {
  const { run } = page;
  const going = Boolean(run && !run.done && run.going);
  const paused = Boolean(run && !run.done && !run.going);
  for (const id of ["train", "scratch", "again"]) byId(id).disabled = !page.open || going;
  byId("train").textContent = run ? "Train again" : "Train";
  byId("more").disabled = !page.open || !run?.done || !run.state;
  byId("pause").disabled = !going && !paused;
  byId("pause").textContent = paused ? "Continue" : "Pause";
  byId("one").disabled = !paused;
  for (const id of ["ask", "question", "another"]) byId(id).disabled = !page.open;
  byId("scope").disabled = !page.group;
  if (page.group) byId("scope").textContent = `Open step ${page.groupStep} in the microscope`;
}

function pauseOrContinue() {
  page.run.going = !page.run.going;
  send(page.run.going ? "resume" : "pause");
  buttons();
}

function ask() {
  const text = byId("question").value.trim();
  const known = page.questions.find(({ question }) => question === text);
  if (!text) return;
  const { run } = page;
  const wait = run && !run.done && run.going ? "The agent answers after this step …" : "Asking …";
  byId("answer").replaceChildren(make("p", "small", wait));
  send("ask", known ?? { question: text, answers: [] });
}

/** Show the last step's group. It stays while the training goes on, so that it can be read. */
function openMicroscope() {
  microscope(byId("microscope-here"), { records: page.group });
}

function connect() {
  for (const seed of SEEDS) byId("seed").append(new Option(seed));
  byId("train").onclick = () => train(false);
  byId("scratch").onclick = () => train(true);
  byId("again").onclick = () => {
    train(false);
    byId("curve").scrollIntoView({ block: "center" });
  };
  byId("more").onclick = trainMore;
  byId("pause").onclick = pauseOrContinue;
  byId("one").onclick = () => send("step");
  byId("scope").onclick = openMicroscope;
  byId("asking").onsubmit = ask;
  byId("another").onclick = () => {
    const { question } = page.questions[Math.floor(Math.random() * page.questions.length)];
    byId("question").value = question;
    ask();
  };
  byId("seed").onchange = byId("steps").onchange = drawCurve;
  selectable(byId("tree"), byId("facts"));
  document.onvisibilitychange = () => {
    const going = page.run && !page.run.done && page.run.going;
    if (document.hidden && going) page.hidden = true;
    byId("hidden").hidden = !page.hidden;
  };
  setInterval(watchForSilence, 5000);
  addEventListener("beforeunload", (event) => {
    // A reload would lose the run: the browser asks first.
    if (page.run && !page.run.done) event.preventDefault();
  });
}

// --------------------------------------------------------------------------------------------- curve

const [WIDE, HIGH, LEFT, BELOW] = [640, 260, 40, 28];

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const HOPS = ["one search", "two searches", "three searches"];
const SMOOTHED = 5; // a step asks about five questions of one search, and as many of three

/** Return points [step, share]: the mean of a step and the four before it, of one kind of question. */
function smoothed(steps, kind) {
  return steps.flatMap((_, i) => {
    const last = steps.slice(Math.max(0, i + 1 - SMOOTHED), i + 1).map((hops) => hops[kind]);
    const asked = last.filter((share) => share !== null); // a step may ask no question of a kind
    return asked.length ? [[i + 1, asked.reduce((a, b) => a + b) / asked.length]] : [];
  });
}

/** Draw lines for shares of 0, 1/4, ... 1, and the names of some steps. Returns elements, and the scales. */
function axes(first, last, steps) {
  const x = (step) => LEFT + ((WIDE - LEFT - 12) * (step - first)) / Math.max(last - first, 1);
  const y = (share) => HIGH - BELOW - (HIGH - BELOW - 12) * share;
  const lines = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    svg("line", { x1: LEFT, x2: WIDE - 12, y1: y(share), y2: y(share), class: "grid" }),
    svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, String(share)),
  ]);
  for (const step of steps) {
    const anchor = step === last ? "end" : "middle";
    lines.push(svg("text", { x: x(step), y: HIGH - 8, "text-anchor": anchor }, String(step)));
  }
  return { lines, x, y };
}

/** Draw a line through points [step, share]. */
function lineThrough(points, { x, y }, look, name = "") {
  const place = ([step, share], i) =>
    `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(share).toFixed(1)}`;
  return svg("path", { d: points.map(place).join(""), class: look }, svg("title", {}, name));
}

/** Draw right answers by kind of question, of all runs, and the recorded healthy run of the same seed. */
function drawCurve() {
  const most = Math.max(Number(byId("steps").value), ...page.runs.map((run) => run.steps));
  const named = Array.from({ length: most + 1 }, (_, step) => step).filter(
    (step) => step % (most > 60 ? 10 : 5) === 0,
  );
  const scales = axes(0, most, named);
  const { lines } = scales;
  const add = (steps, look, name) =>
    HOPS.forEach((title, kind) => {
      const points = smoothed(steps, kind);
      lines.push(lineThrough(points, scales, `hop${kind + 1} ${look}`, `${name}: ${title}`));
    });
  const mark = ({ step, hops }) =>
    hops.forEach((share, kind) => {
      const place = { cx: scales.x(step), cy: scales.y(share), r: 4, class: `hop${kind + 1}` };
      lines.push(
        svg("circle", place, svg("title", {}, `greedy, ${HOPS[kind]}: ${share.toFixed(3)}`)),
      );
    });
  const healthy = !page.run?.scratch && recorded.healthy[byId("seed").value];
  if (healthy) add(healthy.hops.slice(0, most), "recorded", "recorded");
  page.runs.forEach((run, i) => {
    const steps = run.figures.map(({ hops }) => hops);
    add(steps, run === page.run ? "now" : "then", `run ${i + 1}, ${nameOf(run)}, seed ${run.seed}`);
  });
  const before = page.run?.scratch ? page.run.before : page.before;
  for (const score of [before, page.run?.after]) if (score) mark(score);
  byId("curve").replaceChildren(...lines);
  const steps = page.run?.figures.map(({ hops }) => hops) ?? [];
  const last = HOPS.map((_, kind) => smoothed(steps, kind).at(-1)?.[1].toFixed(2) ?? "none");
  const now = steps.length ? `; now ${last.join(", ")}` : "";
  byId("curve").ariaLabel = `Right answers of each step with one, two and three searches${now}`;
}

/** Draw what a whole run of the preset discover reached, as it was recorded. */
function drawRest() {
  const { validation } = recorded;
  const steps = validation.map(([step]) => step);
  const scales = axes(0, steps.at(-1), steps);
  HOPS.forEach((title, kind) => {
    const points = validation.map(([step, hops]) => [step, hops[kind]]);
    scales.lines.push(lineThrough(points, scales, `hop${kind + 1} now`, title));
  });
  byId("rest").replaceChildren(...scales.lines);
}

const HIGHEST_LOSS = 3; // nats per token; random weights begin above it

/** Draw the loss of the cold start, which comes before the curve of rewards. */
function drawColdStart() {
  const losses = page.run.losses;
  byId("cold").hidden = !page.run.scratch;
  if (!losses.length) return byId("cold-curve").replaceChildren();
  const [high, low] = [14, 96];
  const steps = COLD_STEPS;
  const x = (step) => LEFT + ((WIDE - LEFT - 12) * step) / steps;
  const y = (loss) => low - ((low - high) * Math.min(loss, HIGHEST_LOSS)) / HIGHEST_LOSS;
  const lines = [];
  for (const loss of [0, 1, 2, 3]) {
    lines.push(svg("line", { x1: LEFT, x2: WIDE - 12, y1: y(loss), y2: y(loss), class: "grid" }));
    lines.push(svg("text", { x: LEFT - 6, y: y(loss) + 4, "text-anchor": "end" }, String(loss)));
  }
  for (const step of [150, 300, COLD_STEPS]) {
    const anchor = step === COLD_STEPS ? "end" : "middle";
    lines.push(svg("text", { x: x(step), y: low + 18, "text-anchor": anchor }, String(step)));
  }
  const path = losses
    .map(([step, loss], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`)
    .join("");
  lines.push(svg("path", { d: path, class: "well now" }));
  byId("cold-curve").replaceChildren(...lines);
}

const percent = (share) => `${Math.round(100 * share)} %`;
/** Name a figure, and say in which runs it is wrong. */
const FIGURES = {
  reward: ["mean reward", (value) => value.toFixed(3)],
  em: ["right answers", percent],
  calls: ["searches per attempt", (value) => value.toFixed(2)],
  trained: ["tokens that have a loss", percent],
  gap: ["gap between sampler and trainer", (value) => value.toPrecision(2)],
  kl: ["log-ratio to sampler or start", (value) => value.toPrecision(2)],
  clipped: ["tokens beyond the clip", percent],
  zero: ["attempts that teach nothing", percent],
  norm: ["norm of the gradient", (value) => value.toFixed(2)],
};

function figureLines(run) {
  const figures = run.figures.at(-1);
  const reveals = page.switches
    .filter(({ name }) => run.switches.includes(name))
    .map(({ shows }) => shows);
  return Object.entries(FIGURES).flatMap(([name, [title, format]]) => {
    const look = reveals.includes(name) ? "reveals" : "";
    return [make("dt", look, title), make("dd", look, format(figures[name]))];
  });
}

const lastFive = (rewards) =>
  rewards.slice(-5).reduce((a, b) => a + b, 0) / Math.min(5, rewards.length);

/** List the runs of this page with the mean reward of their last five steps. */
function drawRuns() {
  byId("runs").hidden = !page.runs.length;
  const lines = page.runs.map((run, i) => {
    const rewards = run.figures.map(({ reward }) => reward);
    const healthy = !run.scratch && recorded.healthy[run.seed]?.reward;
    const comparable = healthy && run.done && run.steps === healthy.length;
    const difference = comparable ? lastFive(rewards) - lastFive(healthy) : null;
    const cells = [
      i + 1, nameOf(run), run.seed, `${run.figures.length} of ${run.steps}`,
      rewards.length ? lastFive(rewards).toFixed(3) : "",
      difference === null ? "" : difference.toFixed(3).replace("-", "−"),
      run.after ? `${run.after.em.toFixed(3)}: ${run.after.hops.map((share) => share.toFixed(3)).join(", ")}` : "",
    ]; // prettier-ignore
    return make("tr", "", ...cells.map((cell) => make("td", "", String(cell))));
  });
  byId("runs")
    .querySelector("tbody")
    .replaceChildren(...lines);
}

/** Compare the final weights with those that the command recorded: equal bits, or a notice. */
function compareHash(run) {
  const known = recorded.healthy[run.seed];
  if (run.scratch || run.switches.length || run.more) return;
  if (!known || run.steps !== known.reward.length) return;
  byId("same").textContent =
    known.hash === run.hash
      ? "Every bit of the weights is as on the machine that recorded this seed."
      : `This browser computed other weights than the record (${known.hash}): please report it.`;
}

// --------------------------------------------------------------------------------------------- group

/** Draw the attempts of a group as a tree: what they share once, then a branch for each way to go on. */
function drawGroup(records, title) {
  byId("group-title").textContent = title;
  byId("group-question").textContent =
    `${visible(records[0].question)} (${records[0].ground_truth.join(" or ")})`;
  const start = records[0].rows[0].action_mask.indexOf(1);
  byId("tree").replaceChildren(drawBranch(records, start));
}

function drawBranch(records, start) {
  const rows = records.map(({ rows: [row] }) => row);
  const [row] = rows;
  const line = make("div", "part", make("span", "count", String(rows.length)));
  const advantages = records.map(({ advantage }) => advantage ?? 0);
  const advantage = advantages.reduce((a, b) => a + b, 0) / advantages.length;
  let t = start;
  const shared = () => rows.every(({ input_ids: ids }) => ids[t] === row.input_ids[t]);
  for (; t < row.tokens.length && shared(); t++) {
    if (row.action_mask[t]) line.append(tokenOf(records[0], row, t, advantage));
    else if (row.action_mask[t - 1]) line.append(make("span", "chip", "reads the result"));
  }
  const ended = records.filter((_, i) => rows[i].tokens.length <= t);
  const going = records.filter((_, i) => rows[i].tokens.length > t);
  if (ended.length) line.append(leafOf(ended));
  if (!going.length) return make("li", "", line);
  const ways = [...Map.groupBy(going, (record) => record.rows[0].input_ids[t]).values()];
  ways.sort((a, b) => b.length - a.length);
  return make("li", "", line, make("ul", "", ...ways.map((way) => drawBranch(way, t))));
}

/** Colour a token by its advantage: the mean of the attempts that share it. */
function tokenOf(record, row, t, advantage) {
  const span = tokenSpan(row.tokens[t], () => ({
    token: JSON.stringify(visible(row.tokens[t])),
    probability: percent(Math.exp(row.logprobs[t])),
    advantage: record.advantage === undefined ? "not known yet" : advantage.toFixed(3),
  }));
  span.classList.add(advantage > 0 ? "up" : advantage < 0 ? "down" : "none");
  span.classList.toggle("control", CONTROL.test(row.tokens[t]));
  span.style.setProperty("--share", `${Math.round(Math.min(70, 40 * Math.abs(advantage)))}%`);
  return span;
}

function leafOf(records) {
  const [{ answer, em, reward, advantage, stop_reason: stop }] = records;
  if (!stop) return make("span", "small", " …");
  const said = answer ?? `no answer (${stop.replace("_", " ")})`;
  const worth =
    advantage === undefined
      ? ""
      : ` reward ${reward.toFixed(1)}, advantage ${advantage.toFixed(2)}`;
  const mark = make("b", em ? "right" : "wrong", `${em ? "✓" : "✗"} ${visible(said)}`);
  return make("p", "leaf", mark, make("span", "small", worth));
}

// -------------------------------------------------------------------------------------------- answer

const counted = (number, one, several) => `${number} ${number === 1 ? one : several}`;

/** Write what the agent did: its turns, the results that it read, and the verdict. */
function answerLines(record, step) {
  const [row] = record.rows;
  const lines = [];
  let [line, acting] = [null, null];
  for (let t = row.action_mask.indexOf(1); t < row.tokens.length; t++) {
    if (acting !== Boolean(row.action_mask[t])) {
      acting = Boolean(row.action_mask[t]);
      line = make("p", acting ? "turn agent" : "turn result");
      lines.push(line);
    }
    const text = visible(row.tokens[t]);
    line.append(CONTROL.test(row.tokens[t]) ? make("span", "control", text) : text);
  }
  const known = record.ground_truth.length > 0;
  const said = visible(record.answer ?? `no answer (${record.stop_reason.replace("_", " ")})`);
  const mark = !known ? "" : record.em ? "✓ " : "✗ ";
  const look = !known ? "" : record.em ? "right" : "wrong";
  const expected = known && !record.em ? ` Expected: ${record.ground_truth.join(" or ")}.` : "";
  const steps = counted(step, "step", "steps");
  const facts = ` After ${steps}, ${counted(record.calls, "search", "searches")}.${expected}`;
  lines.unshift(
    make("p", "verdict", make("b", look, `${mark}${said}`), make("span", "small", facts)),
  );
  return lines;
}

connect();
drawRest();
startWorkers();
