"""Prefetch: the order in which sites are called, as the forwards have shown it, and what to gather ahead.

Until a forward has run, sites follow each other in the order in which modules are registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from mpkit.strategies.zero.units import Site

__all__ = ["CallOrder"]


class CallOrder:
    """Which site is called after which.

    Args:
        sites: the model's sites, in order of registration. Those around others are left out.
        prefetch: number of sites to gather ahead.

    Attributes:
        has_backward: by site, whether the graph of its latest forward leads to it.

    >>> from torch import nn
    >>> order = CallOrder([Site(0, nn.Linear(1, 1), [], []) for _ in range(4)], prefetch=2)
    >>> list(order.next_forward(1)), list(order.next_backward(1))
    ([2, 3], [])
    >>> order.has_backward[0] = True
    >>> list(order.next_backward(1))
    [0]
    """

    def __init__(self, sites: list[Site], prefetch: int) -> None:
        self._prefetch = prefetch
        self.has_backward = [False] * len(sites)
        self._after: dict[int, int] = {}  # by site, the site that is called next
        self._before: dict[int, int] = {}
        self._latest: int | None = None  # the last that was called
        inner = [i for i, site in enumerate(sites) if not site.around]
        for one, following in pairwise(inner):
            if sites[one].stage == sites[following].stage:
                self._follow(one, following)

    def note_call(self, i: int, *, alone: bool) -> None:
        """Note that site i is called; `alone` if no other site's forward is under way, and so nothing came before."""
        if not alone and self._latest is not None and self._latest != i:
            self._follow(self._latest, i)
        self._latest = i

    def end(self) -> None:
        """Note that the forward is over, so that what is called next follows nothing."""
        self._latest = None

    def _follow(self, one: int, following: int) -> None:
        self._after[one], self._before[following] = following, one

    def next_forward(self, i: int) -> Iterator[int]:
        """Yield the sites to gather ahead when site i's forward begins."""
        yield from self._walk(i, self._after)

    def next_backward(self, i: int) -> Iterator[int]:
        """Yield the sites to gather ahead when site i's backward begins."""
        yield from (at for at in self._walk(i, self._before) if self.has_backward[at])

    def _walk(self, i: int, order: dict[int, int]) -> Iterator[int]:
        for _ in range(self._prefetch):
            if i not in order:
                return
            i = order[i]
            yield i
