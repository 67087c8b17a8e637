// ipywidgets' sliders have a role and a value but no name: they get that of their label, and a line of words below.
//
// The line is this widget's own; the sliders are those in the box around it. They may be drawn before it or after.

/** Name each slider, and the number beside it, that has no name yet. */
function nameSliders(box) {
  for (const slider of box.querySelectorAll(".widget-slider")) {
    const label = slider.querySelector(".widget-label");
    const words = label?.title || label?.textContent;
    if (!words) continue;
    slider.querySelector('[role="slider"]')?.setAttribute("aria-label", words);
    const number = slider.querySelector(".widget-readout");
    number?.setAttribute("role", "textbox");
    number?.setAttribute("aria-label", `${words}, as a number`);
  }
}

export default {
  render({ model, el }) {
    el.textContent = model.get("words");
    let watched = null;
    const changes = new MutationObserver(() => nameSliders(watched));
    // The line has no box around it while it is rendered: its size changes once it is on the page.
    const placed = new ResizeObserver(() => {
      const box = el.parentElement;
      if (!box || box === watched) return;
      watched = box;
      nameSliders(box);
      changes.disconnect();
      changes.observe(box, { childList: true, subtree: true });
    });
    placed.observe(el);
    return () => {
      placed.disconnect();
      changes.disconnect();
    };
  },
};
