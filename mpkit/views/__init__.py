"""What a reader sees of a Timeline: one picture, many ends.

    picture.py      Timeline -> Picture: lanes, spans, marks and words, and no drawing
    text.py         ... in a terminal, once        live.py   ... in a terminal, while a run goes
    svg.py          ... as a file without a kernel
    timeline.py     ... as a live widget, with timeline.js
    html.py         ... as one page, with the same timeline.js
    perfetto.py     ... as a trace for ui.perfetto.dev
    lanes.py        what ranks are called, and how they are grouped by their places in the mesh
    memory.py       memory by category and GPU, as a chart or as SVG
    traffic.py      bytes from rank to rank; volume.py: what a rank sends beside the formulas
    placement_*.py  which rank holds what, on which node
    dashboard.py    what a Run shows in a notebook: all of it together

Nothing here is imported by what runs in a rank. What only notebooks need (ipywidgets, anywidget, plotly) is
imported when such a view is made.
"""
