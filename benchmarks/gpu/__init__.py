"""Benchmarks that need GPUs, run by hand, and what they measured: `h200.json`."""
