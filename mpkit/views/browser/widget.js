// The two ways in: a live widget (anywidget), whose kernel sends batches, and a page that holds its data.

const TRAITS = ["title", "labels", "groups", "layers", "bubble", "step_time", "of", "clock", "note", "live", "table", "room", "widest", "said", "waits", "stale", "has_path", "path_shown"];

/** What the panel shows, from the model's traits. */
const stateOf = (model) => Object.fromEntries(TRAITS.map((name) => [name, model.get(name)]));

/** anywidget's model differs between initialize and render, so what lasts is kept in this closure. */
function timelineWidget() {
  const store = new Store();
  const panels = new Set();
  let asked = 0;

  const hello = (model) => {
    asked = performance.now();
    model.send({ type: "hello", epoch: store.epoch, have: store.count });
  };
  const backlog = (model) => {
    const buffer = model.get("backlog");
    const head = model.get("backlog_head");
    return buffer?.byteLength && head?.type ? store.receive(head, buffer) : "missed";
  };
  const hear = (model, message, buffers) => {
    if (message?.type !== "spans") return;
    let what = store.receive(message, buffers[0]);
    // Something before it never came (it was sent while this page loaded): take the kernel's backlog, or ask.
    if (what === "missed" && backlog(model) !== "missed") what = store.receive(message, buffers[0]);
    if (what === "missed" && performance.now() - asked > 1000) hello(model);
    panels.forEach((panel) => panel.changed());
  };
  return {
    initialize({ model }) {
      model.on("msg:custom", (message, buffers) => hear(model, message, buffers));
      model.on("change:backlog", () => {
        backlog(model);
        panels.forEach((panel) => panel.changed());
      });
      backlog(model);
      hello(model);
    },
    render({ model, el }) {
      const panel = new Panel(el, store, model.get("look"));
      const update = () => panel.update(stateOf(model));
      const events = TRAITS.map((name) => `change:${name}`).join(" ");
      const tracks = () => panel.tracks.take(model.get("tracks_head"), model.get("tracks"));
      const path = () => panel.update({ path: pathOf(model.get("path_head"), model.get("path_slack")) });
      panel.wantPath = (shown) => {
        model.set("path_shown", shown);
        model.save_changes();
      };
      // A kernel that ends takes what it sends with it; the front end marks the widget after it has told of that.
      const ended = () => setTimeout(() => panel.update({ ended: Boolean(el.closest(".jupyter-widgets-disconnected")) }));
      panels.add(panel);
      model.on(events, update);
      model.on("change:path_head change:path_slack", path);
      model.on("comm_live_update", ended);
      model.on("change:tracks change:tracks_head", tracks);
      update();
      tracks();
      path();
      return () => {
        model.off(events, update);
        model.off("change:tracks change:tracks_head", tracks);
        model.off("change:path_head change:path_slack", path);
        model.off("comm_live_update", ended);
        panels.delete(panel);
        panel.destroy();
      };
    },
  };
}

/** A panel on a page: `state` as above, `batches` as [[message, buffer], ...]. */
export function showTimeline(host, look, state, batches) {
  const store = new Store();
  const panel = new Panel(host, store, look);
  for (const [message, buffer] of batches) store.receive(message, buffer);
  panel.update(state);
  return panel;
}

/** The bytes of base64 text that holds gzip, as a DataView. */
export async function unpacked(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i); // `from` would be ten times slower
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new DataView(await new Response(stream).arrayBuffer());
}

/** What base64 text that holds JSON in gzip says. */
export async function unpackedJson(text) {
  return JSON.parse(new TextDecoder().decode(await unpacked(text)));
}

export default timelineWidget;
