"""Checkpoints as files: boxes of parameters, which any number of ranks can read again."""
