// One track: a lane per rank with what it held, or what its GPU did, over time. Wheel, drag and keys on it move the chart.

const TRACK = { lane: 40, least: 14, most: 320, gap: 5, lanes: 64, axis: 4 };
const TRACK_KEYS = "Arrows pan and zoom, 0 shows all, Shift and an arrow up or down go from rank to rank.";

class Track {
  constructor(parent, panel) {
    Object.assign(this, { panel, chart: panel.chart, data: null, cursor: null });
    this.box = parent.appendChild(node("div", "mpkit-track"));
    this.head = this.box.appendChild(node("div", "mpkit-track-head"));
    this.stage = this.box.appendChild(node("div", "mpkit-stage"));
    this.stage.tabIndex = 0;
    this.stage.setAttribute("role", "group");
    this.stage.dataset.lmSuppressShortcuts = "true";
    this.canvas = this.stage.appendChild(node("canvas"));
    this.canvas.setAttribute("role", "img");
    this.foot = this.box.appendChild(node("p", "mpkit-track-told")); // below: what comes here moves no lane
    this.tip = new Tip(this.stage);
    this.listen();
  }

  /** Take new values of the track. */
  take(data) {
    this.data = data;
    this.stage.setAttribute("aria-label", `${data.name} of each rank. ${TRACK_KEYS}`);
    this.canvas.setAttribute("aria-label", this.inWords());
    this.highest = Math.max(data.most ?? 0, ...[...data.rows.values()].map((row) => row.totals[row.peak] ?? 0), 0);
    this.fillHead();
  }

  fillHead() {
    const { data, highest, panel } = this;
    const used = data.keys.filter((_, key) => !data.rows.size || [...data.rows.values()].some(({ levels }) => {
      for (let i = key; i < levels.length; i += data.keys.length) if (levels[i]) return true;
      return false;
    }));
    const of = data.device ? `, ${percent(highest / data.device)} of a device's ${this.amount(data.device)}` : "";
    const scale = highest ? `each lane reaches to ${this.amount(highest)}${of}` : "nothing is known yet";
    const state = `${scale} ${data.told} ${used.map(({ word }) => word)} ${panel.root.dataset.theme}`;
    if (this.head.dataset.state === state) return;
    this.head.dataset.state = state;
    this.head.replaceChildren(node("b", "", data.name), node("span", "", scale));
    for (const key of used) {
      const item = this.head.appendChild(node("span", "mpkit-track-key"));
      item.appendChild(node("i")).style.background = this.ink(key);
      item.append(key.word);
    }
    this.foot.textContent = data.told ?? "";
    this.foot.hidden = data.told === undefined;
  }

  ink(key) {
    return this.chart.dark ? key.dark : key.light;
  }

  amount(value) {
    const { unit } = this.data;
    if (unit === "B") return memory(value);
    if (unit === "B/s") return amount(value, unit);
    return unit ? `${digits(value)} ${unit}` : String(Math.round(value));
  }

  /** The peak of each rank in words. */
  inWords() {
    const { data, chart } = this;
    const peaks = [...data.rows].slice(0, TRACK.lanes).map(([rank, row]) => {
      return `${chart.labels[rank] ?? `rank ${rank}`} at most ${this.amount(row.totals[row.peak])}`;
    });
    return `${data.name} over time: ${peaks.join(", ") || "nothing is known yet"}. The table below has the figures.`;
  }

  /** Ranks that have a lane here: those of the chart, or the first of each group where they are many. */
  get ranks() {
    const { chart } = this;
    const groups = chart.lanes.shown(chart.labels.length).map(([, some]) => some);
    const all = groups.flat();
    return (all.length > TRACK.lanes ? groups.map(([first]) => first) : all).slice(0, TRACK.lanes);
  }

  // ------------------------------------------------------------ one frame

  draw() {
    const { chart, canvas, data } = this;
    if (!data || !chart.theme) return;
    this.fillHead();
    const ratio = window.devicePixelRatio || 1;
    const ranks = this.ranks;
    const tall = Math.min(TRACK.lane, Math.max(TRACK.least, TRACK.most / ranks.length));
    const size = [chart.left + chart.width + 8, ranks.length * (tall + TRACK.gap) + TRACK.axis];
    sized(canvas, size, ratio);
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const [t0, t1] = chart.times;
    const width = Math.round(chart.width * ratio);
    const left = Math.round(chart.left * ratio);
    const frame = { context, ratio, t0, t1, width, left, scale: width / (t1 - t0), theme: chart.theme };
    this.placed = ranks.map((rank, at) => ({ rank, y: at * (tall + TRACK.gap), height: tall }));
    for (const place of this.placed) this.lane(frame, place);
    drawCursor(frame, chart.cursor, 0, size[1]);
  }

