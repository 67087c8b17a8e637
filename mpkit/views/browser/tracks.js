// Tracks below the lanes, on the same time axis: what each rank held of memory, and what NVML says of its GPU. They
// show the times that the chart shows, and mark the rank that is selected.

/** [{name, unit, keys, stacked, rows: Map(rank -> {times, levels, totals, highest})}, ...] from a trait's bytes. */
function unpackTracks(head, buffer) {
  let at = 0;
  const bytes = buffer?.byteLength ? buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength) : null;
  const floats = (count) => {
    const made = new Float64Array(bytes, at, count);
    at += made.byteLength;
    return made;
  };
  return (head?.tracks ?? []).map((track) => {
    const width = track.keys.length;
    const rows = new Map();
    for (const [rank, count] of track.ranks) {
      const times = floats(count);
      const levels = floats(count * width);
      const totals = times.map((_, i) => levels.subarray(i * width, (i + 1) * width).reduce((sum, each) => sum + each, 0));
      rows.set(rank, { times, levels, totals, peak: totals.reduce((best, total, i) => (total > totals[best] ? i : best), 0) });
    }
    return { ...track, rows };
  });
}

/** A step function in pixels: [from, to, moment], the highest of the moments that share a pixel. */
function* pixels({ times, totals }, t0, t1, scale, width) {
  const count = times.length;
  const x = (time) => Math.min(Math.max((time - t0) * scale, 0), width);
  let i = Math.max(0, bisect(times, count, t0) - 1);
  while (i < count - 1 && times[i] <= t1) {
    const from = x(times[i]);
    let best = i;
    let next = i + 1;
    for (; next < count && x(times[next]) < from + 1; next++) if (totals[next] > totals[best]) best = next;
    if (next === i + 1) {
      yield [from, x(times[next]), i];
    } else {
      const to = next < count ? x(times[next]) : from + 1;
      yield [from, Math.min(from + 1, to), best];
      if (to > from + 1) yield [from + 1, to, next - 1];
    }
    i = next;
  }
}

/** All tracks of a panel. */
class Tracks {
  constructor(parent, panel) {
    Object.assign(this, { parent, panel, all: [] });
  }

  take(head, buffer) {
    const data = unpackTracks(head, buffer);
    while (this.all.length > data.length) this.all.pop().box.remove();
    while (this.all.length < data.length) this.all.push(new Track(this.parent, this.panel));
    data.forEach((each, i) => this.all[i].take(each));
    const ends = data.flatMap(({ rows }) => [...rows.values()].map(({ times }) => times.at(-1)));
    this.panel.chart.seen.told = ends.length ? Math.max(...ends) : Infinity;
    this.panel.chart.ask();
    this.draw();
  }

  draw() {
    this.all.forEach((track) => track.draw());
  }

  /** What ranks held most while the times that are seen: [[words, [text of each rank]], ...] */
  columns([t0, t1]) {
    return this.all.filter(({ data }) => data.rows.size).map((track) => [`${track.data.name} in view`, (rank) => {
      const row = track.data.rows.get(rank);
      if (!row) return "";
      const first = Math.max(0, bisect(row.times, row.times.length, t0) - 1);
      const after = bisect(row.times, row.times.length, t1);
      return after > first ? `at most ${track.amount(row.totals.subarray(first, after).reduce((a, b) => Math.max(a, b), 0))}` : "";
    }]);
  }
}
