// A schedule as a reader writes it: a line per rank, such as "F0 F1 B0 B1", with I and W for a backward in two halves.
// A rank that holds several stages names the stage first: "0F0 3F0". "0F3&3B1" run as one. An error says what is wrong where, and what works.

const ACTION = /^(\d*)([FBIW])(\d+)$/;

/** The text of a schedule as a reader would write it: without stages, where each rank has the one of its number. */
function ownText(text) {
  const lines = text.split("\n");
  const plain = lines.every((line, rank) => line.split(" ").every((word) => word.match(ACTION)?.[1] === String(rank)));
  return plain ? lines.map((line) => line.replace(/\b\d+(?=[FBIW])/g, "")).join("\n") : text;
}

/** The same as `readSchedule` takes it; throws an Error that says what is wrong. */
function readOwn(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!lines.length || lines.length > 32) throw new Error(`There are ${lines.length} lines: write one for each rank, 1 to 32 of them.`);
  const written = lines.map((line, rank) => line.split(/\s+/).map((word) => word.split("&").map((part) => {
    const found = part.match(ACTION);
    if (!found) throw new Error(`Rank ${rank}: "${word}" is no action. Write F0 for the forward of micro-batch 0, B0 for its backward, or I0 and W0 for its halves.`);
    const [, stage, kind, microbatch] = found;
    return `${stage === "" ? rank : Number(stage)}${kind}${Number(microbatch)}`;
  }).join("&")).join(" "));
  const schedule = readSchedule(written.join("\n"));
  complete(schedule);
  return schedule;
}

/** Each stage is on one rank, and has for each micro-batch one forward and one backward, or its halves. */
function complete({ rows, stages, has }) {
  const seen = new Set();
  const of = new Map();
  const numbers = new Set();
  rows.forEach((row, rank) => row.forEach(({ stage, microbatch, name }) => {
    if (seen.has(name)) throw new Error(`Rank ${rank}: ${name} is there twice.`);
    if ((of.get(stage) ?? rank) !== rank) throw new Error(`Stage ${stage} is on rank ${of.get(stage)} and on rank ${rank}: a stage is on one rank.`);
    seen.add(name);
    of.set(stage, rank);
    numbers.add(microbatch);
  }));
  for (let stage = 0; stage < stages; stage++) {
    if (!of.has(stage)) throw new Error(`No rank has stage ${stage}: ${stages} stages need the numbers 0 to ${stages - 1}.`);
    for (const number of [...numbers].sort((a, b) => a - b)) {
      const there = (kind) => has.has(`${stage}${kind}${number}`);
      const rank = of.get(stage);
      if (!there("F")) throw new Error(`Rank ${rank} has no F${number} of stage ${stage}: each stage computes each micro-batch.`);
      const whole = there("B");
      const halves = there("I") && there("W");
      if (!whole && !halves) throw new Error(`Rank ${rank} has no B${number} of stage ${stage}, and not both of I${number} and W${number}.`);
      if (whole && (there("I") || there("W"))) throw new Error(`Rank ${rank} has B${number} of stage ${stage}, and a half of it besides.`);
    }
  }
}

/** Throw an Error that says who waits for what, if a played schedule did not come to its end. */
function ended(schedule, times) {
  const stuck = schedule.rows.flatMap((row, rank) => (times[rank].length < row.length ? [[rank, row[times[rank].length]]] : []));
  if (!stuck.length) return;
  const done = new Set(times.flat().map(({ action }) => action.name));
  const words = stuck.map(([rank, action]) => {
    const need = needsOf(schedule, action).find(({ name }) => !done.has(name));
    return `rank ${rank} waits at ${action.name} for ${need.name} of rank ${schedule.rankOf[need.stage]}`;
  });
  throw new Error(`These ranks wait for each other: ${words.join("; ")}. Names begin with the stage.`);
}
