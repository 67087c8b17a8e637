// A section of a page in which readers set a schedule and its times: each is played here and drawn by a panel.
//
//   read    the controls' values, at first those in the page's address, which always holds what is set
//   play    played.js
//   show    the times as spans in the panel's store, and the figures

class Trial {
  /** `look` as for a panel; `data` from views/page/trial.py: {schedules, words, columns, keys}; `linked`: whether the page's address holds what is set. */
  constructor(section, look, data, linked) {
    this.section = section;
    this.data = data;
    this.linked = linked;
    this.moved = () => {}; // called when the reader has moved something
    this.store = new Store();
    this.panel = new Panel(section.querySelector(".trial"), this.store, look);
    section.querySelector(".static")?.remove();
    section.querySelector(".mpkit-controls").hidden = false;
    if (linked) this.recall();
    section.addEventListener("input", (event) => this.changed(event.target.name));
    this.changed("");
  }

  /** Set the controls as the page's address says, "#try?schedule=1f1b&ranks=4": links hold their state. */
  recall() {
    const [place, said] = location.hash.slice(1).split("?");
    if (place !== "try" || !said) return;
    for (const [name, value] of new URLSearchParams(said)) {
      const control = this.section.querySelector(`[name="${CSS.escape(name)}"]`);
      if (control) control.value = value;
    }
    if (!this.control("schedule").value) this.control("schedule").selectedIndex = 0; // no schedule has that name
    this.section.scrollIntoView();
  }

  /** Put what is set into the page's address. */
  remember() {
    const set = [...this.section.querySelectorAll("[name]")].filter((each) => !each.closest(".mpkit-control").hidden);
    history.replaceState(null, "", `#try?${new URLSearchParams(set.map(({ name, value }) => [name, value]))}`);
  }

  control(name) {
    return this.section.querySelector(`[name="${name}"]`);
  }

  value(name) {
    return Number(this.control(name).value);
  }

  /** A control was moved: a whole backward sets both of its halves, and is as long as they are. */
  changed(name) {
    if (name === "backward") {
      for (const half of ["input_grad", "weight_grad"]) this.control(half).value = this.value("backward") / 2;
    }
    this.control("backward").value = this.value("input_grad") + this.value("weight_grad");
    const chosen = this.control("schedule").value;
    const own = chosen === "own";
    const text = own ? "" : this.data.schedules[chosen][`${this.value("ranks")} ${this.value("microbatches")}`];
    const written = this.control("own");
    if (own && name === "schedule") written.value = ownText(this.text); // the reader begins with what was there
    if (!own) written.value = "";
    this.text = text || this.text;
    written.closest(".mpkit-control").hidden = !own;
    let schedule;
    try {
      schedule = own ? readOwn(written.value) : readSchedule(text);
      if (own) ended(schedule, play(schedule, { F: 1, B: 2, I: 1, W: 1 }, 0));
    } catch (error) {
      return this.wrong(error.message);
    }
    this.wrong("");
    const split = schedule.rows.flat().some(({ kind }) => kind === "I");
    const shown = { backward: !split, input_grad: split, weight_grad: split, ranks: !own, microbatches: !own };
    for (const each of this.section.querySelectorAll("input[type=range]")) {
      const [number, unit] = [Number(each.value), each.dataset.unit ?? ""];
      each.closest(".mpkit-control").hidden = !(shown[each.name] ?? true);
      each.closest(".mpkit-control").querySelector("output").textContent = unit ? seconds(number) : String(number);
      each.setAttribute("aria-valuetext", unit ? `${number} ${unit}` : String(number));
    }
    this.section.querySelector(".words").textContent = this.data.words[chosen] ?? "Your own schedule: a line per rank, played as it stands.";
    this.show(schedule);
    if (name && this.linked) this.remember();
    if (name) this.moved();
  }

  /** Set the sliders as those of another trial are. */
  follow(other) {
    for (const { name } of this.section.querySelectorAll("input[type=range]")) this.control(name).value = other.value(name);
    this.changed("");
  }

