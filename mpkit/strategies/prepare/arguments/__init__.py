"""Checking and normalizing the arguments of `Cluster.train`, including batches and samplers."""
