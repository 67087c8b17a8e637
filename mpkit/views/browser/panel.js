// The chart with what surrounds it: figures above, legend and table below, pointer and keys.
//
// The state it shows: {title, labels, groups, layers: [{names, words}] by stage, bubble, step_time, of, clock, note, live, table: {head, rows},
// room, widest, said, waits: [{rank, start, words}], stale, has_path, path, path_shown, ended}

/** Dark as JupyterLab, VS Code, Colab or the page says; as the system prefers, where none does. */
function isDark() {
  const { body, documentElement: root } = document;
  if (window.matchMedia("print").matches) return false; // paper is light
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  if (body.classList.contains("vscode-dark") || body.classList.contains("vscode-high-contrast")) return true;
  if (body.classList.contains("vscode-light")) return false;
  if (root.getAttribute("theme") === "dark") return true;
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Call back when that may have changed; returns how to stop. */
function watchTheme(changed) {
  const media = ["(prefers-color-scheme: dark)", "print"].map((query) => window.matchMedia(query));
  const page = new MutationObserver(changed);
  const options = { attributes: true, attributeFilter: ["class", "theme", "data-jp-theme-light"] };
  page.observe(document.body, options);
  page.observe(document.documentElement, options);
  media.forEach((each) => each.addEventListener("change", changed));
  return () => {
    page.disconnect();
    media.forEach((each) => each.removeEventListener("change", changed));
  };
}

const KEYS = "Timeline. Arrows pan and zoom, Page Up and Page Down go from step to step, 0 shows all, "
  + "Shift and an arrow go from operation to operation, C shows the critical path, / searches.";

const ENDED = "The kernel of this picture has ended or was restarted. This is the last that it sent.";

/** Build everything inside `host`. */
class Panel {
  constructor(host, store, look) {
    this.state = {};
    this.root = host.appendChild(node("section", "mpkit-timeline"));
    this.root.panel = this; // for tests, and for the curious in the browser's console
    this.build(look);
    this.chart = new Chart(this.canvas, store, look);
    this.overview = new Overview(this.strip, this.chart, () => this.changed());
    this.tip = new Tip(this.stage);
    this.walk = new Walk(this);
    this.search = this.chart.search = new Search(this, this.tools);
    this.tracks = new Tracks(this.below, this);
    this.chart.drawn = () => {
      this.overview.draw();
      this.tracks.draw();
      this.fillView();
    };
    this.stops = [watchTheme(() => this.printed()), watchSize(this.stage, this.chart), listen(this)];
    this.theme();
  }

  build() {
    const head = this.root.appendChild(node("header"));
    this.title = head.appendChild(node("strong", "mpkit-title"));
    this.bubble = figure(head, "bubble", "idle share of a step, averaged over GPUs (GPipe's definition)");
    this.time = figure(head, "step time", "from a step's first operation to its last one's end");
    const tools = this.tools = head.appendChild(node("span", "mpkit-tools"));
    this.followed = button(tools, "Follow", "keep the newest steps in view", () => this.toggleFollow());
    this.pages = [
      button(tools, "‹", "the step before (Page Up)", () => this.page(-1)),
      button(tools, "›", "the next step (Page Down)", () => this.page(1)),
    ];
    this.folds = button(tools, "Fold", "show one rank of each group, or all", () => this.fold());
    this.pathed = button(tools, "Critical path", "outline the operations that decide the step, and tell the slack of the others (c)", () => this.togglePath());
    button(tools, "−", "zoom out (-, or Ctrl and the wheel)", () => this.chart.zoom(1.6));
    button(tools, "+", "zoom in (+, or Ctrl and the wheel)", () => this.chart.zoom(1 / 1.6));
    button(tools, "Fit", "show all (double-click, or 0)", () => this.fit());
    this.ended = this.root.appendChild(node("p", "mpkit-ended"));
    this.strip = this.root.appendChild(node("div"));
    this.stage = this.root.appendChild(node("div", "mpkit-stage"));
    this.stage.tabIndex = 0;
    this.stage.setAttribute("role", "group");
    this.stage.setAttribute("aria-label", KEYS);
    this.stage.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes the keys for its own
    this.canvas = this.stage.appendChild(node("canvas"));
    this.canvas.setAttribute("role", "img");
    this.legend = this.root.appendChild(node("div", "mpkit-legend"));
    this.below = this.root.appendChild(node("div"));
    this.clock = this.root.appendChild(node("p", "mpkit-clock"));
    this.note = this.root.appendChild(node("p", "mpkit-note"));
    const details = this.root.appendChild(node("details"));
    details.append(node("summary", "", "The figures as a table"));
    this.table = details.appendChild(node("table"));
    details.addEventListener("toggle", () => this.fillView());
    this.details = details;
    this.status = this.root.appendChild(node("div", "mpkit-status"));
    this.status.setAttribute("role", "status"); // is there before it says something, or readers would miss the first
  }

  /** Show a changed state; and draw. */
  update(state) {
    const before = this.state;
    this.state = { ...before, ...state };
    const { title, labels, groups, bubble, step_time, of, clock, note, table, room, stale, ended } = this.state;
    const live = this.state.live && !ended;
    this.root.classList.toggle("mpkit-stale", Boolean(stale));
    this.ended.textContent = ended ? ENDED : "";
    if (ended && !before.ended) this.status.textContent = ENDED;
    this.title.textContent = title ?? "";
    this.bubble.set(bubble == null ? "" : percent(bubble), of);
    this.time.set(step_time == null ? "" : seconds(step_time), of);
    this.clock.textContent = clock ?? "";
    this.note.textContent = note ?? "";
    this.chart.labels = labels ?? [];
    this.chart.layers = this.state.layers ?? [];
    this.chart.widest = this.state.widest ?? "";
    this.chart.waits = this.state.waits ?? [];
    this.chart.lanes.take(groups ?? []);
    if (room !== before.room) this.chart.seen.room = room ?? 0;
    if (Boolean(live) !== Boolean(this.live)) this.chart.seen.live(live);
    this.live = Boolean(live);
    this.chart.keeps ||= this.live;
    this.followed.hidden = !live;
    if (table?.head && table !== before.table) fillTable(this.table, table);
    this.showPath();
    if (this.state.said !== before.said) this.status.textContent = this.state.said ?? "";
    this.canvas.setAttribute("aria-label", this.inWords());
    this.changed();
  }

  /** Other spans are in the store; those that stay have moved by so many numbers. */
  moved(by) {
    const { chart, walk } = this;
    const there = chart.selected?.span + by;
    if (chart.selected?.span >= 0) chart.selected = there >= 0 && there < chart.store.count ? { ...chart.selected, span: there } : null;
    if (by) {
      chart.pointed = null;
      walk.place = null;
    }
    this.changed();
  }

  /** Something that is shown has changed. */
  changed() {
    const { store } = this.chart;
    this.root.dataset.spans = store.count;
    this.search.refresh();
    const stages = Math.max(0, ...[...store.stages.values()].map((some) => some.length));
    if (`${store.keys.size} ${stages}` !== this.legend.dataset.of) this.fillLegend(stages);
    this.chart.ask();
    this.followed.setAttribute("aria-pressed", String(this.chart.seen.follow));
    this.pages.forEach((each) => { each.hidden = store.steps.size < 2; });
    const { lanes } = this.chart;
    this.folds.hidden = !lanes.foldable.length;
    this.folds.setAttribute("aria-pressed", String(lanes.allFolded));
  }

  /** Select a rank, and an operation of it; what is selected already is let go, unless it is to `stay`; null: nothing. */
  select(what, stay = false) {
    const { chart } = this;
    const same = what && chart.selected?.rank === what.rank && (chart.selected.span ?? -1) === (what.span ?? -1);
    chart.selected = same && !stay ? null : what;
    chart.ask();
  }

  /** Select what lies under a point: an operation, or its lane's rank. */
  pick(x, y) {
    const { chart } = this;
    const hit = chart.hit(x, y);
    const place = chart.placed?.rows.find((row) => y >= row.y - 1 && y <= row.y + row.height + 1);
    if (hit) this.select({ rank: hit.place.rank, span: hit.row.span[hit.index] });
    else this.select(place ? { rank: place.rank } : null);
  }

  /** The table's columns of what is in view, and its selected row; only while it is open. */
  fillView() {
    const rows = [...this.table.rows];
    if (!this.details.open || !rows.length) return;
    const { chart } = this;
    const state = `${chart.times} ${chart.store.version} ${chart.selected?.rank} ${rows.length}`;
    if (this.table.dataset.view === state) return;
    this.table.dataset.view = state;
    const columns = [["busy in view", (rank) => percent(chart.store.busy(rank, chart.times))], ...this.tracks.columns(chart.times)];
    rows.forEach((row, i) => {
      row.querySelectorAll(".mpkit-in-view").forEach((cell) => cell.remove());
      for (const [words, of] of columns) row.append(node(i ? "td" : "th", "mpkit-in-view", i ? of(i - 1) : words));
      if (i && chart.selected?.rank === i - 1) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }

  inWords() {
    const { title, labels = [], groups = [], bubble, step_time, clock } = this.state;
    const words = [`${title || "Timeline"}${this.state.stale ? ", out of date" : ""}`, `${labels.length} lanes${groups.length ? ` in ${groups.length} groups` : ""}`];
    if (bubble != null) words.push(`bubble ${percent(bubble)}`);
    if (step_time != null) words.push(`step time ${seconds(step_time)}`);
    for (const wait of this.state.waits ?? []) words.push(`${labels[wait.rank] ?? `rank ${wait.rank}`} ${wait.words}`);
    return `${words.join(", ")}. ${clock ?? ""}. The table below has the figures.`;
  }

  fillLegend(stages) {
    const { chart } = this;
    const keys = [...chart.store.keys].sort((a, b) => a - b);
    this.legend.dataset.of = `${chart.store.keys.size} ${stages}`;
    this.legend.replaceChildren();
    for (const key of chart.store.keys.size ? [...keys.filter((key) => key !== IDLE), IDLE] : []) {
      const words = chart.look.inks[key].word + (key === IDLE ? " (bubble)" : "");
      const item = button(this.legend, "", `show or hide ${words}`, () => {
        if (!chart.hidden.delete(key)) chart.hidden.add(key);
        item.setAttribute("aria-pressed", String(!chart.hidden.has(key)));
        chart.ask();
      });
      item.setAttribute("aria-pressed", String(!chart.hidden.has(key)));
      const swatch = item.appendChild(node("i", key === IDLE ? "mpkit-idle" : ""));
      swatch.style.setProperty("--ink", `var(--mpkit-ink-${key})`);
      swatch.style.setProperty("--edge", `var(--mpkit-edge-${key})`);
      item.append(words);
    }
    if (stages > 1) this.legend.append(node("span", "mpkit-bars", `a bar below: its rank's second stage${stages > 2 ? ", two bars: its third" : ""}`));
  }

  /** Colours as CSS variables; the canvas takes the same. */
  theme() {
    const dark = isDark();
    const { look } = this.chart;
    this.chart.dark = dark;
    this.root.dataset.theme = dark ? "dark" : "light";
    for (const [name, value] of Object.entries(look.themes[dark ? "dark" : "light"])) {
      this.root.style.setProperty(`--mpkit-${name}`, value);
    }
    look.inks.forEach((ink, key) => {
      this.root.style.setProperty(`--mpkit-ink-${key}`, dark ? ink.dark : ink.light);
      this.root.style.setProperty(`--mpkit-edge-${key}`, (dark ? ink.edge_dark : ink.edge_light) || "transparent");
    });
    this.chart.ask();
  }

  /** Take the theme at once: paper does not wait for the screen's next frame. */
  printed() {
    this.theme();
    this.chart.draw();
  }

  fit() {
    this.chart.seen.fit();
    this.changed();
  }

  page(by) {
    this.chart.seen.page(by);
    this.changed();
  }

  /** Fold or unfold the group of that number; without one, all of them. */
  fold(group = -1) {
    const { chart } = this;
    if (group < 0) chart.lanes.toggleAll();
    else chart.lanes.toggle(group);
    chart.pointed = null;
    this.changed();
  }

  /** Show the critical path or no longer; a kernel finds it when it is asked for. */
  togglePath() {
    if (this.pathed.hidden) return;
    const shown = !this.state.path_shown;
    this.update({ path_shown: shown });
    this.wantPath?.(shown);
  }

  /** Draw the path if it is known and shown; bring its step into view when it comes. */
  showPath() {
    const { path_shown: shown, has_path: possible, path } = this.state;
    const { chart } = this;
    this.pathed.hidden = !(possible || path?.ops);
    this.pathed.setAttribute("aria-pressed", String(Boolean(shown)));
    const before = chart.path;
    chart.path = shown && path?.ops ? path : null;
    if (!chart.path || chart.path === before) return;
    const times = chart.store.steps.get(path.step);
    if (times && chart.store.steps.size > 1) {
      chart.seen.follow = false;
      chart.show(...times);
    }
    this.status.textContent = path.words;
  }

  toggleFollow() {
    const { seen } = this.chart;
    seen.follow = !seen.follow;
    seen.most = Infinity;
    if (seen.follow) seen.window = null;
    this.changed();
  }

  destroy() {
    this.stops.forEach((stop) => stop());
    this.root.remove();
  }
}

function button(parent, text, title, act) {
  const made = parent.appendChild(node("button", "", text));
  Object.assign(made, { type: "button", title });
  if (!/^\w{2,}/.test(text)) made.setAttribute("aria-label", title);
  made.addEventListener("click", act);
  return made;
}

/** A number with what it is; hidden while there is none. */
function figure(parent, what, title) {
  const box = parent.appendChild(node("span", "mpkit-figure"));
  box.title = title;
  const number = box.appendChild(node("b"));
  const words = box.appendChild(node("span", "", what));
  return {
    set(text, of) {
      box.hidden = !text;
      number.textContent = text;
      words.textContent = of ? `${what}, ${of}` : what;
    },
  };
}

function fillTable(table, { head, rows }) {
  const line = (tag, values) => {
    const made = node("tr");
    values.forEach((value, i) => {
      const cell = made.appendChild(node(tag === "th" || !i ? "th" : "td", "", String(value)));
      if (cell.tagName === "TH") cell.scope = tag === "th" ? "col" : "row";
    });
    return made;
  };
  const top = node("thead");
  top.append(line("th", head));
  const body = node("tbody");
  body.append(...rows.map((row) => line("td", row)));
  table.replaceChildren(top, body);
  table.dataset.view = "";
}

function watchSize(stage, chart) {
  const observer = new ResizeObserver(() => chart.ask());
  observer.observe(stage);
  return () => observer.disconnect();
}
