// The canvas: what lies under a point, and how one frame is drawn.

const AROUND = 0.25; // of the screen's height, drawn above and below it

class Chart {
  constructor(canvas, store, look) {
    Object.assign(this, { canvas, store, look, labels: [], layers: [], widest: "", hidden: new Set(), dark: false });
    this.raster = new Raster();
    this.lanes = new Lanes();
    this.seen = new Seen(store);
    this.pointed = null; // {row, index, place}: what the pointer rests on
    this.selected = null; // {rank, span}: the rank that is selected, and its operation, if it is one
    this.keeps = false; // whether this was live once: it keeps a place for what comes later
    this.path = null; // the critical path that is shown
    this.waits = []; // of ranks that hang: [{rank, start, words}]
    this.cursor = null; // the time under the pointer
    this.view = [0, 0]; // the part of the picture's height that is drawn, in CSS pixels
    this.frames = 0;
    this.asked = 0;
  }

  /** [t0, t1]: the times that are seen. */
  get times() {
    return this.seen.times;
  }

  show(t0, t1) {
    this.seen.show(t0, t1);
    this.ask();
  }

  zoom(factor, x = this.left + this.width / 2) {
    this.seen.zoom(factor, Math.min(Math.max((x - this.left) / this.width, 0), 1));
    this.ask();
  }

  pan(share) {
    this.seen.pan(share);
    this.ask();
  }

  /** The time under the pointer is now this, or nothing. */
  point(time) {
    if (time === this.cursor) return;
    this.cursor = time;
    this.ask();
  }

  time(x) {
    const [t0, t1] = this.times;
    return t0 + ((x - this.left) / this.width) * (t1 - t0);
  }

  // ------------------------------------------------------------ what lies under a point

  /** The number of the group whose header is there, or -1. */
  head(y) {
    return this.placed?.heads.find((head) => y >= head.y && y < head.y + head.height)?.group ?? -1;
  }

  /** What lies under a point: {row, index} of a box, {rank, idle: true}, or null. */
  hit(x, y) {
    if (x < this.left || x > this.left + this.width || !this.store.count) return null;
    const [t0, t1] = this.times;
    const slack = (1.5 / this.width) * (t1 - t0);
    const place = this.placed.rows.find((row) => y >= row.y - 1 && y <= row.y + row.height + 1);
    if (!place) return null;
    const row = this.store.find(place.rank, place.part);
    const within = place.part === "compute" ? this.store.find(place.rank, "within") : null;
    const index = row && !(within?.at(this.time(x), 0) >= 0) ? row.at(this.time(x), slack) : -1;
    if (index >= 0 && !this.hidden.has(row.key[index])) return { row, index, place };
    if (place.part !== "compute") return null;
    const waits = this.store.find(place.rank, "waits");
    const wait = waits ? waits.at(this.time(x), 0) : -1;
    return wait >= 0 ? { row: waits, index: wait, place } : null;
  }

  // ------------------------------------------------------------ one frame

