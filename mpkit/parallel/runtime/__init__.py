"""A training on a rank: the loop, the pipeline, messages between stages, checkpoints."""
