// From operation to operation by keys: Shift and an arrow. Each is outlined, shown in the tip and said to a screen reader.

class Walk {
  constructor(panel) {
    this.panel = panel;
    this.place = null; // {rank, part, index}: the operation that was reached last
    this.said = panel.root.appendChild(node("div", "mpkit-said"));
    this.said.setAttribute("aria-live", "polite");
  }

  /** Go to the next operation of the row (`by` 1) or to that before (-1). */
  along(by) {
    if (!this.place) return this.begin();
    const row = this.row(this.place);
    const index = Math.min(Math.max(this.place.index + by, 0), row.count - 1);
    this.reach({ ...this.place, index });
  }

  /** Go to the row below (`by` 1) or above (-1), to the operation that runs there at the time, or last before it. */
  across(by) {
    if (!this.place) return this.begin();
    const { store, placed } = this.panel.chart;
    const rows = placed.rows.filter(({ rank, part }) => store.find(rank, part)?.count);
    const now = rows.findIndex(({ rank, part }) => rank === this.place.rank && part === this.place.part);
    const there = rows[Math.min(Math.max(now + by, 0), rows.length - 1)];
    const time = this.row(this.place).start[this.place.index];
    const row = store.find(there.rank, there.part).tidy();
    const index = Math.max(0, bisect(row.start, row.count, time) - 1);
    this.reach({ rank: there.rank, part: there.part, index });
  }

  /** Begin with the first operation that is seen. */
  begin() {
    const { store, placed, times } = this.panel.chart;
    const there = placed?.rows.find(({ rank, part }) => store.find(rank, part)?.count);
    if (!there) return;
    const row = store.find(there.rank, there.part).tidy();
    const index = Math.min(row.between(...times)[0], row.count - 1);
    this.reach({ rank: there.rank, part: there.part, index });
  }

  row({ rank, part }) {
    return this.panel.chart.store.find(rank, part).tidy();
  }

  reach(place) {
    this.place = place;
    const { chart, tip } = this.panel;
    const row = this.row(place);
    const [start, end] = [row.start[place.index], row.end[place.index]];
    const [t0, t1] = chart.times;
    if (start < t0 || end > t1) {
      chart.seen.follow = false;
      chart.show((start + end - (t1 - t0)) / 2, (start + end + (t1 - t0)) / 2);
      this.panel.changed();
    }
    const there = chart.placed.rows.find(({ rank, part }) => rank === place.rank && part === place.part);
    const span = row.span[place.index];
    chart.pointed = { row, index: place.index, place: there };
    this.panel.select({ rank: place.rank, span }, true);
    this.said.textContent = [title(chart, span), ...facts(chart, span).map((fact) => fact.join(" "))].join(", ");
    const [from, to] = chart.times;
    const x = chart.left + (((start + end) / 2 - from) / (to - from)) * chart.width;
    tip.show(chart, chart.pointed, x, there.y + there.height);
    tip.box.scrollIntoView({ block: "nearest" });
    chart.ask();
  }
}
