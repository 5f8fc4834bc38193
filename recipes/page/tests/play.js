/* Play episodes under Node for parity.py. In: a job as JSON on standard input. Out: one record on each line. */
(async () => {
  const job = JSON.parse(require("fs").readFileSync(0, "utf8"));
  const { header, weightsOf } = await unpack(job.data);
  const began = performance.now();
  const agent = openAgent(header);
  const opened = performance.now();
  let tokens = 0;
  let seconds = 0;
  for (const { checkpoint, number, temperature, noise } of job.episodes) {
    if (agent.checkpoint !== checkpoint) agent.decoder = new Decoder(header.shape, weightsOf(checkpoint));
    agent.checkpoint = checkpoint;
    const { question, answers } = header.questions[number];
    const start = performance.now();
    const draw = (turn, place) => noise[turn]?.[place];
    const record = await runEpisode(agent, question, answers, temperature, { draw });
    seconds += (performance.now() - start) / 1000;
    const { stop_reason, reward, em } = record;
    const rows = record.rows.map(({ logits, ...row }) => row);
    tokens += total(rows[0].action_mask);
    console.log(JSON.stringify({ rows, stop_reason, reward, em }));
  }
  console.log(JSON.stringify({ tokens, seconds, index_seconds: (opened - began) / 1000 }));
})();