  /** Draw with the screen's next frame; many askings make one drawing. */
  ask() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.draw();
    });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const css = this.canvas.parentElement.clientWidth;
    if (!css) return;
    this.theme = this.look.themes[this.dark ? "dark" : "light"];
    this.inks = this.look.inks.map((ink) => {
      const fill = this.dark ? ink.dark : ink.light;
      const edge = this.dark ? ink.edge_dark : ink.edge_light;
      return { fill, edge, on: this.dark ? ink.on_dark : ink.on_light, rgb: rgb(fill) };
    });
    // What is drawn while a run goes on has a place for what nearly every run has, so that nothing moves when it comes.
    const talks = this.keeps && this.labels.length > 1;
    const parts = PARTS.filter((part) => this.store.parts.has(part) || (talks && part === "comm"));
    this.placed = this.lanes.layout(this.labels.length, parts, this.store.steps.size > 1 || this.keeps);
    const placed = this.inView(this.placed);
    const context = this.canvas.getContext("2d");
    const [top, bottom] = this.view;
    this.resize(css, bottom - top, ratio);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.setTransform(1, 0, 0, 1, 0, -Math.round(top * ratio));
    context.font = `${12 * ratio}px ${FONT}`;
    const longest = this.longest(context, ratio);
    this.left = Math.min(Math.ceil(longest) + 12, css / 3);
    this.width = Math.max(css - this.left - 8, 40);
    const [t0, t1] = this.times;
    const width = Math.round(this.width * ratio);
    const frame = {
      context, t0, t1, ratio, width, left: Math.round(this.left * ratio), scale: width / (t1 - t0),
      inks: this.inks, hidden: this.hidden, ground: this.theme.ground, theme: this.theme, labels: this.labels,
      chunk: (span) => this.store.chunk(span), selected: this.selected?.rank,
    };
    this.drawSelected(frame, placed);
    this.lanes.drawLabels(frame, placed);
    this.lanes.drawHeads(frame, placed);
    this.drawIdle(frame, placed);
    this.drawMarks(frame, placed);
    this.drawRows(frame, placed);
    if (this.path) drawPath(frame, this, placed);
    if (this.search?.query) drawFound(frame, this, placed);
    drawWaits(frame, this, placed);
    this.drawAxis(frame, placed);
    drawCursor(frame, this.cursor, placed.top, placed.bottom);
    this.drawPointed(frame);
    this.drawn?.();
    this.frames += 1;
  }

  resize(width, height, ratio) {
    const stage = this.canvas.parentElement;
    const tall = `${this.placed.height}px`;
    if (stage.style.height !== tall) stage.style.height = tall;
    this.canvas.style.transform = this.view[0] ? `translateY(${this.view[0]}px)` : "";
    sized(this.canvas, [width, height], ratio);
  }

  /** Of a picture much taller than the screen only what is on the screen is drawn, and a little around it. */
  inView(placed) {
    const screen = window.innerHeight;
    if (placed.height < 2 * screen) {
      this.view = [0, placed.height];
      return placed;
    }
    const above = -this.canvas.parentElement.getBoundingClientRect().top;
    const tall = Math.round(screen * (1 + 2 * AROUND));
    const top = Math.round(Math.min(Math.max(above - AROUND * screen, 0), placed.height - tall));
    this.view = [top, top + tall];
    const seen = ({ y, height }) => y + height >= top && y <= top + tall;
    return { ...placed, rows: placed.rows.filter(seen), heads: placed.heads.filter(seen) };
  }

  /** The page was scrolled: draw if something that was not drawn is seen. */
  scrolled() {
    const [top, bottom] = this.view;
    if (!this.placed || bottom - top >= this.placed.height) return;
    const above = Math.min(Math.max(-this.canvas.parentElement.getBoundingClientRect().top, 0), this.placed.height);
    const below = Math.min(above + window.innerHeight, this.placed.height);
    if (above < top || below > bottom) this.ask();
  }

  /** The width of the longest label, in CSS pixels; measured when labels change. */
  longest(context, ratio) {
    const known = this.measured;
    if (known?.labels === this.labels && known.widest === this.widest) return known.width;
    const width = Math.max(...[...this.labels, this.widest].map((label) => context.measureText(label).width / ratio));
    this.measured = { labels: this.labels, widest: this.widest, width };
    return width;
  }

  /** The ground of the compute rows is idle time, hatched, from each step's first start to its last end. */
  drawIdle(frame, { rows }) {
    if (this.hidden.has(IDLE)) return;
    frame.context.fillStyle = this.hatch(frame);
    const edge = (time) => Math.min(Math.max((time - frame.t0) * frame.scale, 0), frame.width);
    let extents = [...this.store.steps.values()];
    if (extents.length > frame.width / 8) extents = [[this.store.begin, this.store.end]];
    for (const [start, end] of extents) {
      const [a, b] = [edge(start), edge(end)];
      if (b <= a) continue;
      for (const { part, y, height } of rows) {
        if (part !== "compute") continue;
        frame.context.fillRect(frame.left + a, y * frame.ratio, b - a, height * frame.ratio);
      }
    }
  }

  hatch({ context, ratio }) {
    const size = Math.round(7 * ratio);
    const tile = document.createElement("canvas");
    Object.assign(tile, { width: size, height: size });
    const pen = tile.getContext("2d");
    pen.fillStyle = this.theme.idle;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = this.theme.hatch;
    pen.lineWidth = 1.4 * ratio;
    for (const shift of [-size, 0, size]) {
      pen.beginPath();
      pen.moveTo(shift, size);
      pen.lineTo(shift + size, 0);
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  drawRows(frame, { rows }) {
    const { ratio } = frame;
    const label = (span) => {
      const number = this.store.value("microbatch", span);
      return number >= 0 ? String(number) : "";
    };
    this.raster.begin(frame);
    for (const { rank, part, y, height } of rows) {
      const row = this.store.find(rank, part);
      if (!row) continue;
      const [top, tall] = [Math.round(y * ratio), Math.max(1, Math.round(height * ratio))];
      const computes = part === "compute";
      this.raster.row(frame, row, top, tall, computes ? label : null, computes ? this.store.find(rank, "within") : null);
    }
    this.raster.end(frame);
  }

  /** A line where each step begins, with its number where there is room. */
  drawMarks(frame, { top, bottom }) {
    const { context, ratio } = frame;
    if (this.store.steps.size < 2) return;
    context.strokeStyle = this.theme.line;
    context.fillStyle = this.theme.faint;
    context.font = `${11 * ratio}px ${FONT}`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.lineWidth = ratio;
    const seen = [];
    for (const [step, [start]] of this.store.steps) {
      const x = (start - frame.t0) * frame.scale;
      if (step >= 0 && x >= -1 && x <= frame.width) seen.push([step, frame.left + x]);
    }
    // Lines closer than this would hide what they part: then only some, and only above the rows.
    const apart = seen.length * 24 * ratio < frame.width;
    let free = -Infinity;
    for (const [step, x] of seen) {
      if (!apart && x < free) continue;
      context.beginPath();
      context.moveTo(x, (top - 14) * ratio);
      context.lineTo(x, (apart ? bottom : top - 3) * ratio);
      context.stroke();
      if (x < free) continue;
      const words = `step ${step}`;
      const width = context.measureText(words).width;
      if (x + width < frame.left + frame.width) context.fillText(words, x + 4 * ratio, (top - 6) * ratio);
      free = x + width + 16 * ratio;
    }
  }

  drawAxis(frame, { bottom }) {
    const { context, ratio, left, width } = frame;
    if (!this.store.count && !this.waits.length) return;
    context.strokeStyle = this.theme.line;
    context.fillStyle = this.theme.faint;
    context.font = `${11 * ratio}px ${FONT}`;
    context.textBaseline = "top";
    context.lineWidth = ratio;
    context.beginPath();
    context.moveTo(left, bottom * ratio);
    context.lineTo(left + width, bottom * ratio);
    const begin = this.store.origin ?? this.seen.begin;
    for (const [time, words] of ticks(frame.t0 - begin, frame.t1 - begin, Math.max(3, Math.floor(this.width / 80)))) {
      const x = left + (time + begin - frame.t0) * frame.scale;
      context.moveTo(x, bottom * ratio);
      context.lineTo(x, (bottom + 4) * ratio);
      const room = context.measureText(words).width / 2;
      context.textAlign = x + room > left + width ? "right" : "center";
      context.fillText(words, Math.min(x, left + width), (bottom + 8) * ratio);
    }
    context.stroke();
  }

  /** The row in which a span is drawn, or the compute row of its rank where it has none; undefined if it is folded. */
  placeOf(span) {
    const rank = this.store.value("rank", span);
    const part = PARTS[partOf(this.store.value("kind", span), this.store.value("lane", span), this.store.value("depth", span))];
    const mine = this.rowsOf(rank);
    return mine.find((row) => row.part === part) ?? mine[0];
  }

  rowsOf(rank) {
    return this.placed.rows.filter((row) => row.rank === rank);
  }

  /** The ground of the selected rank's rows. */
  drawSelected(frame) {
    const mine = this.selected ? this.rowsOf(this.selected.rank) : [];
    if (mine.length) mark(frame, mine[0].y, mine.at(-1).y + mine.at(-1).height - mine[0].y);
  }

  /** Outlines around what is selected and what the pointer rests on, with arrows to what goes with them. */
  drawPointed(frame) {
    const { store } = this;
    const spans = new Set();
    if (this.selected?.span >= 0) spans.add(this.selected.span);
    if (this.pointed) spans.add(this.pointed.row.span[this.pointed.index]);
    for (const span of spans) {
      const place = this.placeOf(span);
      if (!place) continue;
      this.outline(frame, span, place);
      const link = linked(store, span);
      if (link) drawLink(frame, store, link, (other) => this.placeOf(other));
    }
  }

  outline({ context, ratio, left, width, t0, scale }, span, place) {
    const x = (time) => left + Math.min(Math.max((time - t0) * scale, 0), width);
    const start = this.store.value("start", span);
    const [a, b] = [x(start), x(start + this.store.value("duration", span))];
    context.strokeStyle = this.theme.text;
    context.lineWidth = 2 * ratio;
    context.strokeRect(a, place.y * ratio, Math.max(b - a, 2 * ratio), place.height * ratio);
  }
}
