"""Benchmarks that need a GPU, run by hand, and what they measured: `h200.json`."""
