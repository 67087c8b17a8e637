"""One chart for all results: data (`chart.py`), drawn as SVG (`svg.py`), as a plotly Figure (`figure.py`), as text."""
