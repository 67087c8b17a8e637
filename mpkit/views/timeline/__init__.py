"""Drawings of timelines: as text, SVG, an interactive widget, a page of HTML, and for Perfetto."""
