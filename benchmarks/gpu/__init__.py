"""Benchmarks that need several GPUs; run by hand."""
