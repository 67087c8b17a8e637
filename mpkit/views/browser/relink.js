// A section of a page in which readers put a recorded run on another link: it is replayed here, without a kernel.
//
//   read     the link: one by name, or latency and bandwidth as they are set; the page's address holds them
//   retime   retimed.js
//   show     the spans at their new times in the panel's store, and what changed beside the recorded link

/** Begin; `look` as for a panel, `state` and `spans` of the recorded timeline, `data` from views/page/relink.py. */
export function showRelink(section, look, state, [head, buffer], data) {
  return new Relink(section, look, state, decode(head, buffer), head.names, data);
}

class Relink {
  constructor(section, look, state, batch, names, data) {
    Object.assign(this, { section, batch, names, data, store: new Store() });
    section.relink = this; // for tests
    this.panel = new Panel(section.querySelector(".relinked"), this.store, look);
    this.panel.update({ ...state, table: null, said: "" });
    this.recorded = this.play(data.links[data.own]);
    section.querySelector(".controls").hidden = false;
    const [place, said] = location.hash.slice(1).split("?");
    if (place === "relink" && said) this.recall(new URLSearchParams(said));
    else this.choose(data.own);
    section.addEventListener("input", ({ target }) => this.changed(target.name));
  }

  control(name) {
    return this.section.querySelector(`[name="${name}"]`);
  }

  recall(said) {
    if (this.data.links[said.get("link")]) return this.choose(said.get("link"));
    this.control("link").value = "";
    for (const name of ["latency", "bandwidth"]) this.control(name).value = said.get(name) ?? "";
    return this.show();
  }

  /** Take a link by name: the numbers are its own. */
  choose(name) {
    const { latency, bandwidth } = this.data.links[name];
    this.control("link").value = name;
    this.control("latency").value = Number((latency * 1e6).toPrecision(4));
    this.control("bandwidth").value = Number((bandwidth / 1e9).toPrecision(4));
    this.show();
  }

  changed(name) {
    const { value } = this.control("link");
    if (name === "link" && value) this.choose(value);
    else {
      if (name !== "link") this.control("link").value = "";
      this.show();
    }
    const set = value && name === "link" ? { link: value } : { latency: this.control("latency").value, bandwidth: this.control("bandwidth").value };
    history.replaceState(null, "", `#relink?${new URLSearchParams(set)}`);
  }

  /** The link as it is set; null if its numbers are none that a link can have. */
  get link() {
    const name = this.control("link").value;
    if (name) return this.data.links[name];
    const [latency, bandwidth] = ["latency", "bandwidth"].map((each) => this.control(each).valueAsNumber);
    return latency >= 0 && bandwidth > 0 ? { latency: latency * 1e-6, bandwidth: bandwidth * 1e9, bus: {}, ramp: 0 } : null;
  }

  play(link) {
    const times = retime(this.data.program, link);
    return { times, ...figuresOf(this.batch, times, this.data.program.controls.length) };
  }

  show() {
    const { link, panel, recorded } = this;
    this.section.querySelector(".wrong").textContent = link ? "" : "A link takes 0 µs or more, and has more than 0 GB/s.";
    panel.update({ stale: !link });
    if (!link) return;
    const played = this.played = this.play(link);
    this.fill(played);
    const more = played.time - recorded.time;
    const change = Math.abs(more) < 1e-12 ? "as long as on the recorded link" : `${seconds(Math.abs(more))} ${more > 0 ? "longer" : "shorter"} than on the recorded link`;
    const [whole, was] = [played, recorded].map(({ bubble }) => percent(bubble));
    panel.update({
      bubble: played.bubble, step_time: played.time, of: `step ${played.step}`,
      clock: "Computed in this page: ranks work as recorded, and wait for this link.",
      note: `The step takes ${seconds(played.time)}, ${change} (${seconds(recorded.time)}); bubble ${whole} (${was}).`,
      said: `step time ${seconds(played.time)}, bubble ${whole}`,
    });
  }

  /** Put the spans at their new times. */
  fill({ times: { start, end, issued }, steps }) {
    const { store, panel, batch } = this;
    store.reset(store.epoch + 1);
    store.names = ["", ...this.names.slice(1)];
    store.steps = steps;
    const changed = {
      start, duration: Float32Array.from(start, (time, i) => end[i] - time), early: Float32Array.from(start, (time, i) => time - issued[i]),
    };
    store.take({ ...batch, ...changed }, 0, start.length);
    panel.select(null);
    panel.walk.place = null;
    panel.chart.pointed = null;
    panel.tip.hide();
    panel.fit();
  }
}
