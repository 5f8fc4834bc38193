"use strict";
/*
 * Play an episode, as env/hermes.py, env/base.py, tool/base.py and rollout/episode.py do: the agent writes a turn, its
 * calls are run, it reads the results, until it answers. In: a question. Out: a record in the form of rollouts/*.jsonl.
 */

const TAG = /<(\/?)(think|tool_call|answer|tool_response)>/g;
const MALFORMED = 'the call is not valid JSON; write {"name": ..., "arguments": {...}}';
const ACCEPTS = "accepts: query (string, required)";
const MAX_QUERY_CHARS = 2000;
/** What a row has for each token, next to its reward. */
const COLUMNS = ["input_ids", "tokens", "action_mask", "step_ids", "logprobs", "logits"];

/** Split a turn into its parts, in order and without their tags. An unmatched tag is text. */
function splitTurn(text) {
  const parts = [];
  let [kind, start, end] = ["text", 0, 0];
  for (const tag of text.matchAll(TAG)) {
    if (tag.index < end) continue; // inside a call's JSON
    const [opens, name] = [!tag[1], tag[2]];
    if (kind === "text" && (!opens || name === "tool_response")) continue;
    if (kind !== "text" && (name !== kind || (opens && kind === "think"))) continue;
    parts.push({ kind, text: text.slice(start, tag.index), closed: kind === "text" || !opens });
    [kind, start] = [opens ? name : "text", tag.index + tag[0].length];
    end = kind === "tool_call" ? jsonEnd(text, start) : 0;
  }
  parts.push({ kind, text: text.slice(start), closed: kind === "text" });
  return parts.filter((part) => part.text || part.kind !== "text");
}

/** Return where the JSON object at `start` ends; 0 if there is none, or a broken one. */
function jsonEnd(text, start) {
  const begin = start + /^\s*/.exec(text.slice(start))[0].length;
  let [depth, inString] = [0, false];
  for (let i = begin; i < text.length && (depth > 0 || text[begin] === "{"); i++) {
    if (text[i] === "\\" && inString) i++;
    else if (text[i] === '"') inString = !inString;
    else if (!inString && "{[".includes(text[i])) depth++;
    else if (!inString && "}]".includes(text[i])) depth--;
    if (depth > 0) continue;
    try {
      JSON.parse(text.slice(begin, i + 1));
      return i + 1;
    } catch {
      return 0;
    }
  }
  return 0;
}

/** Return the last closed answer, or null. */
function answerIn(text) {
  const closed = splitTurn(text).filter((part) => part.kind === "answer" && part.closed);
  return closed.at(-1)?.text.trim() || null;
}

/** Return whether a turn is thoughts, then one answer, then only blanks. */
function isWellFormed(text) {
  const tags = Array.from(text.matchAll(TAG), (tag) => tag[0]).join("");
  const form = /^(<think><\/think>)*<answer><\/answer>$/;
  return form.test(tags) && text.trimEnd().endsWith("</answer>") && answerIn(text) !== null;
}

/** Parse the text between a call's tags. A fault is `error`, in words for the agent. */
function parseCall({ text, closed }) {
  if (!closed) return { error: "the call is not closed with </tool_call>" };
  let call;
  try {
    call = JSON.parse(text);
  } catch {
    return { error: MALFORMED };
  }
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  if (!isObject(call) || typeof call.name !== "string") return { error: 'the call has no "name"' };
  if (!isObject(call.arguments)) return { ...call, error: 'the call has no "arguments" object' };
  return { name: call.name, arguments: call.arguments };
}

/** Quote a value of the model as Python's repr does, shortened. */
function quote(value) {
  const mark = String(value).includes("'") && !value.includes('"') ? '"' : "'";
  const escaped = String(value).replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
  const kind = { object: "dict", boolean: value ? "True" : "False", number: String(value) };
  let text = kind[typeof value] ?? mark + escaped + mark;
  if (value === null || Array.isArray(value)) text = value ? "list" : "None";
  return text.length <= 40 ? text : `${text.slice(0, 36)}...${text.at(-1)}`;
}

