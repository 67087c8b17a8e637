"""What a reader sees of a Timeline: one picture, many ends.

    picture.py      Timeline -> Picture: lanes, spans, marks and words, and no drawing
    text.py         ... in a terminal, once        live.py   ... in a terminal, while a run goes
    svg.py          ... as a file without a kernel
    timeline.py     ... as a live widget, with timeline.js
    html.py         ... as one page, with the same timeline.js
    perfetto.py     ... as a trace for ui.perfetto.dev
    memory.py       memory by category and GPU, as a chart or as SVG
    dashboard.py    what a Run shows in a notebook: all of it together

Nothing here is imported by what runs in a rank. What only notebooks need (ipywidgets, anywidget, plotly) is
imported when such a view is made.
"""
