// The two ways in: a live widget (anywidget), whose kernel sets traits, and a page that holds its data.

const TRAITS = ["title", "labels", "groups", "layers", "bubble", "step_time", "of", "clock", "note", "live", "table", "room", "widest", "said", "waits", "has_path", "path_shown"];

/** What the panel shows, from the model's traits. */
const stateOf = (model) => Object.fromEntries(TRAITS.map((name) => [name, model.get(name)]));

/** anywidget's model differs between initialize and render, so what lasts is kept in this closure. */
function timelineWidget() {
  const store = new Store();
  const panels = new Set();
  const show = (model) => {
    const head = model.get("spans_head");
    if (!head?.columns) return;
    const moved = store.show(head, model.get("spans"));
    panels.forEach((panel) => panel.moved(moved));
  };
  return {
    initialize({ model }) {
      model.on("change:spans_head", () => show(model));
      show(model);
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

/** A panel on a page: `state` as above, and the spans that it shows. */
export function showTimeline(host, look, state, head, buffer) {
  const store = new Store();
  const panel = new Panel(host, store, look);
  store.show(head, buffer);
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
