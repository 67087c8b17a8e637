// mk.explore in a notebook: a trial for each schedule, side by side. Sliders move both, on one time axis.

/** The way in (anywidget); of the model `sections` and `data` as views/page/trial.py makes them, and `look`. */
function explorer() {
  return {
    async render({ model, el }) {
      el.classList.add("mpkit-explorer");
      el.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes keys for its own
      const data = await unpackedJson(model.get("data"));
      const trials = model.get("sections").map((html) => {
        const section = el.appendChild(node("section"));
        section.innerHTML = html;
        return new Trial(section, model.get("look"), data, false);
      });
      const align = () => {
        const room = Math.max(...trials.map(({ panel }) => panel.state.step_time ?? 0));
        for (const { panel } of trials) {
          panel.update({ room });
          panel.fit();
        }
      };
      for (const trial of trials) {
        trial.moved = () => {
          trials.filter((other) => other !== trial).forEach((other) => other.follow(trial));
          align();
        };
      }
      align();
      return () => trials.forEach(({ panel }) => panel.destroy());
    },
  };
}
