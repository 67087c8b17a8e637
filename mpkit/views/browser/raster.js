// A row of boxes on the canvas: each as itself where there is room, and where many fall on a pixel, the work
// that takes most of the pixel, as strongly as the pixel is busy. Waits within a box are left out of it.

/** Share of each pixel by key: out[key * width + pixel], of boxes first to after. */
function cover(row, first, after, t0, scale, width, hidden, out) {
  out.fill(0);
  const { start, end, key } = row;
  for (let i = first; i < after; i++) {
    if (hidden.has(key[i])) continue;
    const base = key[i] * width;
    const a = Math.max((start[i] - t0) * scale, 0);
    const b = Math.min((end[i] - t0) * scale, width);
    const from = a | 0;
    const to = Math.min(b | 0, width - 1);
    if (from >= width || b <= 0) continue;
    if (from === to) {
      out[base + from] += b - a;
      continue;
    }
    out[base + from] += from + 1 - a;
    for (let pixel = from + 1; pixel < to; pixel++) out[base + pixel] = 1;
    out[base + to] += b - to;
  }
}

/** Take out of each pixel's shares, in `out`, what is waited in meanwhile. */
function uncover(within, t0, scale, width, keys, out) {
  const waits = new Float32Array(width);
  const [first, after] = within.tidy().between(t0, t0 + width / scale);
  const alike = { start: within.start, end: within.end, key: new Uint8Array(after) };
  cover(alike, first, after, t0, scale, width, new Set(), waits);
  for (let pixel = 0; pixel < width; pixel++) {
    if (!waits[pixel]) continue;
    let busy = 0;
    for (let key = 0; key < keys; key++) busy += out[key * width + pixel];
    const left = busy > waits[pixel] ? 1 - waits[pixel] / busy : 0;
    for (let key = 0; key < keys; key++) out[key * width + pixel] *= left;
  }
}

/** What is left of [start, end] without the waits in it: [[start, end], ...]. */
function around(within, start, end) {
  const pieces = [];
  let from = start;
  const [first, after] = within ? within.tidy().between(start, end) : [0, 0];
  for (let i = first; i < after; i++) {
    if (within.start[i] > from) pieces.push([from, within.start[i]]);
    from = Math.max(from, within.end[i]);
  }
  if (end > from) pieces.push([from, end]);
  return pieces;
}

/** A strip one pixel high from shares, as RGBA; `inks[key]` is [red, green, blue]. */
function shade(shares, width, inks, strip) {
  for (let pixel = 0; pixel < width; pixel++) {
    let busy = 0;
    let most = 0;
    let best = 0;
    for (let key = 1; key < inks.length; key++) {
      const share = shares[key * width + pixel];
      busy += share;
      if (share > most) {
        most = share;
        best = key;
      }
    }
    const at = 4 * pixel;
    const ink = inks[best];
    strip[at] = ink[0];
    strip[at + 1] = ink[1];
    strip[at + 2] = ink[2];
    // What is there at all must be visible: never fainter than a sixth.
    strip[at + 3] = best ? 255 * Math.min(1, Math.max(busy, 1 / 6)) : 0;
  }
}

const THIN = { height: 10, boxes: 24 }; // CSS pixels; a row as thin as this is a strip from that many boxes on

/** Draws rows into one canvas context, in device pixels. Strips are kept as long as they show the same, so a picture of
 *  a thousand lanes that is scrolled is not computed anew. All strips of a frame are put into one image, once. */
