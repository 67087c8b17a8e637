"""`mk.watch.step()`: where a step of a watched program ends, if optimizers do not say so."""

from __future__ import annotations

from contextvars import ContextVar

from mpkit.launch.watch.actions import Actions

__all__ = ["WATCHED", "step"]

WATCHED: ContextVar[Actions | None] = ContextVar("WATCHED", default=None)
"""The actions of the program that is being watched."""


def step() -> None:
    """End a step of the program here; once it has been called, optimizers no longer end steps.

    Call it where a step ends that has no optimizer step, or several with forwards in between (two networks that are
    trained in turn), or that is an iteration of something else. Where nothing is watched, it does nothing.

    >>> import mpkit as mk
    >>> import torch
    >>> def infer(ctx):
    ...     model = torch.nn.Linear(4, 4)
    ...     for _ in range(3):
    ...         model(torch.ones(2, 4))
    ...         mk.watch.step()
    >>> with mk.Cluster(ranks=1, device="cpu") as cluster:
    ...     _ = cluster.run(infer, watch=True)
    ...     len(cluster.timeline().steps)
    3
    """
    actions = WATCHED.get()
    if actions is not None:
        actions.step()