/** Return why a call of the search tool is not run, or null. */
function refusal(call) {
  if (call.error) return call.error;
  if (call.name !== "search") return `unknown tool ${quote(call.name)}; available: search`;
  if (!("query" in call.arguments)) return `search: missing argument 'query'; ${ACCEPTS}`;
  const unknown = Object.keys(call.arguments).find((key) => key !== "query");
  if (unknown !== undefined) return `search: unknown argument ${quote(unknown)}; ${ACCEPTS}`;
  const { query } = call.arguments;
  if (typeof query !== "string") {
    return `search: argument 'query' must be string, not ${quote(query)}; ${ACCEPTS}`;
  }
  if ([...query].slice(0, MAX_QUERY_CHARS).join("").trim()) return null;
  return "search: query is empty; write what to look for, for example the name of an entity";
}

/** Cut characters to a number in the middle, as `cut_middle` does in tool/base.py. */
function cutMiddle(content, maxChars) {
  if (content.length <= maxChars) {
    return content.join("");
  }
  const mark = ` [cut off: ${content.length} characters] `;
  const room = maxChars - mark.length;
  const end = Math.floor(room / 3);
  if (end < 1) {
    return content.slice(0, maxChars).join("");
  }
  return content.slice(0, room - end).join("") + mark + content.slice(-end).join("");
}

/** How many passages the results of an episode have: `SearchTool.passages` in tool/search.py. */
function passagesOf(firstQuery, { topK, minK }) {
  const fewest = minK ?? topK;
  const sum = [...firstQuery].reduce((sum, letter) => sum + letter.codePointAt(0), 0);
  return fewest + (sum % (topK - fewest + 1));
}

/** Run one call. Return what the agent reads. */
function callTool(environment, call) {
  const { index, settings } = environment;
  const { maxChars } = settings;
  const fault = refusal(call);
  if (fault) {
    const line = [...fault.split(/\s+/).filter(Boolean).join(" ")];
    const short = line.length <= 300 ? line : [...line.slice(0, 297), "..."];
    return { ok: false, content: [..."error: ", ...short].slice(0, maxChars).join("") };
  }
  const query = [...call.arguments.query].slice(0, MAX_QUERY_CHARS).join("").trim();
  environment.firstQuery ??= query;
  const hits = index.search(query, passagesOf(environment.firstQuery, settings));
  const lines = hits.map(({ title, text }) => {
    const line = text.startsWith(title) ? text : `${title}: ${text}`;
    return line.split(/\s+/).filter(Boolean).join(" ");
  });
  const content = [...(lines.join("\n") || "no results")];
  return { ok: true, content: cutMiddle(content, maxChars), hits };
}

/** The environment of one episode: question answering with a search tool. */
class Environment {
  constructor(index, settings) {
    Object.assign(this, {
      index,
      settings,
      turns: 0,
      toolCalls: 0,
      invalidInARow: 0,
      finalTurn: "",
      firstQuery: null,
    });
  }

  /** Process a turn. Return the calls and results, or why the episode ends. */
  step(text, finishReason) {
    const { maxTurns, maxToolCalls, maxInvalidCalls } = this.settings;
    this.turns++;
    if (finishReason === "length") return { stop: "max_tokens" };
    const calls = splitTurn(text)
      .filter((part) => part.kind === "tool_call")
      .map(parseCall);
    if (answerIn(text) !== null || calls.length === 0) {
      this.finalTurn = text;
      return { stop: answerIn(text) !== null ? "answered" : "no_answer" };
    }
    if (this.turns >= maxTurns) return { stop: "max_turns" };
    if (this.toolCalls + calls.length > maxToolCalls) return { stop: "tool_budget" };
    this.toolCalls += calls.length;
    const results = calls.map((call) => callTool(this, call));
    let longest = 0;
    for (const result of results) {
      this.invalidInARow = result.ok ? 0 : this.invalidInARow + 1;
      longest = Math.max(longest, this.invalidInARow);
    }
    return { calls, results, stop: longest >= maxInvalidCalls ? "invalid_calls" : null };
  }

