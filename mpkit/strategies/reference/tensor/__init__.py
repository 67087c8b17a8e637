"""Tensor and sequence parallelism in parts: conjugate operators, linear layers,
MLP, attention, cross-entropy.
"""
