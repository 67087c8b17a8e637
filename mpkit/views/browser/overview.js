// The strip above the chart: the whole run, a line per rank, with a frame around what is seen, to grab.

const STRIP = { height: 30, lines: 10, pause: 250 }; // CSS pixels; lines at most; ms between two drawings of new spans

class Overview {
  constructor(parent, chart, changed) {
    Object.assign(this, { chart, changed, drawn: { count: -1, at: 0 }, later: 0 });
    this.box = parent.appendChild(node("div", "mpkit-overview"));
    this.box.title = "the whole run: drag the frame, or click where to look";
    this.canvas = this.box.appendChild(node("canvas"));
    this.canvas.setAttribute("aria-hidden", "true"); // keys do the same: arrows, Page Up and Page Down
    this.frame = this.box.appendChild(node("div", "mpkit-frame"));
    this.raster = new Raster();
    this.listen();
  }

  /** Draw: the run if there is more of it, and the frame. */
  draw() {
    const { chart } = this;
    const several = chart.store.steps.size > 1;
    this.box.hidden = !several && !chart.keeps;
    this.box.style.visibility = several ? "" : "hidden";
    if (!several || !chart.inks) return;
    const { begin, end } = chart.seen;
    const [t0, t1] = chart.times;
    const share = (time) => Math.min(Math.max((time - begin) / (end - begin), 0), 1);
    this.box.style.marginLeft = `${chart.left}px`;
    this.box.style.width = `${chart.width}px`;
    Object.assign(this.frame.style, {
      left: `${share(t0) * chart.width}px`, width: `${Math.max((share(t1) - share(t0)) * chart.width, 4)}px`,
    });
    this.frame.hidden = share(t0) <= 0 && share(t1) >= 1;
    this.strip(begin, end);
  }

  /** The whole run is drawn anew a few times a second at most, however fast spans come. */
  strip(begin, end) {
    const { chart, drawn } = this;
    const key = `${chart.width} ${chart.dark} ${[...chart.hidden]}`;
    if (drawn.version === chart.store.version && drawn.key === key && drawn.end === end) return;
    const since = performance.now() - drawn.at;
    if (drawn.key === key && since < STRIP.pause) {
      this.later ||= setTimeout(() => this.draw(), STRIP.pause - since);
      return;
    }
    clearTimeout(this.later);
    this.later = 0;
    this.drawn = { version: chart.store.version, key, end, at: performance.now() };
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(chart.width * ratio));
    Object.assign(this.canvas, { width, height: Math.round(STRIP.height * ratio) });
    const context = this.canvas.getContext("2d");
    const ranks = chart.labels.length || 1;
    const lines = Math.min(ranks, STRIP.lines);
    const tall = this.canvas.height / lines;
    const frame = {
      context, t0: begin, scale: width / (end - begin), left: 0, width, ratio, inks: chart.inks, hidden: chart.hidden,
    };
    this.raster.begin(frame);
    for (let line = 0; line < lines; line++) {
      const rank = Math.floor(((line + 0.5) * ranks) / lines);
      const row = chart.store.find(rank, "compute")?.tidy();
      if (!row) continue;
      const within = chart.store.find(rank, "within");
      this.raster.many(frame, row, 0, row.count, Math.round(line * tall), Math.ceil(tall - ratio), within);
    }
    this.raster.end(frame);
  }

  listen() {
    let grabbed = null;
    const time = (event) => {
      const { begin, end } = this.chart.seen;
      return begin + ((event.clientX - this.box.getBoundingClientRect().left) / this.chart.width) * (end - begin);
    };
    const move = (event) => {
      const { seen } = this.chart;
      const [t0, t1] = this.chart.times;
      seen.follow = false;
      this.chart.show(time(event) - grabbed * (t1 - t0), time(event) + (1 - grabbed) * (t1 - t0));
      this.changed();
    };
    this.box.addEventListener("pointerdown", (event) => {
      const { seen } = this.chart;
      const [t0, t1] = this.chart.times;
      const [start, end] = seen.steps.at(-1) ?? [seen.begin, seen.end];
      const { whole } = seen; // nothing to grab: look at the length of a step
      const share = (time(event) - t0) / (t1 - t0);
      grabbed = !whole && share > 0 && share < 1 ? share : 0.5;
      this.box.setPointerCapture(event.pointerId);
      if (whole) this.chart.show(time(event) - (end - start) / 2, time(event) + (end - start) / 2);
      else move(event);
      this.changed();
    });
    this.box.addEventListener("pointermove", (event) => grabbed !== null && move(event));
    for (const name of ["pointerup", "pointercancel"]) this.box.addEventListener(name, () => { grabbed = null; });
  }
}
