"""TokenRoutes: from which rank to which rank the rows of tokens travelled in one step, for one layer of experts.

Under expert parallelism (`Plan(ep=n)`) a rank has the tokens of its own samples and some of the experts. A token's row
travels to the rank of its expert, and the result travels back. Under uniform routing (n-1)/n of the rows leave their
rank (Lepikhin et al., "GShard", ICLR 2021, section 3.2); `TokenRoutes` says how many did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.display import DrawnResult
from mpkit.plan.mesh import mesh_of

if TYPE_CHECKING:
    from mpkit.trace import Trace
    from mpkit.trace.expert_load import Rows


@dataclass(frozen=True, eq=False)
class TokenRoutes(DrawnResult):
    """The rows of one layer in one step: prints as a matrix, and shows itself as ribbons from rank to rank.

    >>> routes = TokenRoutes("block0", 3, (0, 1), np.array([[3.0, 1.0], [4.0, 0.0]]), ((0, 1), (0, 1)))
    >>> routes.matrix.tolist(), routes.moved_share
    ([[3.0, 1.0], [4.0, 0.0]], 0.625)

    Attributes:
        layer: the layer's name.
        step: the number of the step.
        ranks: those that have tokens for this layer.
        rows: [ranks, E], how many rows of each rank's tokens each expert computed.
        owners: [ranks, E], the rank that computed them.
    """

    layer: str
    step: int
    ranks: tuple[int, ...]
    rows: Rows
    owners: tuple[tuple[int, ...], ...]

    @property
    def matrix(self) -> Rows:
        """[ranks, ranks]: how many rows each rank sent to the experts of each other one, and to its own."""
        matrix = np.zeros((len(self.ranks), len(self.ranks)))
        for sender, owners in enumerate(self.owners):
            np.add.at(matrix[sender], [self.ranks.index(owner) for owner in owners], self.rows[sender])
        return matrix

    @property
    def moved_share(self) -> float:
        """The share of rows that another rank computed."""
        matrix = self.matrix
        return float(1 - np.trace(matrix) / max(matrix.sum(), 1.0))

    __repr__ = DrawnResult.__str__


def token_routes(trace: Trace, layer: str = "", step: int = -1) -> TokenRoutes:
    """Return where the tokens of a step went.

    Args:
        trace: of a run whose model has experts.
        layer: a part of the layer's name; "": the first layer.
        step: the step's place among those that were counted; -1: the last one.

    Raises:
        ValueError: no rows were counted, or there is no such layer or step; the message lists those that exist.
    """
    if not isinstance(layer, str):
        raise ValueError(
            f"token_routes({layer!r}): a layer is a name or a part of one, as in token_routes('block1', 2)"
        )
    load = trace.expert_load
    names = [name for name in load.sent if layer in name]
    exact = [name for name in names if name in (layer, f"{layer}.mlp.experts")]
    if not names or (layer and len(names) > 1 and not exact):
        raise ValueError(
            f"token_routes({layer!r}): {'several layers are' if names else 'no layer is'} called so; the layers with "
            f"experts are {', '.join(load.sent)}"
        )
    name = (exact or names)[0]
    sent = load.sent[name]
    if not -len(sent) <= step < len(sent):
        raise ValueError(f"token_routes(step={step}): the trace has {len(sent)} steps, 0 to {len(sent) - 1}")
    mesh, columns = mesh_of(trace.meta, trace.world_size), sent.shape[2]
    counted = [int(rank) for rank in np.flatnonzero(sent.sum(axis=(0, 2)))]
    groups = {rank: (rank,) if mesh is None or mesh.ep == 1 else mesh.group(rank, "ep") for rank in counted}
    ranks = tuple(sorted({rank for group in groups.values() for rank in group}))
    owners = tuple(
        tuple(group[place * len(group) // columns] for place in range(columns))
        for group in (groups.get(rank, (rank,)) for rank in ranks)
    )
    number = load.first + step % len(sent)
    return TokenRoutes(name, number, ranks, sent[step][list(ranks)], owners)
