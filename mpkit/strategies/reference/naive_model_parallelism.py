"""Naive model parallelism: p stages on p ranks, of which one computes at any time.

    forward     the batch goes through the stages, from rank 0 to rank p - 1
    backward    the gradient goes back, from rank p - 1 to rank 0

The bubble is (p - 1) / p.

Source: Huang et al., "GPipe", NeurIPS 2019, figure 2b.
"""

from __future__ import annotations

from mpkit.strategies.reference.stage import Stage


def naive_model_parallelism(stage: Stage) -> None:
    """Compute one step of a stage, with one micro-batch: the whole batch."""
    # ---- forward
    stage.forward(0)
    # ---- backward
    stage.backward(0)
