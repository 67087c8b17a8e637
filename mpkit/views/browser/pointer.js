// Wheel, drag, hover and keys on a panel's chart.

/** Connect them; returns how to disconnect. */
function listen(panel) {
  const { stage, chart, tip } = panel;
  const controller = new AbortController();
  const on = (name, act, options = {}) => stage.addEventListener(name, act, { signal: controller.signal, ...options });
  const place = (event) => {
    const box = stage.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let dragged = null;

  on("wheel", (event) => wheel(event, panel, place(event)[0]), { passive: false });
  on("dblclick", (event) => {
    if (chart.head(place(event)[1]) < 0) panel.fit();
  });
  on("pointerdown", (event) => {
    if (event.button) return;
    dragged = { x: event.clientX, moved: false };
    stage.setPointerCapture(event.pointerId);
  });
  on("pointermove", (event) => {
    if (dragged) {
      const share = (dragged.x - event.clientX) / chart.width;
      if (!dragged.moved && Math.abs(share * chart.width) < 3) return; // a click may tremble
      dragged = { x: event.clientX, moved: true };
      stage.classList.add("mpkit-dragged");
      point(panel, null);
      chart.pan(share);
      panel.changed();
    } else {
      point(panel, ...place(event));
    }
  });
  const drop = () => {
    dragged = null;
    stage.classList.remove("mpkit-dragged");
  };
  on("pointerup", (event) => {
    const clicked = dragged && !dragged.moved;
    const [x, y] = place(event);
    const group = clicked ? chart.head(y) : -1;
    drop();
    if (group >= 0) panel.fold(group);
    else if (clicked) panel.pick(x, y);
  });
  on("pointercancel", drop);
  on("pointerleave", () => point(panel, null));
  window.addEventListener("resize", () => chart.ask(), { signal: controller.signal });
  document.addEventListener("scroll", () => chart.scrolled(), { capture: true, passive: true, signal: controller.signal });
  on("blur", () => tip.hide());
  on("keydown", (event) => key(event, panel));
  return () => controller.abort();
}

/** With Ctrl (or by two fingers on a touch pad) it zooms around the pointer; sideways it pans; alone it scrolls the page. */
function wheel(event, panel, x) {
  const { chart } = panel;
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
    if (chart.seen.whole) return;
    chart.pan(sideways / chart.width);
  } else {
    if (!event.ctrlKey && !event.metaKey) return;
    const lines = event.deltaMode === 1 ? 16 : 1; // some mice count lines, not pixels
    chart.zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY * lines)) * 0.003), x);
  }
  event.preventDefault();
  panel.changed();
}

/** Tell what is under the pointer; without a place, or with nothing there, tell nothing. */
function point(panel, x, y) {
  const { chart, tip } = panel;
  const hit = x === null || !chart.placed ? null : chart.hit(x, y);
  const before = chart.pointed;
  chart.pointed = hit;
  const inside = x !== null && x >= chart.left && x <= chart.left + chart.width;
  if (panel.tracks.all.length) chart.point(inside ? chart.time(x) : null); // the same time is marked in the tracks
  panel.stage.classList.toggle("mpkit-on-head", x !== null && chart.head(y) >= 0);
  if (hit) tip.show(chart, hit, x, y);
  else tip.hide();
  if (hit?.row !== before?.row || hit?.index !== before?.index) chart.ask();
}

function key(event, panel) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { chart } = panel;
  const acts = {
    ArrowLeft: () => chart.pan(-0.1),
    ArrowRight: () => chart.pan(0.1),
    "+": () => chart.zoom(1 / 1.4),
    "=": () => chart.zoom(1 / 1.4),
    "-": () => chart.zoom(1.4),
    ArrowUp: () => chart.zoom(1 / 1.4),
    ArrowDown: () => chart.zoom(1.4),
    PageUp: () => chart.seen.page(-1),
    PageDown: () => chart.seen.page(1),
    0: () => panel.fit(),
    Home: () => panel.fit(),
    c: () => panel.togglePath(),
    "/": () => panel.search.field.focus(),
    Escape: () => panel.select(null),
  };
  const walks = {
    ArrowLeft: () => panel.walk.along(-1),
    ArrowRight: () => panel.walk.along(1),
    ArrowUp: () => panel.walk.across(-1),
    ArrowDown: () => panel.walk.across(1),
  };
  const act = (event.shiftKey && walks[event.key]) || acts[event.key];
  if (!act) return;
  act();
  panel.changed();
  event.preventDefault();
  event.stopPropagation();
}
