// What an operation is, in words, under the pointer.

/** A node with text; names come from users, so text is never read as HTML. */
function node(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** "forward · micro-batch 3" of a span. */
function title(chart, span) {
  const { store, look } = chart;
  const words = [look.kinds[store.value("kind", span)] ?? "operation"];
  const name = store.names[store.value("name", span)];
  if (name) words.push(name);
  const microbatch = store.value("microbatch", span);
  if (microbatch >= 0) words.push(`micro-batch ${microbatch}`);
  return words.join(" · ");
}

/** {names, words}: the layers that an action computes, where a run has noted them. */
function layersOf({ store, layers }, span) {
  const value = (column) => store.value(column, span);
  const acts = value("lane") === LANE.COMPUTE && value("kind") !== WAIT && !value("depth");
  return acts ? layers[value("stage")] : undefined;
}

/** [[what, value], ...] of a span. */
function facts(chart, span) {
  const { store, labels } = chart;
  const value = (column) => store.value(column, span);
  const who = (rank) => labels[rank] ?? `rank ${rank}`;
  const found = [["on", who(value("rank"))]];
  if (value("stage") >= 0) found.push(["stage", value("stage")]);
  const layers = layersOf(chart, span);
  if (layers) found.push(["layers", layers.words]);
  if (value("step") >= 0) found.push(["step", value("step")]);
  found.push(["start", seconds(value("start") - store.origin)], ["took", seconds(value("duration"))]);
  if (value("bytes") > 0) found.push(["bytes", amount(value("bytes"), "B")]);
  if (value("flops") > 0) found.push(["work", amount(value("flops"), "FLOP")]);
  if (value("flops") > 0 && value("duration") > 0) {
    found.push(["rate", `${amount(value("flops") / value("duration"), "FLOP")}/s`]);
  }
  const way = (other) => ({ send: "to", recv: "from" })[chart.look.kinds[store.value("kind", other)]];
  if (value("peer") >= 0) found.push([way(span) ?? "root", who(value("peer"))]);
  const cause = value("cause");
  if (value("kind") === WAIT && cause >= 0 && cause < store.count) {
    const peer = way(cause) ? ` ${way(cause)} ${who(store.value("peer", cause))}` : "";
    found.push(["waited for", `${title(chart, cause)}${peer}`]);
  }
  const link = linked(store, span);
  found.push(...pathFacts(chart, span));
  if (link?.what === "came last") found.push(["came last", who(store.value("rank", link.from))]);
  return found;
}

/** The box that follows the pointer. */
class Tip {
  constructor(stage) {
    this.stage = stage;
    this.box = stage.appendChild(node("div", "mpkit-tip"));
    this.box.hidden = true;
  }

  /** Show what was hit, at this place of the stage. */
  show(chart, hit, x, y) {
    const span = hit.row.span[hit.index];
    const idle = hit.row.part === "waits";
    const ink = chart.inks[hit.row.key[hit.index]].fill;
    this.put(idle ? `idle: ${title(chart, span)}` : title(chart, span), ink, facts(chart, span), x, y);
  }

  /** Show a heading, with a swatch if it has a colour, and [[what, value], ...]. */
  put(heading, ink, told, x, y) {
    const head = node("div", "mpkit-tip-head");
    if (ink) head.appendChild(node("i")).style.background = ink;
    head.append(heading);
    const list = node("dl");
    for (const [what, value] of told) list.append(node("dt", "", what), node("dd", "", String(value)));
    this.box.replaceChildren(head, list);
    this.box.hidden = false;
    // Beside the pointer, on the side where there is room.
    const { clientWidth, clientHeight } = this.stage;
    const { offsetWidth, offsetHeight } = this.box;
    const left = x + 14 + offsetWidth > clientWidth ? x - 14 - offsetWidth : x + 14;
    const top = y + 14 + offsetHeight > clientHeight + 60 ? y - 10 - offsetHeight : y + 14;
    this.box.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
  }

  hide() {
    this.box.hidden = true;
  }
}
