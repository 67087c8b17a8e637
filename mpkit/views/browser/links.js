// What belongs together on different ranks: a send and its receive, and the members of a collective, of which the
// others wait for the one that came last. The n-th of a group on one rank goes with the n-th on the others.

const SEND = 32;
const RECV = 33;
const LAST_COLLECTIVE = 63;

/** When its rank issued a communication, which may be long before it began. */
const issued = (store, span) => store.value("start", span) - store.value("early", span);

/** Spans of one group and of one of the kinds, by rank, in the order in which the ranks issued them. */
function members(store, group, kinds) {
  const { count } = store;
  const groups = store.columns.group.data;
  const kind = store.columns.kind.data;
  const byRank = new Map();
  for (let i = 0; i < count; i++) {
    if (groups[i] !== group || !kinds.includes(kind[i])) continue;
    const rank = store.value("rank", i);
    if (!byRank.has(rank)) byRank.set(rank, []);
    byRank.get(rank).push(i);
  }
  for (const mine of byRank.values()) mine.sort((a, b) => issued(store, a) - issued(store, b));
  return byRank;
}

/** {from, to: [span, ...], what} of a communication, or of a wait for one; null if nothing goes with it. */
function linked(store, span) {
  const kind = store.value("kind", span);
  if (kind === WAIT) {
    const cause = store.value("cause", span);
    return cause >= 0 && cause < store.count ? linked(store, cause) : null;
  }
  const group = store.value("group", span);
  if (!(group > 0) || kind < SEND || kind > LAST_COLLECTIVE) return null;
  const known = store.linked;
  if (known?.span === span) return known.link;
  const link = kind <= RECV ? message(store, span, group, kind) : collective(store, span, group, kind);
  store.linked = { span, link };
  return link;
}

function message(store, span, group, kind) {
  const other = kind === SEND ? RECV : SEND;
  const nth = members(store, group, [kind]).get(store.value("rank", span)).indexOf(span);
  const partner = members(store, group, [other]).get(store.value("peer", span))?.[nth];
  if (partner === undefined) return null;
  return kind === SEND ? { from: span, to: [partner], what: "message" } : { from: partner, to: [span], what: "message" };
}

/** From the rank that issued it last to all others. */
function collective(store, span, group, kind) {
  const byRank = members(store, group, [kind]);
  const nth = byRank.get(store.value("rank", span)).indexOf(span);
  const all = [...byRank.values()].flatMap((mine) => (nth < mine.length ? [mine[nth]] : []));
  if (all.length < 2) return null;
  const from = all.reduce((last, each) => (issued(store, each) > issued(store, last) ? each : last));
  return { from, to: all.filter((each) => each !== from), what: "came last" };
}

/** Draw a link's arrows, between those of its operations whose ranks have lanes. */
function drawLink(frame, store, { from, to }, placeOf) {
  const x = (time) => frame.left + Math.min(Math.max((time - frame.t0) * frame.scale, 0), frame.width);
  const start = placeOf(from);
  if (!start) return;
  const begin = issued(store, from);
  for (const span of to) {
    const end = placeOf(span);
    if (!end || end === start) continue;
    const isReceive = store.value("kind", span) === RECV;
    const arrives = store.value("start", span) + (isReceive ? store.value("duration", span) : 0);
    const down = end.y > start.y;
    const y0 = (down ? start.y + start.height : start.y) * frame.ratio;
    const y1 = (down ? end.y : end.y + end.height) * frame.ratio;
    arrow(frame, x(begin), y0, x(Math.max(arrives, begin)), y1);
  }
}

/** A line with a head at (x1, y1), on a line of the ground's colour, so that it is seen on any block. */
function arrow({ context, ratio, theme }, x0, y0, x1, y1) {
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [dx, dy] = [(x1 - x0) / length, (y1 - y0) / length];
  const head = Math.min(9 * ratio, length / 2);
  for (const [ink, wide] of [[theme.ground, 5], [theme.text, 2]]) {
    context.strokeStyle = ink;
    context.fillStyle = ink;
    context.lineWidth = wide * ratio;
    context.lineJoin = "round";
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1 - dx * head, y1 - dy * head);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - dx * head - dy * head * 0.5, y1 - dy * head + dx * head * 0.5);
    context.lineTo(x1 - dx * head + dy * head * 0.5, y1 - dy * head - dx * head * 0.5);
    context.closePath();
    if (wide > 2) context.stroke();
    context.fill();
  }
}

/** The waits in vain of ranks that hang: hatched to the edge, with a dashed outline and the reason. */
function drawWaits(frame, chart, { rows }) {
  const { context, ratio, left, width, t0, scale, theme } = frame;
  for (const { rank, start, words } of chart.waits) {
    const row = rows.find((each) => each.rank === rank && each.part === "compute");
    const x = Math.max((start - t0) * scale, 0);
    if (!row || x >= width) continue;
    const [y, height] = [row.y * ratio, row.height * ratio];
    context.fillStyle = chart.hatch(frame);
    context.fillRect(left + x, y, width - x, height);
    context.strokeStyle = theme.text;
    context.lineWidth = 1.5 * ratio;
    context.setLineDash([5 * ratio, 4 * ratio]);
    context.strokeRect(left + x, y + ratio, width - x, height - 2 * ratio);
    context.setLineDash([]);
    context.font = `${12 * ratio}px ${FONT}`;
    const fits = (text) => context.measureText(text).width + 20 * ratio < width - x;
    const told = [words, words.split(" (")[0]].find(fits);
    if (!told || height < 14 * ratio) continue;
    context.fillStyle = theme.ground;
    context.fillRect(left + x + 6 * ratio, y + height / 2 - 9 * ratio, context.measureText(told).width + 8 * ratio, 18 * ratio);
    context.fillStyle = theme.text;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(told, left + x + 10 * ratio, y + height / 2);
  }
}
