// A search among operations: what is found keeps its colour, with a line below it, and everything else is paler.
//
//   "all_gather"          words: all of them occur in an operation's kind, its name or the legend's word for it
//   "layer 7"             a number: of a layer or block, as in the names layers.7.mlp, h.7, block7 and, of an
//                         nn.Sequential, 7; an action is found by all layers of its stage ...
//   "rank 3 forward"      ... and of a rank (or GPU), stage, step or micro-batch; all that is asked has to hold

const HINT = 'Search operations, such as "all_gather", "layer 7" or "rank 3 forward" (/). Enter goes to the next.';
const COLUMN = { rank: "rank", gpu: "rank", stage: "stage", step: "step", microbatch: "microbatch" };
const plain = (text) => text.toLowerCase().replace(/micro[-_ ]?batch(es)?/g, "microbatch").replace(/[-_]/g, " ").trim();

/** Whether a name is that of a layer with this number, or of a part of it. */
const isLayer = (name, number) =>
  [`(^|[^a-z])(layers?|blocks?|h)[^a-z0-9]?${number}(?!\\d)`, `^([^0-9]*\\.)?${number}(\\.|$)`]
    .some((pattern) => new RegExp(pattern).test(name.toLowerCase()));

/** {columns: [[column, number], ...], layers: [number, ...], words: [word, ...]}; null if nothing is asked. */
function readQuery(text) {
  const query = { columns: [], layers: [], words: [] };
  const rest = plain(text).replace(/\b(rank|gpu|stage|step|microbatch|layer|block)s? ?(\d+)\b/g, (_, what, number) => {
    if (COLUMN[what]) query.columns.push([COLUMN[what], Number(number)]);
    else query.layers.push(Number(number));
    return " ";
  });
  query.words = rest.split(/\s+/).filter(Boolean);
  return query.columns.length || query.layers.length || query.words.length ? query : null;
}

/** Whether an operation's kind, its name and its stage's layers have the words and the layers of a query. */
function isNamed({ words, layers }, chart, span) {
  const { store, look } = chart;
  const names = [store.names[store.value("name", span)] ?? "", ...(layersOf(chart, span)?.names ?? [])];
  const kind = look.kinds[store.value("kind", span)] ?? "";
  const text = plain([kind === "recv" ? "recv receive" : kind, look.inks[store.value("key", span)].word, ...names].join(" "));
  return words.every((word) => text.includes(word)) && layers.every((number) => names.some((name) => isLayer(name, number)));
}

/** The ground over what is seen of the rows, but not over what was found there, which gets a line below. */
function drawFound(frame, chart, { rows }) {
  const { context, ratio, left, width, t0, t1, scale, theme } = frame;
  const x = (time) => left + Math.min(Math.max((time - t0) * scale, 0), width);
  const boxes = [];
  for (const { rank, part, y, height } of rows) {
    const row = chart.store.find(rank, part)?.tidy();
    const [first, after] = row ? row.between(t0, t1) : [0, 0];
    let free = left; // boxes of a row may overlap, or share a pixel: each pixel is kept once
    for (let i = first; i < after; i++) {
      if (!chart.search.has(row.span[i])) continue;
      const from = Math.max(x(row.start[i]), free);
      free = Math.max(free, x(row.end[i]), Math.min(x(row.start[i]) + 2 * ratio, left + width));
      if (free > from) boxes.push({ x: from, width: free - from, y: y * ratio, height: height * ratio });
    }
  }
  veil(frame, rows, boxes, [t0, t1], x);
  context.fillStyle = theme.text;
  for (const box of boxes) context.fillRect(box.x, box.y + box.height, box.width, 2 * ratio);
}

/** The field in a panel's tools, and what it says beside it. */
class Search {
  constructor(panel, tools) {
    Object.assign(this, { panel, query: null, version: -1, named: new Map(), found: new Uint8Array(0) });
    this.field = node("input", "mpkit-search");
    Object.assign(this.field, { type: "search", placeholder: "Search  /", title: HINT, spellcheck: false });
    this.field.setAttribute("aria-label", HINT);
    this.field.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes the letters for its keys
    this.told = node("span", "mpkit-found");
    this.told.setAttribute("aria-live", "polite");
    tools.prepend(this.told, this.field);
    this.field.addEventListener("input", () => this.ask(this.field.value));
    this.field.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    event.stopPropagation();
    if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    event.preventDefault();
    this.field.value = "";
    this.ask("");
    this.panel.stage.focus();
  }

  ask(text) {
    this.query = readQuery(text);
    this.version = -1;
    this.refresh();
    this.panel.chart.ask();
  }

  has(span) {
    return this.found[span] === 1;
  }

  /** Look at the spans, if these are others, and say how many were found. */
  refresh() {
    const { chart } = this.panel;
    const { store } = chart;
    if (!this.query) {
      this.told.textContent = "";
      return;
    }
    if (this.version === store.version && this.told.textContent) return;
    Object.assign(this, { version: store.version, named: new Map(), found: new Uint8Array(store.count), seconds: 0, count: 0 });
    for (let span = 0; span < store.count; span++) {
      if (store.value("kind", span) === WAIT || store.value("lane", span) === LANE.NONE) continue;
      const key = `${store.value("kind", span)} ${store.value("name", span)} ${store.value("stage", span)} ${store.value("depth", span)}`;
      if (!this.named.has(key)) this.named.set(key, isNamed(this.query, chart, span));
      if (!this.named.get(key)) continue;
      if (!this.query.columns.every(([column, number]) => store.value(column, span) === number)) continue;
      this.found[span] = 1;
      this.count += 1;
      this.seconds += store.value("duration", span);
    }
    this.told.textContent = this.count ? `${this.count.toLocaleString("en-US")} found${this.seconds ? `, ${seconds(this.seconds)}` : ""}` : "none found";
  }

  /** Go to the next operation that was found (`by` 1) or to that before (-1), in the order of their starts. */
  next(by) {
    const { chart, walk } = this.panel;
    const all = [];
    for (const { rank, part } of this.query ? chart.placed.rows : []) {
      const row = chart.store.find(rank, part)?.tidy();
      for (let index = 0; index < (row?.count ?? 0); index++) {
        if (this.has(row.span[index])) all.push({ rank, part, index, start: row.start[index] });
      }
    }
    if (!all.length) return;
    all.sort((a, b) => a.start - b.start);
    const same = ({ rank, part, index }) => rank === walk.place?.rank && part === walk.place?.part && index === walk.place?.index;
    const now = all.findIndex(same);
    const { rank, part, index } = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : (now + by + all.length) % all.length];
    walk.reach({ rank, part, index });
  }
}
