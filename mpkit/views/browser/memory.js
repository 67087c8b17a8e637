/** The memory chart of a run, drawn by plotly; where the kernel has none, an SVG picture. Until plotly has come, its
 *  place is kept free, so that nothing below it moves.
 *
 *  Plotly is 1.4 MB packed. It is sent once a page, when the first chart asks for it, and is part of no widget's
 *  state: a page that is loaded again asks the kernel for the states of all widgets at once, and does not wait long.
 */

/** This page's plotly, in `is` once it has come; `came` holds what waits for it. */
const plotly = (globalThis.mpkitPlotly ??= { is: null, asked: -Infinity, came: new Set() });

const ASK_AGAIN = 5000; // ms; who was asked may have been busy, or gone

const ask = (model) => {
  if (plotly.is || performance.now() - plotly.asked < ASK_AGAIN) return;
  plotly.asked = performance.now();
  model.send({ type: "plotly" });
};

const take = async (packed) => {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = new Blob([await new Response(stream).text()], { type: "text/javascript" });
  const address = URL.createObjectURL(source);
  await import(address); // it calls itself window.Plotly
  URL.revokeObjectURL(address);
  plotly.is = globalThis.Plotly;
  plotly.came.forEach((draw) => draw());
};

const memoryWidget = {
  initialize({ model }) {
    model.on("msg:custom", (message, buffers) => {
      if (message?.type === "plotly" && !plotly.is) take(buffers[0]);
    });
  },
  render({ model, el }) {
    const host = document.createElement("div");
    el.append(host);
    const shown = () => host.isConnected && host.offsetWidth > 0; // plotly measures what it draws into
    let drawn = null;
    const draw = () => {
      const chart = model.get("chart");
      if (!model.get("plotted")) {
        host.innerHTML = model.get("picture");
      } else if (!plotly.is || !chart.data) {
        if (chart.data) host.style.minHeight = `${chart.layout.height}px`;
        ask(model);
      } else if (shown()) {
        host.style.minHeight = "";
        drawn = chart;
        plotly.is.react(host, chart.data, chart.layout, { displaylogo: false, displayModeBar: false });
      }
    };
    const sizes = new ResizeObserver(() => {
      if (!plotly.is || !shown()) return;
      if (drawn === model.get("chart")) plotly.is.Plots.resize(host);
      else draw();
    });
    model.on("change:chart change:picture change:plotted", draw);
    plotly.came.add(draw);
    sizes.observe(host);
    draw();
    return () => {
      model.off("change:chart change:picture change:plotted", draw);
      plotly.came.delete(draw);
      sizes.disconnect();
      plotly.is?.purge(host);
    };
  },
};

export default memoryWidget;