  /** Pay for the answer: exact match, minus a penalty for a malformed last turn. */
  outcome(stop, targets) {
    const last = stop === "answered" ? this.finalTurn : "";
    const answer = answerIn(last);
    const em = answer !== null && exactMatch(answer, targets) ? 1 : 0;
    return { answer, em, reward: em - (isWellFormed(last) ? 0 : this.settings.formatPenalty) };
  }
}

/** Compare after the SQuAD rules: case, ASCII punctuation, articles and white space do not count. */
function exactMatch(answer, targets) {
  const normalize = (text) => {
    const bare = text.toLowerCase().replace(/[!-/:-@[-`{-~]/g, "");
    const words = bare.replace(/(?<![\p{L}\p{N}_])(a|an|the)(?![\p{L}\p{N}_])/gu, " ").trim();
    return words.split(/\s+/).join(" ") || text.trim();
  };
  return targets.some((target) => normalize(target) === normalize(answer));
}

/**
 * Run one episode. `watch` may have onRead(row, start, result) and onToken(row, place), each awaited, so that a page can
 * draw what is new in the row, and stay responsive; and draw(turn, place), which returns the random numbers of a test.
 */
async function runEpisode(agent, question, targets, temperature, watch = {}) {
  const { decoder, chat, index, settings } = agent;
  const env = new Environment(index, settings);
  const cache = decoder.newCache(settings.maxContext);
  const row = Object.fromEntries(COLUMNS.map((name) => [name, []]));
  const { input_ids: ids } = row;
  const push = (id, ...facts) => {
    const values = [id, chat.tokenizer.decode([id]), ...facts];
    COLUMNS.forEach((name, i) => row[name].push(values[i]));
  };
  const read = async (observation, result) => {
    const start = ids.length;
    for (const id of observation) push(id, 0, -1, 0, null);
    await watch.onRead?.(row, start, result);
  };
  const steps = [];
  let stop = null;
  await read(chat.promptIds(question), null);
  while (!stop) {
    const [start, room] = [ids.length, settings.maxContext - ids.length];
    if (room < 1) {
      stop = "context_overflow";
      break;
    }
    const most = Math.min(settings.maxTokensPerTurn, room);
    do {
      const logits = decoder.read(cache, ids);
      const uniform = (watch.draw ?? Math.random)(steps.length, ids.length - start);
      const { token, logprob } = sampleToken(logits, temperature, uniform);
      push(token, 1, steps.length, logprob, logits);
      await watch.onToken?.(row, ids.length - 1);
    } while (ids.length < start + most && !chat.stopIds.has(ids.at(-1)));
    const text = chat.turnText(ids.slice(start));
    const result = env.step(text, chat.stopIds.has(ids.at(-1)) ? "stop" : "length");
    steps.push({ text, ...result });
    stop = result.stop;
    if (stop === "max_tokens" && most < settings.maxTokensPerTurn) stop = "context_overflow";
    const contents = result.results?.map(({ content }) => content);
    if (!stop) await read(chat.continuationIds(contents, chat.closingIds.has(ids.at(-1))), result);
  }
  // The outcome is paid to the last action token. The record has the form of a line of rollouts/*.jsonl.
  const { answer, em, reward } = env.outcome(stop, targets);
  row.rewards = row.action_mask.map((_, t) => (t === row.action_mask.lastIndexOf(1) ? reward : 0));
  const told = { question, ground_truth: targets, stop_reason: stop, reward, em, answer };
  return { ...told, rows: [row], steps };
}

/** Make what plays: chat format, index and limits. The decoder is set for each checkpoint. */
function openAgent({ tokenizer, chat, corpus, settings }) {
  const format = new ChatFormat(new Tokenizer(tokenizer), chat);
  return { chat: format, index: new SearchIndex(corpus, settings.dim), settings, decoder: null };
}
