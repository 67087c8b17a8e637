"""Use the cluster that a caller passes, or else start one: a helper process that ends with the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpkit.launch.session.cluster import Cluster

__all__ = ["borrow_cluster", "borrow_clusters"]


@contextmanager
def borrow_cluster(given: Cluster | None, ranks: int = 1) -> Iterator[Cluster]:
    """Yield the given cluster, or a new one of `ranks` CPU ranks that is closed afterwards.

    >>> with borrow_cluster(None, 2) as cluster:
    ...     cluster.run(lambda ctx: ctx.rank)
    [0, 1]
    """
    if given is not None:
        yield given
        return
    with Cluster(ranks, device="cpu") as own:
        yield own


@contextmanager
def borrow_clusters(
    given: Callable[[int], Cluster] | None, device: str = "auto"
) -> Iterator[Callable[[int], Cluster]]:
    """Yield `clusters(ranks)` for consecutive runs of different sizes.

    It is the given function, or one whose clusters share a helper process that is closed afterwards.

    >>> with borrow_clusters(None, "cpu") as clusters:
    ...     [clusters(ranks).run(lambda ctx: ctx.world_size) for ranks in (1, 2)]
    [[1], [2, 2]]
    """
    if given is not None:
        yield given
        return
    with Cluster(1, device) as own:
        yield own.resized