  lane(frame, { rank, y, height }) {
    const { context, ratio, left, width, theme } = frame;
    const { data, chart, highest } = this;
    const row = data.rows.get(rank);
    const [top, base] = [y * ratio, (y + height) * ratio];
    if (chart.selected?.rank === rank) mark(frame, y, height);
    context.strokeStyle = theme.line;
    context.lineWidth = ratio;
    context.strokeRect(left, top, width, base - top);
    this.label(frame, rank, y, height, row);
    if (!row && data.rows.size) this.untold(frame, y, height);
    if (!row || !highest) return;
    const steps = [...pixels(row, frame.t0, frame.t1, frame.scale, width)];
    const sums = row.levels.slice();
    const keys = data.keys.length;
    if (data.stacked) for (let i = 0; i < sums.length; i++) if (i % keys) sums[i] += sums[i - 1];
    for (let key = keys - 1; key >= 0; key--) {
      context.beginPath();
      for (const [from, to, moment] of steps) {
        const level = base - (sums[moment * keys + key] / highest) * (base - top - 2 * ratio);
        if (base > level) context.rect(left + from, level, Math.max(to - from, 0.5), base - level);
      }
      context.fillStyle = this.ink(data.keys[key]);
      context.fill();
    }
    context.fillStyle = theme.faint; // a line along the top, since the palest is hardly seen on the ground
    for (const [from, to, moment] of steps) {
      const level = base - (row.totals[moment] / highest) * (base - top - 2 * ratio);
      context.fillRect(left + from, Math.round(level) - ratio, Math.max(to - from, ratio), ratio);
    }
    this.drawPeak(frame, row, base, top);
  }

  /** Words in a lane of which nothing is known, since others are known: it is not zero. */
  untold({ context, ratio, left, theme }, y, height) {
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = theme.faint;
    context.font = `${Math.min(11, height) * ratio}px ${FONT}`;
    context.fillText("not told", left + 8 * ratio, (y + height / 2) * ratio);
  }

  label({ context, ratio, left, theme }, rank, y, height, row) {
    const { chart } = this;
    const two = height >= 30 && row?.times.length;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = theme.text;
    context.font = `${Math.min(12, height) * ratio}px ${FONT}`;
    context.fillText(chart.labels[rank] ?? "", left - 8 * ratio, (y + height * (two ? 0.3 : 0.5)) * ratio);
    if (!two) return;
    context.fillStyle = theme.faint;
    context.font = `${11 * ratio}px ${FONT}`;
    const most = this.amount(row.totals[row.peak]);
    const words = [`peak ${most}`, most].find((each) => context.measureText(each).width <= left - 10 * ratio) ?? most;
    context.fillText(words, left - 8 * ratio, (y + height * 0.74) * ratio, left - 10 * ratio);
  }

  /** A mark where the rank held most, if that time is seen. */
  drawPeak({ context, ratio, left, width, t0, scale, theme }, row, base, top) {
    const x = (row.times[row.peak] - t0) * scale;
    if (x < 0 || x > width || !row.totals[row.peak]) return;
    const y = base - (row.totals[row.peak] / this.highest) * (base - top - 2 * ratio);
    context.fillStyle = theme.text;
    context.strokeStyle = theme.ground;
    context.lineWidth = 1.5 * ratio;
    context.beginPath();
    for (const [dx, dy] of [[0, -4], [4, 0], [0, 4], [-4, 0]]) context.lineTo(left + x + dx * ratio, y + dy * ratio);
    context.closePath();
    context.stroke();
    context.fill();
  }

  // ------------------------------------------------------------ pointer and keys

