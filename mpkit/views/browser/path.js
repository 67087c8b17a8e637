// The critical path over the lanes: all other operations are paler, those that decide the step are outlined, and lines
// lead from rank to rank where one waited for the other.
//
// A path is {step, words, ops: [[span, rank, start, end, what], ...], free: {span: seconds}, slack: Float32Array}, where
// `what` is "op", "gap" or "before". A span's slack is NaN if it is no operation of the step.

const PALER = 0.68;
const NARROW = 6; // CSS pixels

/** Draw a path over the rows that are there. */
function drawPath(frame, chart, { rows }) {
  const { path, store } = chart;
  const { context, ratio, left, width, t0, scale, theme } = frame;
  const x = (time) => left + Math.min(Math.max((time - t0) * scale, 0), width);
  const boxes = path.ops.map(([span, rank, start, end, what]) => {
    const place = what === "op" ? chart.placeOf(span) : chart.rowsOf(rank)[0];
    if (!place) return null; // its rank is folded away
    return { x: x(start), width: x(end) - x(start), y: place.y * ratio, height: place.height * ratio, what };
  });
  veil(frame, rows, boxes, store.steps.get(path.step) ?? [store.begin, store.end], x);
  const outlines = merged(boxes, NARROW * ratio);
  for (const [ink, wide] of [[theme.ground, 4], [theme.text, 2]]) {
    context.strokeStyle = ink;
    context.lineWidth = wide * ratio;
    outlines.forEach((box, i) => {
      if (box?.width > 0) outlinePart(context, ratio, box);
      const next = outlines[i + 1];
      if (box && next && next.y !== box.y) across(context, box, next);
    });
  }
}

/** The boxes, of which those that are narrow share an outline with their neighbours in the lane. */
function merged(boxes, narrow) {
  const found = [];
  for (const box of boxes) {
    const last = found.at(-1);
    const joins = box && last && box.y === last.y && (box.width < narrow || last.width < narrow || last.joined);
    if (!joins) {
      found.push(box && { ...box });
      continue;
    }
    last.width = box.x + box.width - last.x;
    last.joined = box.width < narrow;
    if (box.what === "op") last.what = "op";
  }
  return found;
}

/** The ground over a step's rows, but not over the path's boxes. */
function veil({ context, ratio, theme }, rows, boxes, [start, end], x) {
  context.save();
  context.globalAlpha = PALER;
  context.fillStyle = theme.ground;
  context.beginPath();
  for (const { y, height } of rows) context.rect(x(start), y * ratio, x(end) - x(start), height * ratio);
  for (const box of boxes) if (box?.width > 0) context.rect(box.x, box.y, box.width, box.height);
  context.fill("evenodd");
  context.restore();
}

function outlinePart(context, ratio, { x, width, y, height, what }) {
  if (what !== "op") context.setLineDash([4 * ratio, 3 * ratio]);
  context.strokeRect(x, y, Math.max(width, ratio), height);
  context.setLineDash([]);
}

/** From the end of one box to the begin of the next, between their lanes. */
function across(context, box, next) {
  const down = next.y > box.y;
  context.beginPath();
  context.moveTo(box.x + box.width, down ? box.y + box.height : box.y);
  context.lineTo(next.x, down ? next.y : next.y + next.height);
  context.stroke();
}

/** [[what, value], ...] of a span with regard to the path that is shown. */
function pathFacts({ path }, span) {
  const slack = path?.slack?.[span];
  if (slack === undefined || Number.isNaN(slack)) return [];
  const free = path.free[span];
  if (free > 0) return [["critical path", "on it"], ["were it free", `the step would be ${seconds(free)} shorter`]];
  if (path.on.has(span)) return [["critical path", "on it"]];
  return [["critical path", "not on it"], ["slack", seconds(slack)]];
}

/** A path as the kernel sends it: what is in words, and the slack of all spans as bytes. */
function pathOf(head, bytes) {
  if (!head?.ops) return null;
  const whole = bytes?.byteLength ? bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) : new ArrayBuffer(0);
  const on = new Set(head.ops.filter(([, , , , what]) => what === "op").map(([span]) => span));
  return { ...head, on, slack: new Float32Array(whole) };
}
