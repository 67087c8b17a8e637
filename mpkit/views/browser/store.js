// Spans as the browser has them: one typed array a column, and for each row (a rank's compute, layers,
// communication, host copies, data loading) its boxes in the order of their starts.

// Waits are found by the pointer, not drawn; those within an action cut it into pieces.
const PARTS = ["compute", "layers", "comm", "host", "data", "waits", "within"];
const LANE = { COMPUTE: 0, COMM: 1, HOST: 2, NONE: 3, DATA: 4 };
const WAIT = 16;
const IDLE = 0;
const ARRAYS = {
  "<f8": Float64Array, "<f4": Float32Array, "<i4": Int32Array, "<i2": Int16Array, "u1": Uint8Array,
};

/** The boxes of one row. `reach[i]` is the latest end of boxes 0 to i, so it can be searched by bisection. */
class Row {
  constructor(rank, part) {
    Object.assign(this, { rank, part, count: 0, sorted: true });
    this.grow(64);
  }

  grow(size) {
    const enlarged = (old, Type) => {
      const array = new Type(size);
      if (old) array.set(old.subarray(0, this.count));
      return array;
    };
    this.start = enlarged(this.start, Float64Array);
    this.end = enlarged(this.end, Float64Array);
    this.reach = enlarged(this.reach, Float64Array);
    this.key = enlarged(this.key, Uint8Array);
    this.span = enlarged(this.span, Int32Array);
  }

  push(start, end, key, span) {
    const i = this.count;
    if (i === this.start.length) this.grow(2 * i);
    this.start[i] = start;
    this.end[i] = end;
    this.key[i] = key;
    this.span[i] = span;
    this.reach[i] = i && this.reach[i - 1] > end ? this.reach[i - 1] : end;
    if (i && start < this.start[i - 1]) this.sorted = false;
    this.count = i + 1;
  }

  /** Spans of several steps may be out of order: sort once, when somebody looks. */
  tidy() {
    if (this.sorted) return this;
    const order = Array.from({ length: this.count }, (_, i) => i).sort((a, b) => this.start[a] - this.start[b]);
    for (const name of ["start", "end", "key", "span"]) {
      const old = this[name].slice(0, this.count);
      order.forEach((from, to) => { this[name][to] = old[from]; });
    }
    for (let i = 0, latest = -Infinity; i < this.count; i++) {
      latest = Math.max(latest, this.end[i]);
      this.reach[i] = latest;
    }
    this.sorted = true;
    return this;
  }

  /** [first, after): the boxes that may be seen between two times. */
  between(t0, t1) {
    return [bisect(this.reach, this.count, t0), bisect(this.start, this.count, t1)];
  }

  /** The last box that holds this time (or begins within `slack` of it), -1 if none does. */
  at(time, slack) {
    const [first, after] = this.tidy().between(time - slack, time + slack);
    let best = -1;
    for (let i = after - 1; i >= first && i > after - 2000; i--) {
      if (this.start[i] <= time && time < this.end[i]) return i;
      if (best < 0 && this.end[i] >= time - slack) best = i;
    }
    return best;
  }
}

/** How many of the first `count` ascending values are below or at `value`. */
function bisect(values, count, value) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The spans in view: all of a timeline, or the newest of a run that goes on. */
class Store {
  constructor() {
    this.version = 0;
    this.first = 0; // the number of the first span among all of the run
    this.reset();
  }

  reset() {
    Object.assign(this, { version: this.version + 1, count: 0, begin: Infinity, end: -Infinity, origin: null });
    this.columns = {};
    this.names = [""];
    this.steps = new Map(); // step -> [start, end]: where idle time counts as bubble
    this.rows = new Map(); // rank * PARTS.length + part -> Row
    this.keys = new Set();
    this.parts = new Set(["compute"]);
    this.stages = new Map(); // rank -> its stages, in their order
    this.linked = null; // what was linked last
  }

  /** Show these spans instead; returns by how many numbers those that stay have moved. */
  show(head, buffer) {
    const moved = this.first - head.first;
    this.reset();
    Object.assign(this, { names: head.names, first: head.first, origin: head.origin });
    for (const [step, start, end] of head.steps) this.steps.set(step, [start, end]);
    this.take(decode(head, buffer), head.count);
    return moved;
  }

  take(columns, count) {
    for (const [name, data] of Object.entries(columns)) this.columns[name] = { data };
    const { start, duration, rank, kind, lane, depth, key, stage } = columns;
    for (let i = 0; i < count; i++) {
      if (lane[i] === LANE.NONE || !(duration[i] > 0)) continue; // what takes no time is nothing to see
      const end = start[i] + duration[i];
      if (start[i] < this.begin) this.begin = start[i];
      if (end > this.end) this.end = end;
      this.row(rank[i], partOf(kind[i], lane[i], depth[i])).push(start[i], end, key[i], i);
      if (stage[i] >= 0 && lane[i] === LANE.COMPUTE) this.noteStage(rank[i], stage[i]);
      if (kind[i] !== WAIT) this.keys.add(key[i]);
      else if (depth[i] > 0) this.row(rank[i], PARTS.indexOf("within")).push(start[i], end, key[i], i);
    }
    this.count = count;
    this.origin ??= this.begin;
  }

  noteStage(rank, stage) {
    const known = this.stages.get(rank);
    if (!known) this.stages.set(rank, [stage]);
    else if (!known.includes(stage)) known.splice(bisect(known, known.length, stage), 0, stage);
  }

  /** Which of its rank's stages a span belongs to: 0 for the first. */
  chunk(span) {
    const known = this.stages.get(this.columns.rank.data[span]);
    return known?.length > 1 ? Math.max(0, known.indexOf(this.columns.stage.data[span])) : 0;
  }

  row(rank, part) {
    const number = rank * PARTS.length + part;
    let row = this.rows.get(number);
    if (!row) {
      row = new Row(rank, PARTS[part]);
      this.rows.set(number, row);
      if (part < PARTS.indexOf("waits")) this.parts.add(PARTS[part]);
    }
    return row;
  }

  find(rank, part) {
    return this.rows.get(rank * PARTS.length + PARTS.indexOf(part));
  }

  /** The share of a window of time in which a rank computes. */
  busy(rank, [t0, t1]) {
    const row = this.find(rank, "compute")?.tidy();
    if (!row) return 0;
    const within = this.find(rank, "within");
    const sum = ([first, after]) => {
      let total = 0;
      for (let i = first; i < after; i++) {
        for (const [a, b] of around(within, Math.max(row.start[i], t0), Math.min(row.end[i], t1))) total += b - a;
      }
      return total;
    };
    return sum(row.between(t0, t1)) / (t1 - t0);
  }

  value(column, span) {
    return this.columns[column].data[span];
  }
}

function partOf(kind, lane, depth) {
  if (lane === LANE.COMM) return 2;
  if (lane === LANE.HOST) return 3;
  if (lane === LANE.DATA) return 4;
  if (kind === WAIT) return PARTS.indexOf("waits");
  return depth > 0 ? 1 : 0;
}

/** The columns in a buffer; wire.py has their order. */
function decode(head, buffer) {
  // A view into a larger buffer may lie at an odd address, where no Float64Array can be: copy then.
  const aligned = buffer.byteOffset % 8 === 0;
  const bytes = aligned ? buffer.buffer : buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength);
  let at = aligned ? buffer.byteOffset : 0;
  const columns = {};
  for (const [name, code] of head.columns) {
    columns[name] = new ARRAYS[code](bytes, at, head.count);
    at += columns[name].byteLength;
  }
  return columns;
}
