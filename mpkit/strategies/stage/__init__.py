"""The parts that a rank computes with: a stage's layers, its split backward, and recomputation."""
