"""Data parallelism: gradients averaged in buckets, BatchNorm over all ranks, tied weights."""