  listen() {
    const { stage, chart, panel } = this;
    const place = (event) => {
      const box = stage.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let dragged = null;
    stage.addEventListener("wheel", (event) => wheel(event, panel, place(event)[0]), { passive: false });
    stage.addEventListener("dblclick", () => panel.fit());
    stage.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      dragged = { x: event.clientX, moved: false };
      stage.setPointerCapture(event.pointerId);
    });
    stage.addEventListener("pointermove", (event) => {
      if (!dragged) return this.point(...place(event));
      const share = (dragged.x - event.clientX) / chart.width;
      if (!dragged.moved && Math.abs(share * chart.width) < 3) return;
      dragged = { x: event.clientX, moved: true };
      chart.pan(share);
      panel.changed();
    });
    stage.addEventListener("pointerup", (event) => {
      const at = dragged && !dragged.moved ? this.at(place(event)[1]) : null;
      dragged = null;
      if (at) panel.select({ rank: at.rank });
    });
    stage.addEventListener("pointercancel", () => { dragged = null; });
    stage.addEventListener("pointerleave", () => this.leave());
    stage.addEventListener("blur", () => this.leave());
    stage.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!(event.shiftKey && by)) return key(event, panel);
      this.across(by);
      event.preventDefault();
      event.stopPropagation();
    });
  }

  at(y) {
    return this.placed?.find((place) => y >= place.y && y < place.y + place.height + TRACK.gap) ?? null;
  }

  leave() {
    this.tip.hide();
    this.chart.point(null);
  }

  /** Tell what the rank under the pointer held then. */
  point(x, y) {
    const { chart } = this;
    const place = this.at(y);
    const inside = place && x >= chart.left && x <= chart.left + chart.width;
    chart.point(inside ? chart.time(x) : null);
    if (!inside || !this.tell(place.rank, chart.time(x), x, y)) this.tip.hide();
  }

  tell(rank, time, x, y) {
    const { data, chart, tip } = this;
    const row = data.rows.get(rank);
    const moment = row ? bisect(row.times, row.times.length, time) - 1 : -1;
    if (moment < 0) return "";
    const values = data.keys.map((key, i) => [key.word, row.levels[moment * data.keys.length + i]]);
    const said = values.filter(([, value]) => value > 0).map(([word, value]) => [word, this.amount(value)]);
    const name = `${chart.labels[rank] ?? `rank ${rank}`}: ${this.amount(row.totals[moment])}`;
    const peak = row.totals[row.peak];
    const of = data.device ? `, ${percent(peak / data.device)} of the device's ${this.amount(data.device)}` : "";
    const told = [["at", seconds(time - chart.store.origin)], ...said, ["peak", this.amount(peak) + of]];
    tip.put(name, "", told, x, y);
    return [name, ...told.map((fact) => fact.join(" "))].join(", ");
  }

  /** Select the rank below (`by` 1) or above (-1), and say what it held at its peak. */
  across(by) {
    const { panel, chart, placed } = this;
    const now = placed.findIndex(({ rank }) => rank === chart.selected?.rank);
    const place = placed[Math.min(Math.max(now + by, 0), placed.length - 1)];
    panel.select({ rank: place.rank }, true);
    const row = this.data.rows.get(place.rank);
    const x = chart.left + chart.width / 2;
    panel.walk.said.textContent = row ? this.tell(place.rank, row.times[row.peak], x, place.y + place.height) : "";
  }
}

/** Give a canvas its size in CSS pixels. */
function sized(canvas, [width, height], ratio) {
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width === w && canvas.height === h) return;
  Object.assign(canvas, { width: w, height: h });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
}

/** The ground of the rank that is selected. */
function mark({ context, ratio, left, width, theme }, y, height) {
  context.save();
  context.globalAlpha = 0.14;
  context.fillStyle = theme.text;
  context.fillRect(0, (y - 3) * ratio, left + width, (height + 6) * ratio);
  context.globalAlpha = 1;
  context.fillRect(0, (y - 3) * ratio, 3 * ratio, (height + 6) * ratio);
  context.restore();
}

/** The time under the pointer, in all tracks. */
function drawCursor({ context, ratio, left, t0, t1, scale, theme }, time, top, bottom) {
  if (time === null || time < t0 || time > t1) return;
  context.strokeStyle = theme.faint;
  context.lineWidth = ratio;
  context.beginPath();
  context.moveTo(left + (time - t0) * scale, top * ratio);
  context.lineTo(left + (time - t0) * scale, bottom * ratio);
  context.stroke();
}
