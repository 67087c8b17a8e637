"""ExpertBalance: a placement of experts by DeepSeek's balancer, and what it would do to the rows of a run's step.

    before    experts are where expert parallelism has them: neighbours of the run's order share a GPU
    balance   each layer by itself, from the rows that its experts computed (`Run.expert_load`)
    keep      a layer stays as it is if the greedy packing is not better, which can be
    after     the copies of an expert share its rows evenly

A layer of experts takes as long as its busiest GPU, because all meet in the all-to-all. So the time of all layers
changes as the sum of their busiest GPUs' rows does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpkit.common.display import DrawnResult
from mpkit.prediction.experts.load_balancer import Indices, balance_experts
from mpkit.trace.expert_load import ExpertLoad, Rows

__all__ = ["ExpertBalance", "LayerBalance", "balance_load"]


@dataclass(frozen=True, eq=False)
class LayerBalance:
    """One layer's experts on GPUs.

    >>> layer = LayerBalance("block0", np.array([6.0, 2.0]), np.array([0, 0, 0, 1]), gpus=2)
    >>> layer.load_before.tolist(), layer.load_after.tolist(), layer.moves
    ([6.0, 2.0], [4.0, 4.0], 1)

    Attributes:
        name: the layer's name.
        rows: [E], the rows of each expert.
        phy2log: [R], the expert that each slot holds; each GPU has R / gpus neighbouring slots.
        gpus: how many there are.
    """

    name: str
    rows: Rows
    phy2log: Indices
    gpus: int

    @property
    def copies(self) -> Indices:
        """[E]: how many slots hold each expert."""
        return np.bincount(self.phy2log, minlength=len(self.rows))

    @property
    def slots(self) -> Rows:
        """[gpus, R / gpus]: the rows of each slot, an even share of its expert's."""
        shares: Rows = self.rows / self.copies
        return shares[self.phy2log].reshape(self.gpus, -1)

    @property
    def held_before(self) -> list[Indices]:
        """By GPU, the experts that it holds now."""
        experts = np.arange(len(self.rows))
        return [experts[experts * self.gpus // len(experts) == gpu] for gpu in range(self.gpus)]

    @property
    def load_before(self) -> Rows:
        """[gpus]: the rows of each GPU as experts are now."""
        return np.array([self.rows[held].sum() for held in self.held_before], dtype=np.float64)

    @property
    def load_after(self) -> Rows:
        """[gpus]: the rows of each GPU."""
        loads: Rows = self.slots.sum(axis=1)
        return loads

    @property
    def moves(self) -> int:
        """How many weights of experts GPUs receive: of those that they did not have."""
        return sum(
            len(np.setdiff1d(experts, before))
            for before, experts in zip(self.held_before, self.phy2log.reshape(self.gpus, -1), strict=True)
        )


@dataclass(frozen=True, eq=False)
class ExpertBalance(DrawnResult):
    """A placement of experts: it prints as a table, and shows itself as the loads of GPUs before and after.

    >>> load = ExpertLoad({"block0": np.array([[[9.0, 1.0, 1.0, 1.0]]])}, first=0)
    >>> balance = load.balance(6, gpus=2)
    >>> balance.layers[0].phy2log.tolist(), balance.imbalance
    ([0, 0, 3, 0, 1, 2], {'block0': (1.6666666666666667, 1.1666666666666667)})
    >>> balance.time_ratio
    0.7

    Attributes:
        layers: one `LayerBalance` per layer with experts.
        step: the number of the step whose rows these are.
        nodes, gpus: how many there are; GPUs of all nodes together.
        policy: "hierarchical" (groups of experts stay on a node) or "global".
    """

    layers: tuple[LayerBalance, ...]
    step: int
    nodes: int
    gpus: int
    policy: str

    @property
    def imbalance(self) -> dict[str, tuple[float, float]]:
        """By layer, before and after: the rows of the busiest GPU, divided by their mean."""
        found = {}
        for each in self.layers:
            mean = max(float(each.load_before.mean()), 1e-300)
            found[each.name] = float(each.load_before.max()) / mean, float(each.load_after.max()) / mean
        return found

    @property
    def time_ratio(self) -> float:
        """The predicted time of a step's experts, divided by what it was: the busiest GPUs' rows, summed over layers.

        It is assumed that time grows with rows, that every layer's experts are of one size, that each copy of an
        expert gets as many rows, and that routers choose as in this step. Moving the weights is not in it, nor is what
        training with copies sends in each step: their weights, and their gradients.
        """
        before = sum(float(each.load_before.max()) for each in self.layers)
        return sum(float(each.load_after.max()) for each in self.layers) / max(before, 1e-300)

    @property
    def moves(self) -> int:
        """How many weights of experts GPUs receive, in all layers."""
        return sum(each.moves for each in self.layers)

    __repr__ = DrawnResult.__str__


def balance_load(
    load: ExpertLoad, replicas: int, *, gpus: int, nodes: int = 1, groups: int = 1, step: int = -1
) -> ExpertBalance:
    """Return what `ExpertLoad.balance` describes."""
    counted = len(next(iter(load.rows.values())))
    if not -counted <= step < counted:
        raise ValueError(f"balance(step={step}): {counted} steps were counted, 0 to {counted - 1}")
    layers: list[LayerBalance] = []
    for name, steps in load.rows.items():
        rows, experts = steps[step], steps.shape[1]
        if not 1 <= gpus <= experts:
            raise ValueError(
                f"balance(gpus={gpus}): the {experts} experts of {name} are divided over 1 to {experts} GPUs"
            )
        found = balance_experts(rows[None], replicas, groups=groups, nodes=nodes, gpus=gpus)
        layer = LayerBalance(name, rows, found[0], gpus)
        if layer.load_after.max() >= layer.load_before.max():
            kept = [np.resize(here, replicas // gpus) for here in layer.held_before]
            layer = replace(layer, phy2log=np.concatenate(kept))
        layers.append(layer)
    policy = "global" if groups % nodes or nodes == 1 else "hierarchical"
    return ExpertBalance(tuple(layers), load.first + step % counted, nodes, gpus, policy)
