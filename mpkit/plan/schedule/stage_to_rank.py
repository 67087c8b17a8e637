"""Placement: which rank holds which stage."""

from __future__ import annotations

__all__ = ["loops", "vee"]


def loops(p: int, v: int = 1) -> tuple[int, ...]:
    """Place stage s on rank s mod p: the model goes round all p ranks v times, or once with v = 1.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, section 2.2.

    >>> loops(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(p)) * v


def vee(p: int) -> tuple[int, ...]:
    """Place stages r and 2p-1-r on rank r: the model goes down the ranks and comes back up.

    Rank 0 has the first and the last stage, so the activations that are kept longest and shortest are on one rank, and
    all ranks hold about as much. The two stages in the middle are on one rank and need no message between them.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.

    >>> vee(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(p), *reversed(range(p)))
