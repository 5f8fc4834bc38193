"use strict";
/*
 * Play episodes, many at once. In: questions. Out: episodes: ids, which of them were sampled, and what was earned.
 *
 * The rules are those of `runEpisode` in js/episode.js of recipes/page; tests/test_episodes.py compares both with
 * Python. One call of the trainer reads a token of every live episode. The attempts at a question read its prompt once.
 */

/**
 * Play `samples` attempts at each question. `noise(question, sample, place)` gives the random number for the token at
 * `place` in the row. `onToken(episode)` sees each sampled token. Slots of the cache limit the number of episodes.
 * `first` is the number of the first question, if another worker plays those before it.
 */
function playGroups(trainer, agent, questions, options) {
  const { first: firstGroup = 0, samples, temperature, noise, onToken, pay } = options;
  const episodes = questions.flatMap((asked, i) => {
    const prompt = agent.chat.promptIds(asked.question);
    return Array.from({ length: samples }, (_, sample) =>
      newEpisode(agent, asked, prompt, firstGroup + i, sample, i * samples + sample),
    );
  });
  if (episodes.length > trainer.slots) throw new Error("more episodes than slots of the cache");
  // The first attempt at each question reads the prompt, and samples a token for every attempt.
  let readers = episodes.filter((episode) => episode.sample === 0);
  let followers = (episode) => episodes.slice(episode.slot, episode.slot + samples);
  while (readers.length) {
    const [batch, acting] = gather(readers, followers, noise);
    const { tokens, logprobs } = trainer.read(batch, temperature);
    acting.forEach((episode, i) => {
      if (episode.read === 0) {
        const first = episodes[episode.slot - episode.sample];
        trainer.copyCache(first.slot, episode.slot, first.read);
        episode.read = first.read;
      }
      act(agent, episode, tokens[i], logprobs[i]);
      if (episode.stop) settle(agent, episode, pay);
      onToken?.(episode);
    });
    readers = acting.filter((episode) => !episode.stop);
    followers = (episode) => [episode];
  }
  return episodes;
}

function newEpisode(agent, asked, prompt, group, sample, slot) {
  return {
    asked, group, sample, slot,
    ids: [...prompt],
    mask: prompt.map(() => 0),
    logprobs: prompt.map(() => 0),
    steps: [], // each turn: where it begins, its text, calls and results
    read: 0, // tokens that the cache holds
    turnStart: prompt.length,
    stop: null,
    env: new Environment(agent.index, agent.settings),
  }; // prettier-ignore
}

/** List the tokens that the cache lacks, and the episodes that sample after them. */
function gather(readers, followers, noise) {
  const batch = { ids: [], slots: [], positions: [], rows: [], uniforms: [] };
  const acting = [];
  for (const episode of readers) {
    for (; episode.read < episode.ids.length; episode.read++) {
      batch.ids.push(episode.ids[episode.read]);
      batch.slots.push(episode.slot);
      batch.positions.push(episode.read);
    }
    for (const follower of followers(episode)) {
      batch.rows.push(batch.ids.length - 1);
      batch.uniforms.push(noise(follower.group, follower.sample, follower.ids.length));
      acting.push(follower);
    }
  }
  return [batch, acting];
}

/** Append a sampled token. At the end of a turn, run its calls, and append what the agent reads. */
function act(agent, episode, token, logprob) {
  const { chat, settings } = agent;
  const { ids, mask, logprobs, env } = episode;
  ids.push(token);
  mask.push(1);
  logprobs.push(logprob);
  const start = episode.turnStart;
  const most = Math.min(settings.maxTokensPerTurn, settings.maxContext - start);
  const ended = chat.stopIds.has(token);
  if (!ended && ids.length < start + most) return;
  // Letters beyond ASCII can only come from a random token. Engines may know different versions of Unicode.
  const text = chat.turnText(ids.slice(start)).replace(/[^\n -~]/gu, "?");
  const result = env.step(text, ended ? "stop" : "length");
  episode.steps.push({ start, text, ...result });
  episode.stop = result.stop;
  if (result.stop === "max_tokens" && most < settings.maxTokensPerTurn) {
    episode.stop = "context_overflow";
  }
  if (episode.stop) return;
  const contents = result.results.map(({ content }) => content);
  for (const id of chat.continuationIds(contents, chat.closingIds.has(token))) {
    ids.push(id);
    mask.push(0);
    logprobs.push(0);
  }
  episode.turnStart = ids.length;
  if (ids.length >= settings.maxContext) episode.stop = "context_overflow";
}

/** Pay the outcome. `pay` may replace the reward (a switch does). */
function settle(agent, episode, pay) {
  const { answer, em, reward } = episode.env.outcome(episode.stop, episode.asked.answers);
  episode.toolCalls = episode.env.toolCalls;
  Object.assign(episode, { answer, em, env: null });
  episode.reward = pay ? pay(episode, reward) : reward;
}
