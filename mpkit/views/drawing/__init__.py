"""Shared parts of drawings: colours, axes, SVG sheets, heatmaps, the labels of lanes."""
