"""What a watched program says of itself.

span(name)    a piece that it does by other means than torch's, recorded by hand
step()        where a step ends, if optimizers do not say so
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from difflib import get_close_matches

from mpkit.launch.watch.actions import Actions
from mpkit.trace import Kind, Lane, lane_of

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


_KINDS = {
    kind.word: kind for kind in Kind if lane_of(kind) in (Lane.COMPUTE, Lane.COMM) and kind != Kind.WAIT
}


def span(
    name: str, *, kind: str = "compute", flops: float = 0.0, nbytes: int = 0
) -> AbstractContextManager[None]:
    """Record a piece of a watched program: `with mk.watch.span("attention"):`.

    What torch does is recorded without it. This is for what mpkit cannot see: another framework, a library in C++. The
    program waits for a communication that is recorded so until the block ends. A step ends after an "optimizer", as
    after one of torch's, or where `mk.watch.step()` says so. Where nothing is watched, nothing is recorded.

    Args:
        name: what the timeline calls it.
        kind: "compute", "forward", "backward", "optimizer", "all_reduce" or another kind of op, as in
            `timeline.to_dataframe()`.
        flops: the FLOPs of a piece that computes.
        nbytes: the bytes that it reads and writes; of a communication its payload.

    Raises:
        ValueError: there is no such kind.

    >>> import mpkit as mk
    >>> def program(ctx):
    ...     with mk.watch.span("another framework's step"):
    ...         with mk.watch.span("its gradients", kind="all_reduce", nbytes=4_000):
    ...             pass
    >>> with mk.Cluster(ranks=1, device="cpu") as cluster:
    ...     _ = cluster.run(program, watch=True)
    ...     cluster.timeline().comm_bytes
    [{'all_reduce': 4000}]
    """
    if kind not in _KINDS:
        near = get_close_matches(kind, _KINDS, 1) or ["compute"]
        raise ValueError(
            f"mk.watch.span(kind={kind!r}): there are {', '.join(_KINDS)}; such as kind={near[0]!r}"
        )
    actions = WATCHED.get()
    return nullcontext() if actions is None else actions.span(_KINDS[kind], name, flops, nbytes)