class Raster {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.width = 0;
    this.kept = new WeakMap(); // row -> {key, strip}
    this.strips = []; // of this frame: [strip, x, y, height]
  }

  /** Begin a frame: {context, t0, scale (device pixels per second), left, width, ratio, inks, hidden, ground} */
  begin(frame) {
    const { width, inks, t0, scale, hidden } = frame;
    if (width !== this.width) {
      Object.assign(this, { width, image: null, shares: new Float32Array(width * inks.length) });
      this.kept = new WeakMap();
    }
    this.strips.length = 0;
    this.rgbs = inks.map((ink) => ink.rgb);
    this.key = `${t0} ${scale} ${[...hidden]} ${inks[1].fill}`;
  }

  row(frame, row, y, height, label, within) {
    const [first, after] = row.tidy().between(frame.t0, frame.t0 + frame.width / frame.scale);
    if (after <= first) return;
    const end = frame.t0 + frame.width / frame.scale;
    const [from, to] = within ? within.tidy().between(frame.t0, end) : [0, 0];
    const pieces = after - first + to - from; // each wait cuts a box in two
    const thin = height < THIN.height * frame.ratio && pieces > THIN.boxes;
    if (thin || pieces > frame.width / (2 * frame.ratio)) this.many(frame, row, first, after, y, height, within);
    else this.few(frame, row, first, after, y, height, label, within);
  }

  many(frame, row, first, after, y, height, within) {
    const key = `${this.key} ${row.count} ${within?.count}`;
    let kept = this.kept.get(row);
    if (kept?.key !== key) {
      cover(row, first, after, frame.t0, frame.scale, frame.width, frame.hidden, this.shares);
      if (within) uncover(within, frame.t0, frame.scale, frame.width, frame.inks.length, this.shares);
      kept = { key, strip: kept?.strip ?? new Uint8ClampedArray(4 * frame.width) };
      shade(this.shares, frame.width, this.rgbs, kept.strip);
      this.kept.set(row, kept);
    }
    this.strips.push([kept.strip, frame.left, y, height]);
  }

  /** Draw the frame's strips. */
  end({ context }) {
    const { strips, canvas, width } = this;
    if (!strips.length) return;
    if (!this.image || this.image.height < strips.length) this.image = new ImageData(width, strips.length);
    if (canvas.width !== width || canvas.height < strips.length) Object.assign(canvas, { width, height: strips.length });
    strips.forEach(([strip], i) => this.image.data.set(strip, 4 * width * i));
    canvas.getContext("2d").putImageData(this.image, 0, 0, 0, 0, width, strips.length);
    context.imageSmoothingEnabled = false;
    strips.forEach(([, left, y, height], i) => context.drawImage(canvas, 0, i, width, 1, left, y, width, height));
  }

  few(frame, row, first, after, y, height, label, within) {
    const { context, t0, scale, width, ratio, inks, hidden } = frame;
    const largest = Math.round(Math.min(12 * ratio, height * 0.55));
    let font = 0;
    const edge = (time) => Math.min(Math.max((time - t0) * scale, 0), width);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = first; i < after; i++) {
      const key = row.key[i];
      if (hidden.has(key)) continue;
      const pieces = around(within, row.start[i], row.end[i]).map((piece) => piece.map(edge));
      const chunk = label ? frame.chunk(row.span[i]) : 0;
      for (const [a, b] of pieces) {
        this.box(frame, inks[key], a, b, y, height);
        if (chunk) this.bars(frame, inks[key], a, b, y, height, chunk);
      }
      const words = label && largest >= 8 * ratio ? label(row.span[i]) : "";
      if (!words) continue;
      const [a, b] = pieces.reduce((best, piece) => (piece[1] - piece[0] > best[1] - best[0] ? piece : best), [0, 0]);
      const room = Math.floor(Math.min((b - a) / (0.62 * words.length + 0.25), largest));
      if (room < 8 * ratio) continue;
      if (room !== font) {
        font = room;
        context.font = `500 ${font}px ${FONT}`;
      }
      context.fillStyle = inks[key].on;
      context.fillText(words, frame.left + (a + b) / 2, y + height / 2 + ratio / 2);
    }
  }

  /** Neighbours of one colour stay apart by a line of the ground's; what is pale has an outline. */
  box({ context, left, ratio, ground }, ink, a, b, y, height) {
    const apart = b - a > 3 * ratio;
    if (apart) {
      context.fillStyle = ground;
      context.fillRect(left + b - ratio, y, ratio, height);
    }
    const width = Math.max(b - a - (apart ? ratio : 0), Math.min(ratio, 1));
    const edge = ink.edge && width > 3 * ratio && height > 5 * ratio ? ratio : 0;
    if (edge) {
      context.fillStyle = ink.edge;
      context.fillRect(left + a, y, width, height);
    }
    context.fillStyle = ink.fill;
    context.fillRect(left + a + edge, y + edge, width - 2 * edge, height - 2 * edge);
  }

  /** A bar at the foot of a block of the rank's second stage, two of its third. */
  bars({ context, left, ratio }, ink, a, b, y, height, chunk) {
    context.fillStyle = ink.on;
    const inset = 2 * ratio;
    for (let i = 0; i < chunk && i < 4; i++) {
      context.fillRect(left + a + inset, y + height - (4 + 4 * i) * ratio, Math.max(b - a - ratio - 2 * inset, ratio), 2 * ratio);
    }
  }
}