  /** Say what is wrong with what was written, and that the picture is of what was there before; "" if nothing is. */
  wrong(message) {
    this.section.querySelector(".mpkit-wrong").textContent = message;
    this.panel.update(message ? { stale: true, bubble: null, step_time: null, said: message } : { stale: false });
  }

  /** Play the schedule, and show it. */
  show(schedule) {
    const v = schedule.stages / schedule.rows.length; // stages per rank: each takes 1/v of the rank's time
    const [f, i, w] = ["forward", "input_grad", "weight_grad"].map((name) => this.value(name) / v);
    const hop = this.value("hop");
    const times = play(schedule, { F: f, B: i + w, I: i, W: w }, hop);
    const whole = makespanOf(times);
    this.fill(spansOf(schedule, times, hop, this.data.keys), whole);
    const peaks = times.map((row) => peakOf(row) / v);
    const most = Math.max(...peaks);
    const bubble = bubbleOf(times);
    this.panel.update({
      labels: times.map((_, rank) => `rank ${rank}`),
      bubble,
      step_time: whole,
      clock: "Computed in this page: each rank runs its actions in the schedule's order, each as soon as its input has arrived.",
      note: `${most === Math.min(...peaks) ? "Each rank" : `Rank ${peaks.indexOf(most)}`} holds the activations of at most ${+most.toFixed(2)} ${most === 1 ? "micro-batch" : "micro-batches"}.`,
      table: tableOf(times, whole, peaks),
      said: `bubble ${percent(bubble)}, step time ${seconds(whole)}`,
    });
  }

  /** Replace everything that the store has, and let go of what was selected in it. */
  fill(spans, whole) {
    const { store, panel } = this;
    store.reset();
    store.steps.set(0, [0, whole]);
    const batch = this.data.columns.map(([name, code]) => [name, ARRAYS[code].from(spans, (span) => span[name] ?? 0)]);
    store.take(Object.fromEntries(batch), spans.length);
    panel.select(null);
    panel.walk.place = null;
    panel.chart.pointed = null;
    panel.tip.hide();
    panel.fit();
  }
}

/** The rows of a store: actions, messages between ranks, and the waits for them. */
function spansOf(schedule, times, hop, keys) {
  const spans = [];
  const doneBy = new Map(times.flat().map((each) => [each.action.name, each]));
  const put = (kind, rank, start, end, lane, key, where, more) => {
    const { stage, microbatch } = where;
    return spans.push({ kind, rank, start, duration: end - start, lane, key, stage, microbatch, peer: -1, cause: -1, ...more }) - 1;
  };
  for (const { rank, action, free, start, end, from } of times.flat()) {
    if (from) {
      const sent = doneBy.get(from.name);
      const group = 1 + from.stage + (action.kind === "F" ? 0 : schedule.stages);
      put(SEND, sent.rank, sent.left, sent.left, LANE.COMM, keys.message, sent.action, { peer: rank, group });
      const cause = put(RECV, rank, sent.left, sent.left + hop, LANE.COMM, keys.message, action, { peer: sent.rank, group });
      put(WAIT, rank, free, start, LANE.COMPUTE, IDLE, action, { cause });
    }
    put(keys[action.kind], rank, start, end, LANE.COMPUTE, keys[action.kind], action); // compute: key and kind are one
  }
  return spans;
}

function tableOf(times, whole, peaks) {
  const kinds = [["forward", "F"], ["backward", "B"], ["input grad", "I"], ["weight grad", "W"]];
  const used = kinds.filter(([, kind]) => times.flat().some(({ action }) => action.kind === kind));
  return {
    head: ["", "idle", ...used.map(([words]) => words), "activations, micro-batches"],
    rows: times.map((row, rank) => [
      `rank ${rank}`, percent(whole ? 1 - busyOf(row) / whole : 0), ...used.map(([, kind]) => seconds(busyOf(row, kind))), +peaks[rank].toFixed(2),
    ]),
  };
}
