"""One chart for all results: data and text (`chart.py`), drawn as SVG (`svg.py`), as a plotly Figure (`figure.py`)."""
