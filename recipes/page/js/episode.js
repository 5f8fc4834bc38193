"use strict";
/*
 * Play an episode, as env/hermes.py, env/base.py, tool/base.py and rollout/episode.py do: the agent writes a turn, its
 * calls are run, it reads the results, until it answers. In: a question. Out: a record in the form of rollouts/*.jsonl.
 */

const TAG = /<(\/?)(think|tool_call|answer|tool_response)>/g;
const MALFORMED = 'the call is not valid JSON; write {"name": ..., "arguments": {...}}';
const ACCEPTS = "accepts: query (string, required)";
const MAX_QUERY_CHARS = 2000;

/** Split a turn into its parts, in order and without their tags. An unmatched tag is text. */
function splitTurn(text) {
  const parts = [];
  let [kind, start] = ["text", 0];
  for (const tag of text.matchAll(TAG)) {
    const [opens, name] = [!tag[1], tag[2]];
    if (kind === "text" && (!opens || name === "tool_response")) continue;
    if (kind !== "text" && (name !== kind || (opens && kind === "think"))) continue;
    parts.push({ kind, text: text.slice(start, tag.index), closed: kind === "text" || !opens });
    [kind, start] = [opens ? name : "text", tag.index + tag[0].length];
  }
  parts.push({ kind, text: text.slice(start), closed: kind === "text" });
  return parts.filter((part) => part.text || part.kind !== "text");
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
    call = JSON.parse(text, (_, value) => {
      if (typeof value === "number" && !Number.isFinite(value)) throw new RangeError("1e999");
      return value;
    });
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
  let text = String(value);
  if (typeof value === "string") {
    const mark = value.includes("'") && !value.includes('"') ? '"' : "'";
    text = mark + value.replaceAll("\\", "\\\\").replaceAll("\n", "\\n") + mark;
  } else if (value === null || typeof value !== "number") {
    text =
      { null: "None", true: "True", false: "False" }[text] ??
      (Array.isArray(value) ? "list" : "dict");
  }
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

/** Run one call. Return what the agent reads. */
function callTool(index, call, { topK, maxChars }) {
  const fault = refusal(call);
  if (fault) {
    const line = [...fault.split(/\s+/).filter(Boolean).join(" ")];
    const short = line.length <= 300 ? line : [...line.slice(0, 297), "..."];
    return { ok: false, content: [..."error: ", ...short].slice(0, maxChars).join("") };
  }
  const query = [...call.arguments.query].slice(0, MAX_QUERY_CHARS).join("").trim();
  const hits = index.search(query, topK);
  const lines = hits.map(({ title, text }) => {
    const line = text.startsWith(title) ? text : `${title}: ${text}`;
    return line.split(/\s+/).filter(Boolean).join(" ");
  });
  const content = [...(lines.join("\n") || "no results")];
  const mark = ` [cut off: ${content.length} characters]`;
  const kept =
    content.length <= maxChars ? content : [...content.slice(0, maxChars - mark.length), mark];
  return { ok: true, content: kept.join(""), hits };
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
    const results = calls.map((call) => callTool(this.index, call, this.settings));
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
 * Run one episode. `watch` may have onRead(tokens), onToken(token) and onStep(result), each awaited, so that a page
 * can draw and stay responsive.
 */
async function runEpisode(
  agent,
  question,
  targets,
  { temperature = 0, seed = 0 } = {},
  watch = {},
) {
  const { decoder, chat, index, settings } = agent;
  const env = new Environment(index, settings);
  const cache = decoder.newCache(settings.maxContext);
  const tokens = [];
  const read = async (ids, result) => {
    const added = ids.map((id) => ({
      id,
      text: chat.tokenizer.decode([id]),
      sampled: false,
      step: -1,
    }));
    tokens.push(...added);
    await watch.onRead?.(added, result);
  };
  const steps = [];
  let stop = null;
  await read(chat.promptIds(question), null);
  while (!stop) {
    const room = settings.maxContext - tokens.length;
    if (room < 1) {
      stop = "context_overflow";
      break;
    }
    const most = Math.min(settings.maxTokensPerTurn, room);
    const noise = temperature > 0 ? drawNoise(deriveSeed(seed, steps.length), most) : [];
    let hidden = decoder.read(cache, tokens.map(({ id }) => id)); // prettier-ignore
    const action = [];
    while (action.length < most && !chat.stopIds.has(action.at(-1))) {
      const {
        token: id,
        logprob,
        others,
      } = sampleToken(decoder.logits(hidden), temperature, noise[action.length]);
      action.push(id);
      const token = {
        id,
        text: chat.tokenizer.decode([id]),
        sampled: true,
        step: steps.length,
        logprob,
        others,
      };
      tokens.push(token);
      await watch.onToken?.(token);
      if (action.length < most && !chat.stopIds.has(id)) hidden = decoder.step(cache, id);
    }
    const finishReason = chat.stopIds.has(action.at(-1)) ? "stop" : "length";
    const text = chat.turnText(action);
    const result = env.step(text, finishReason);
    steps.push({ text, finishReason, ...result });
    await watch.onStep?.(steps.at(-1));
    stop = result.stop;
    if (stop === "max_tokens" && room < settings.maxTokensPerTurn) stop = "context_overflow";
    const contents = result.results?.map(({ content }) => content);
    if (!stop)
      await read(chat.continuationIds(contents, chat.closingIds.has(action.at(-1))), result);
  }
  return recordOf(question, targets, tokens, steps, stop, env.outcome(stop, targets));
}

/** Write an episode in the form of a line of rollouts/*.jsonl. The outcome is paid to the last action token. */
function recordOf(question, targets, tokens, steps, stop, { answer, em, reward }) {
  const paid = tokens.findLastIndex((token) => token.sampled);
  const list = (value) => tokens.map(value);
  const row = {
    input_ids: list((token) => token.id),
    tokens: list((token) => token.text),
    action_mask: list((token) => Number(token.sampled)),
    logprobs: list((token) => token.logprob ?? 0),
    rewards: list((_, i) => (i === paid ? reward : 0)),
    step_ids: list((token) => token.step),
  };
  return {
    question,
    ground_truth: targets,
    stop_reason: stop,
    reward,
    em,
    answer,
    rows: [row],
    tokens,
    steps,
  };
}

/** Make what plays: chat format, index and limits. The decoder is set for each checkpoint. */
function openAgent({ tokenizer, chat, corpus, settings }) {
  const format = new ChatFormat(new Tokenizer(tokenizer), chat);
  return { chat: format, index: new SearchIndex(corpus, settings.dim), settings, decoder: null };
}
