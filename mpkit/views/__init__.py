"""Views of a Timeline and of other results: one picture, many forms.

In     a result: a Timeline, a Run, a diagnosis, a prediction.
Out    the same as text, SVG, a page or a widget; `renderers.py` says which module draws what.
Begin  with `timeline/picture.py`.
May import  all rooms but `course`.

    timeline/picture.py     Timeline -> Picture: lanes, spans, marks and words, and no drawing
    timeline/text.py        ... in a terminal
    timeline/svg.py         ... as a file without a kernel
    timeline/widget.py      ... as a live widget, with the browser's half of it (browser/)
    page/html.py            ... as one page, with the same JavaScript; trial.py, explore.py: schedules to try
    timeline/perfetto.py    ... as a trace for ui.perfetto.dev
    theme.py                fonts, margins and grounds of every figure, page and widget: light, dark, on paper
    drawing/lanes.py        what ranks are called, and how they are grouped by their places in the mesh
    chart/                  one chart for all results: data, drawn as SVG, as a plotly Figure, as text
    results/                the chart of each result as data: steps, what ranks do unequally, losses
    memory/                 the same of memory: over time, at the peak, ahead of a run; its words
    placement/              which rank holds what, on which node
    dashboard/              what a Run shows in a notebook: all of it together

Code that runs in a rank imports nothing from here. What only notebooks need (ipywidgets, anywidget, plotly) is
imported when such a view is made.
"""
