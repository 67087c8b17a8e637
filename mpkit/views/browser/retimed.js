// A recorded run on another link, as mpkit/timeline/replay plays it: each rank goes through its communication and its
// waits, the links serve what became ready first, and everything else follows from the work done before it.
//
//   retime      a link program (link_program.py) and a link -> {start, end, issued} by row, the same numbers as Python's
//   figuresOf   bubble, step time and the extents of steps, as mpkit/timeline/metrics.py has them

const STEP = 128;

/** Whether one moment [time, rank, op] comes before another. */
const earlier = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];

/** A queue of [moment, request] that gives the earliest first. */
class Queue {
  constructor() {
    this.all = [];
  }

  push(item) {
    const { all } = this;
    let at = all.push(item) - 1;
    for (let up = (at - 1) >> 1; at && earlier(item[0], all[up][0]) < 0; up = (at - 1) >> 1) {
      [all[at], all[up]] = [all[up], all[at]];
      at = up;
    }
  }

  pop() {
    const { all } = this;
    const first = all[0];
    const last = all.pop();
    if (!all.length) return first;
    all[0] = last;
    for (let at = 0; ;) {
      const down = [2 * at + 1, 2 * at + 2].filter((each) => each < all.length).sort((a, b) => earlier(all[a][0], all[b][0]))[0];
      if (down === undefined || earlier(all[at][0], all[down][0]) <= 0) return first;
      [all[at], all[down]] = [all[down], all[at]];
      at = down;
    }
  }
}

/** Which ranks have issued which communication, and when the link serves it: network.py. */
class Network {
  constructor({ groups, kinds }, link) {
    Object.assign(this, { groups, kinds, link, open: new Map(), queue: new Queue(), out: [], in: [] });
  }

  rate(kind) {
    return this.link.bus[kind] ?? this.link.bandwidth;
  }

  /** A rank issues its part at `now`; returns its times if they are known already. */
  ask(rank, [op, kind, , group, number, , nbytes], now) {
    const [members, isMessage] = this.groups[group];
    const key = `${group} ${number} ${isMessage ? 0 : kind}`;
    let request = this.open.get(key);
    if (!request) {
      request = { key, kind, members, isMessage, asked: [], nbytes: 0, start: -1, end: -1 };
      this.open.set(key, request);
    } else if (request.end >= 0) { // the message was on its way before its receiver asked
      this.open.delete(key);
      return [rank, op, request.start, request.end, now];
    }
    const moment = [now, rank, op];
    request.asked.push(moment);
    if (kind === RECV) return null;
    request.nbytes = Math.max(request.nbytes, nbytes);
    if (kind === SEND) {
      this.queue.push([moment, request]);
    } else if (request.asked.length === members.length) {
      this.open.delete(key);
      this.queue.push([request.asked.reduce((last, each) => (earlier(each, last) > 0 ? each : last)), request]);
    }
    return null;
  }

  /** Serve what became ready first: [[rank, op, start, end, issued], ...]; null if there is nothing. */
  serve() {
    if (!this.queue.all.length) return null;
    const [[ready], request] = this.queue.pop();
    return request.isMessage ? this.message(request, ready) : this.collective(request, ready);
  }

  message(request, ready) {
    const [source, target] = request.members;
    const wire = request.nbytes * (1 / this.rate(SEND));
    const { latency } = this.link;
    const start = Math.max(ready, this.out[source] ?? 0, (this.in[target] ?? 0) - latency);
    const left = this.out[source] = start + wire;
    const arrived = this.in[target] = start + latency + wire;
    Object.assign(request, { start, end: arrived });
    if (request.asked.length === 2) this.open.delete(request.key);
    return request.asked.map(([issued, rank, op]) => [rank, op, start, rank === source ? left : arrived, issued]);
  }

  collective({ kind, nbytes, members, asked }, ready) {
    const start = members.reduce((time, rank) => Math.max(time, this.out[rank] ?? 0, this.in[rank] ?? 0), ready);
    const [rounds, factor] = this.kinds[`${kind} ${members.length}`];
    const { latency, ramp } = this.link;
    const took = members.length < 2 ? 0 : rounds * latency + (factor * nbytes) / this.rate(kind) + ramp * Math.sqrt(nbytes);
    const end = start + took;
    for (const rank of members) this.out[rank] = this.in[rank] = end;
    return asked.map(([issued, rank, op]) => [rank, op, start, end, issued]);
  }
}

