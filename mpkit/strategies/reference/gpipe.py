"""GPipe: all micro-batches forward, then all of them backward.

    forward     F_0 ... F_(m-1); a rank holds the activations of all m micro-batches
    backward    B_(m-1) ... B_0

The bubble is (p - 1) / (m + p - 1).

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3 and figure 2c.
"""

from __future__ import annotations

from mpkit.strategies.reference.stage import Stage


def gpipe(stage: Stage) -> None:
    """Compute one step of a stage, with m micro-batches."""
    # ---- forward
    for i in range(stage.m):
        stage.forward(i)
    # ---- backward
    for i in reversed(range(stage.m)):
        stage.backward(i)
