// A schedule played on a clock, as mpkit/plan/schedule/play.py plays it: when each action can run.
//
//   readSchedule   the text of `Schedule.spelled()`: a row per rank, such as "0F0 0F1&0B0"
//   play           each rank runs its row in order, each action as soon as what it needs is there
//   bubbleOf       the idle share of the makespan, averaged over ranks (GPipe's definition)

/** {rows, rankOf, stages, together, has}; an action is {kind, stage, microbatch, name}, with the name "2F0". */
function readSchedule(text) {
  const together = new Set(); // forwards that run as one with the backward after them: their results leave together
  const has = new Set();
  const rankOf = [];
  const rows = text.split("\n").map((line, rank) => [...line.matchAll(/(\d+)([FBIW])(\d+)(&?)/g)].map((match) => {
    const action = { kind: match[2], stage: Number(match[1]), microbatch: Number(match[3]), name: match[0].replace("&", "") };
    if (match[4]) together.add(action.name);
    has.add(action.name);
    rankOf[action.stage] = rank;
    return action;
  }));
  return { rows, rankOf, stages: rankOf.length, together, has };
}

/** [{name, stage}, ...]: what must be done before an action, besides what comes earlier in its row. */
function needsOf({ stages, has }, { kind, stage, microbatch }) {
  const need = (what, of) => ({ name: `${of}${what}${microbatch}`, stage: of });
  if (kind === "F") return stage ? [need("F", stage - 1)] : [];
  if (kind === "W") return [need("I", stage)];
  if (stage === stages - 1) return [need("F", stage)];
  const split = has.has(`${stage + 1}I${microbatch}`);
  return [need("F", stage), need(split ? "I" : "B", stage + 1)];
}

/**
 * By rank, in program order: {rank, action, free, start, end, left, from}.
 *
 * `free` is when the rank got to the action, `start` when everything that it needs was there, `left` when its result
 * left the rank, and `from` the need that another rank sends. `lengths` are seconds per action by kind, `hop` per message.
 */
function play(schedule, lengths, hop) {
  const { rows, rankOf, together } = schedule;
  const left = new Map(); // name -> when its result left its rank
  const times = rows.map(() => []);
  const waiting = new Map(); // name -> the ranks that cannot go on without it

  /** Run what can be run of a rank's row; returns the names of the actions whose results have left it. */
  const run = (rank) => {
    const done = times[rank];
    const gone = [];
    const leave = (each, time) => {
      each.left = time;
      left.set(each.action.name, time);
      gone.push(each.action.name);
    };
    for (const action of rows[rank].slice(done.length)) {
      const before = done.at(-1);
      const held = before && together.has(before.action.name) ? before : null;
      const free = before?.end ?? 0;
      const each = { rank, action, free, start: free, from: null };
      for (const need of needsOf(schedule, action)) {
        let at = need.name === held?.action.name ? free : left.get(need.name);
        if (at === undefined) {
          waiting.set(need.name, [...(waiting.get(need.name) ?? []), rank]);
          return gone;
        }
        if (rankOf[need.stage] !== rank) {
          at += hop;
          each.from = need;
        }
        each.start = Math.max(each.start, at);
      }
      each.end = each.start + lengths[action.kind];
      done.push(each);
      if (held) leave(held, each.end);
      if (!together.has(action.name) || done.length === rows[rank].length) leave(each, each.end);
    }
    return gone;
  };

  const ready = rows.map((_, rank) => rank);
  while (ready.length) {
    for (const name of run(ready.shift())) {
      ready.push(...(waiting.get(name) ?? []));
      waiting.delete(name);
    }
  }
  return times;
}

const makespanOf = (times) => Math.max(...times.flat().map(({ end }) => end));
const busyOf = (row, kinds = "FBIW") => row.reduce((sum, { action, start, end }) => sum + (kinds.includes(action.kind) ? end - start : 0), 0);

function bubbleOf(times) {
  const whole = makespanOf(times);
  return whole ? 1 - times.reduce((sum, row) => sum + busyOf(row), 0) / whole / times.length : 0;
}

/** The most micro-batches whose activations a rank holds at once: on each stage from F to B, or to W. */
function peakOf(row) {
  let [now, most] = [0, 0];
  for (const { action } of row) {
    if (action.kind === "F") now += 1;
    else if (action.kind !== "I") now -= 1;
    most = Math.max(most, now);
  }
  return most;
}
