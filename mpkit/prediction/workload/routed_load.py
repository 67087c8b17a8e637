"""How busy the experts of a layer are, and so the busiest of the ranks that divide them.

    ratio    the rows of the busiest rank, divided by the mean of all
    rows     of each expert: ranks hold neighbours in each layer's order, or an even share of an expert's rows for each
             slot that holds a copy of it
    copies   a rank owns E / ep experts, and borrows those others in its slots (`mpkit.strategies.experts.copies`)

All ranks of a group meet in a layer's all-to-alls. So a layer takes as long as its busiest rank, and the layers of a
model as long as the sum of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.plan.checks import real
from mpkit.plan.expert_checks import lent_experts
from mpkit.prediction.experts.expert_balance import ExpertBalance
from mpkit.trace.expert_load import ExpertLoad

__all__ = ["RoutedLoad", "routed_load"]

Counts = npt.NDArray[np.float64]
WAYS = (
    "It is a ratio of the busiest rank's rows to the mean, such as expert_load=1.4; rows of experts, [E] or [layers, "
    "E]; a run's `run.expert_load`, or its `.balance(...)`"
)


class ExpertCopyCounts(NamedTuple):
    """Experts of which ranks have copies, each of which travels twice per step: its weights, and then its gradients.

    Attributes:
        borrowed, lent: [layers, ep], by rank.
    """

    borrowed: Counts
    lent: Counts

    @property
    def most_borrowed(self) -> float:
        """Those that the rank with most borrows in a layer, in the mean of all layers."""
        return float(self.borrowed.sum(axis=0).max() / max(1, len(self.borrowed)))

    @property
    def most_moved(self) -> float:
        """Those that the rank with most sends or receives in a layer, either way, in the mean of all layers."""
        most = np.maximum(self.borrowed, self.lent).max(axis=1)
        return float(most.sum() / max(1, len(most)))


@dataclass(frozen=True, eq=False)
class RoutedLoad:
    """How busy experts are.

    Attributes:
        origin: where that is from, in words.
        ratio: of the busiest rank's rows to the mean, if that is all that is known.
        rows: by layer, the rows of each expert; (): not known.
        orders: by layer, the expert of each slot, one rank's slots after the other's.

    >>> load = RoutedLoad("given", rows=((6.0, 2.0, 1.0, 1.0),), orders=((0, 1, 2, 3),))
    >>> [load.imbalance(ep) for ep in (1, 2, 4)]
    [1.0, 1.6, 2.4]
    >>> RoutedLoad("given", rows=((6.0, 2.0, 1.0, 1.0),), orders=((0, 1, 0, 2, 0, 3),)).imbalance(2)  # 4 rows, and 6
    1.2
    """

    origin: str
    ratio: float = 1.0
    rows: tuple[tuple[float, ...], ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    @lru_cache(256)  # noqa: B019 (one object per question)
    def imbalance(self, ep: int) -> float:
        """Return the rows of the busiest of ep ranks divided by the mean, in the mean of all layers."""
        if ep == 1:
            return 1.0
        if not self.rows:
            return min(self.ratio, float(ep))
        busiest = whole = 0.0
        for rows, order in zip(self.rows, self.orders, strict=True):
            of_ranks = rows_of_ranks(rows, order, ep)
            busiest += float(of_ranks.max())
            whole += float(of_ranks.sum())
        return busiest * ep / whole

    @lru_cache(256)  # noqa: B019 (one object per question)
    def copies(self, ep: int) -> ExpertCopyCounts:
        """Return how many experts the ranks borrow and lend, [layers, ep]."""
        table = np.zeros((2, len(self.orders), ep))
        for layer, order in enumerate(self.orders if ep > 1 else ()):
            of = np.array([[len(each) for each in to] for to in lent_experts(order, len(set(order)), ep)])
            table[:, layer] = of.sum(axis=0), of.sum(axis=1)
        return ExpertCopyCounts(table[0], table[1])

    def check(self, experts: int, ep: int) -> None:
        """Check that ep ranks can divide these experts so.

        Raises:
            ValueError: they cannot.
        """
        if not experts:
            raise ValueError(
                f"expert_load says how busy experts are ({self.origin}), and this model has none"
            )
        for rows in self.rows:
            if len(rows) != experts:
                raise ValueError(
                    f"expert_load has the rows of {len(rows)} experts per layer ({self.origin}), and the model has "
                    f"{experts}: a ratio of the busiest rank's rows to the mean serves any model, "
                    f"expert_load={max(1.0, self.imbalance(ep)) if len(rows) % ep == 0 else 1.4:.3g}"
                )
        if not self.rows and ep > 1 and self.ratio > ep:
            raise ValueError(
                f"expert_load={self.ratio:g}: if one of ep={ep} ranks has all rows, that is {ep} times the mean; "
                f"expert_load={ep}"
            )
        for order in self.orders:
            if len(order) % ep:
                near = [n for n in range(1, experts + 1) if len(order) % n == 0 and experts % n == 0]
                raise ValueError(
                    f"ep={ep} ranks cannot have equally many of {len(order)} slots for {experts} experts "
                    f"({self.origin}): ep={max(n for n in near if n <= ep)}"
                )

    def describe(self, ep: int) -> str:
        """Return it in words, of ep ranks."""
        if ep == 1:
            return f"uneven routing ({self.origin}), which is the same work for ranks that hold all experts (ep=1)"
        words = (
            f"the busiest of ep={ep} ranks has {self.imbalance(ep):.2f} times the mean rows ({self.origin})"
        )
        if held := self.copies(ep).most_borrowed:
            words += f"; copies: {held:.3g} experts per layer on the rank that borrows most"
        return words


def rows_of_ranks(rows: Sequence[float], order: Sequence[int], ep: int) -> Counts:
    """Return the rows of each of ep ranks in a layer, an even share of an expert's for each of its slots.

    >>> rows_of_ranks([6.0, 2.0, 1.0, 1.0], [0, 1, 2, 3], 2).tolist()
    [8.0, 2.0]
    """
    slots = np.asarray(order)
    shares = np.asarray(rows, float)[slots] / np.bincount(slots)[slots]
    of_ranks: Counts = shares.reshape(ep, -1).sum(axis=1)
    return of_ranks


def placed_load(load: object, model: Any, layers: int) -> RoutedLoad | None:
    """Return how busy experts are, with the slots that `mk.models.place_experts` gave those of a model.

    Args:
        load: as for `routed_load`; a balance has slots of its own.
        model: that is asked about; a module if experts of it were placed.
        layers: with experts.

    Raises:
        ValueError: the load is none.
    """
    given = routed_load(load)
    modules = dict(model.named_modules()) if callable(getattr(model, "named_modules", None)) else {}
    placed = {
        name: each.__dict__["expert_order"]
        for name, each in modules.items()
        if "expert_order" in each.__dict__
    }
    if not placed or isinstance(load, ExpertBalance | RoutedLoad):
        return given
    experts = len(set(next(iter(placed.values()))))
    natural = tuple(range(experts))
    if isinstance(load, ExpertLoad):
        orders = tuple(placed.get(name, natural) for name in load.rows)
    else:
        orders = (*placed.values(), *[natural] * (layers - len(placed)))
    if given is None:
        return RoutedLoad("uniform routing", rows=((1.0,) * experts,) * len(orders), orders=orders)
    rows = given.rows * len(orders) if len(given.rows) == 1 else given.rows
    return replace(given, rows=rows, orders=orders)


def routed_load(load: object) -> RoutedLoad | None:
    """Return how busy experts are from what `expert_load=` can be; None: uniform routing.

    Raises:
        ValueError: it is none of these.

    >>> routed_load([6, 2, 1, 1]).imbalance(2), routed_load(1.4).imbalance(4)
    (1.6, 1.4)
    """
    if load is None or isinstance(load, RoutedLoad):
        return load
    if isinstance(load, ExpertBalance):
        return RoutedLoad(
            f"placed by balance, rows of step {load.step}",
            rows=tuple(tuple(layer.rows.tolist()) for layer in load.layers),
            orders=tuple(tuple(layer.phy2log.tolist()) for layer in load.layers),
        )
    if isinstance(load, ExpertLoad):
        last = {name: rows[-1] for name, rows in load.rows.items()}
        step = load.first + min(map(len, load.rows.values())) - 1
        orders = (load.orders.get(name, range(len(rows))) for name, rows in last.items())
        return RoutedLoad(
            f"measured in step {step}",
            rows=tuple(tuple(rows.tolist()) for rows in last.values()),
            orders=tuple(tuple(order) for order in orders),
        )
    if (ratio := real(load)) is not None:
        if not 1 <= ratio < float("inf"):
            raise ValueError(f"expert_load={load!r}: the busiest rank has 1 or more times the mean. {WAYS}")
        return RoutedLoad("given", ratio)
    try:
        table = np.atleast_2d(np.asarray(load, dtype=np.float64))
    except (TypeError, ValueError):
        table = np.zeros((0, 0))
    if table.ndim != 2 or not table.size or not np.isfinite(table).all() or (table < 0).any():
        raise ValueError(f"expert_load={load!r:.80} is no load. {WAYS}")
    if not table.sum(axis=1).all():
        raise ValueError("expert_load has a layer without rows: leave the layers out that have no experts")
    order = tuple(range(table.shape[1]))
    return RoutedLoad("given", rows=tuple(map(tuple, table.tolist())), orders=(order,) * len(table))
