"""Shared parts of drawings: colours, axes, SVG sheets, the labels of lanes."""
