"use strict";
/*
 * Open all that training needs: module, tokenizer, index, start weights. In: the page's data and the module's bytes.
 * Out: a session, for worker.js and for Node.
 */

const SLOTS = 96; // episodes at once: 12 questions, 8 attempts each. A worker alone plays a step's 24 in two parts.

/** Open a session. `onStage` hears what takes time. */
async function openSession(data, module, onStage = () => {}, slots = SLOTS) {
  onStage("Unpacking weights and passages …");
  const { header, weightsOf } = await unpack(data);
  const trainer = await Trainer.open(module, slots);
  const named = weightsOf(0);
  const start = new Float32Array(trainer.count);
  let place = 0;
  for (const [name, count] of PARAMETERS) {
    const own = name === "embed.weight" ? WORDS * WIDTH : count; // the rows of zeros are not packed
    if (named[name].length !== own) throw new Error(`the data has no weights ${name}`);
    start.set(named[name], place);
    place += count;
  }
  trainer.setWeights(start);
  onStage(`Indexing ${header.corpus.length} passages …`);
  const hash = (text) => trainer.blake2b(text);
  const agent = {
    chat: new ChatFormat(new Tokenizer(header.tokenizer), header.chat),
    index: new QuickIndex(header.corpus, header.settings.dim, hash),
    settings: header.settings,
  };
  return { header, trainer, agent, start };
}