/** One rank on its way through its controls: rank.py. */
class RankRun {
  constructor(rank, controls) {
    Object.assign(this, { rank, controls, at: 0, ends: new Map(), times: new Map(), pauses: [[-1, 0, 0]], waitsFor: -1 });
  }

  /** Go through communication and waits, until a wait is for something that was not served. */
  run(network) {
    let [, time, before] = this.pauses.at(-1);
    for (; this.at < this.controls.length; this.at++) {
      const control = this.controls[this.at];
      const [op, kind, work, , , ref] = control;
      const now = time + (work - before);
      if (kind !== WAIT) {
        const known = network.ask(this.rank, control, now);
        this.ends.set(op, known ? known[3] : Infinity);
        if (known) this.times.set(op, known.slice(2));
        continue;
      }
      let end = this.ends.get(ref) ?? now;
      if (end === Infinity) {
        this.waitsFor = ref;
        return;
      }
      if (end > now) {
        this.pauses.push([op, end, work]);
        [time, before] = [end, work];
      } else {
        end = now;
      }
      this.times.set(op, [now, end, now]);
    }
  }

  /** Its communication was served; whether it waited for that. */
  settle([, op, start, end, issued]) {
    this.ends.set(op, end);
    this.times.set(op, [start, end, issued]);
    const waited = this.waitsFor === op;
    if (waited) this.waitsFor = -1;
    return waited;
  }

  /** Seconds on the clock after that much work and all waits before an op. */
  clock(work, op) {
    let [low, high] = [0, this.pauses.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pauses[middle][0] < op) low = middle + 1;
      else high = middle;
    }
    const [, time, before] = this.pauses[Math.max(low - 1, 0)];
    return time + (work - before);
  }
}

/** {start, end, issued} of every row on a link {latency, bandwidth, bus: {kind: rate}, ramp}. */
function retime(program, link) {
  const network = new Network(program, link);
  const ranks = program.controls.map((controls, rank) => new RankRun(rank, controls));
  for (let run = ranks; ;) {
    run.forEach((each) => each.run(network));
    const settled = network.serve();
    if (!settled) break;
    run = settled.filter((one) => ranks[one[0]].settle(one)).map(([rank]) => ranks[rank]);
  }
  const count = program.rows.length;
  const [start, end, issued] = [new Float64Array(count), new Float64Array(count), new Float64Array(count)];
  program.rows.forEach(([rank, op, work, done, close], row) => {
    const { times } = ranks[rank];
    const placed = times.get(op) ?? [ranks[rank].clock(work, op), ranks[rank].clock(done, close)];
    [start[row], end[row], issued[row]] = [placed[0], placed[1], placed[2] ?? placed[0]];
  });
  return { start, end, issued };
}

/** {steps: Map(step -> [start, end]), step, bubble, time, busy: [...]} of the last step that all ranks completed. */
function figuresOf({ kind, lane, depth, step, rank }, { start, end }, ranks) {
  const marks = new Map();
  const steps = new Map();
  const own = (i) => lane[i] === LANE.DATA || (lane[i] === LANE.COMPUTE && depth[i] === 0 && kind[i] !== WAIT);
  const widen = ([a, b], i) => [Math.min(a, start[i]), Math.max(b, end[i])];
  const none = [Infinity, -Infinity];
  for (let i = 0; i < kind.length; i++) {
    if (kind[i] === STEP) marks.set(step[i], (marks.get(step[i]) ?? 0) + 1);
    else if (own(i)) steps.set(step[i], widen(steps.get(step[i]) ?? none, i));
  }
  const last = Math.max(...[...marks].flatMap(([number, count]) => (count === ranks ? [number] : [])));
  const busy = Array.from({ length: ranks }, () => 0);
  let whole = none;
  for (let i = 0; i < kind.length; i++) {
    if (step[i] !== last) continue;
    if (kind[i] !== WAIT && lane[i] !== LANE.NONE) whole = widen(whole, i);
    if (own(i) && lane[i] === LANE.COMPUTE) busy[rank[i]] += end[i] - start[i];
    else if (kind[i] === WAIT && depth[i] > 0) busy[rank[i]] -= end[i] - start[i]; // in the middle of an action
  }
  const [from, to] = steps.get(last);
  const bubble = 1 - busy.reduce((sum, each) => sum + each / (to - from), 0) / ranks;
  return { steps, step: last, bubble, time: whole[1] - whole[0], busy };
}
