"""DeepSeek's expert-parallel load balancer (EPLB): copies of busy experts, packed so that GPUs are equally busy.

A router chooses *logical* experts; GPUs have slots for *physical* ones. There are more slots than experts, so that busy
experts get several, which share their rows. For each layer:

    pack groups     groups of experts onto nodes, as many on each: a token visits few groups, so it visits few nodes
    replicate       within a node: each further slot goes to the expert whose copies have the most rows each
    pack replicas   within a node: slots onto GPUs, as many on each

Packing is greedy: the heaviest item first, each into the lightest pack that has room. If the groups cannot be divided
over the nodes, there is one group and one node: the *global* policy. Otherwise the policy is *hierarchical*.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.4 ("redundant experts"), and the
repository deepseek-ai/EPLB, whose names for the results these are. As there, loads are float32. Of equal ones the first
is taken, which that code leaves to torch's sort; apart from such ties the placements are the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["balance_experts"]

Loads = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def balance_experts(
    load: npt.ArrayLike, replicas: int, *, groups: int = 1, nodes: int = 1, gpus: int
) -> Indices:
    """Return a placement in which GPUs are about equally busy: phy2log, [layers, R], the logical expert of each slot.

    GPU g of n has the slots g R/n to (g + 1) R/n - 1.

    >>> load = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]]
    >>> balance_experts(load, 16, groups=4, nodes=2, gpus=8).tolist()  # the example of EPLB's README
    [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]]

    Args:
        load: [layers, E], the rows of each expert.
        replicas: R, the slots of all GPUs together, of which each has as many.
        groups: into how many groups of neighbours the router divides the experts; 1 if it does not.
        nodes: the machines. If they do not divide the groups, the policy is the global one.
        gpus: of all nodes together.

    Raises:
        ValueError: the numbers do not divide, there are fewer slots than experts, or a load is negative or infinite.
    """
    loads = np.asarray(load, dtype=np.float32)
    _check(loads, replicas, groups, nodes, gpus)
    if groups % nodes:
        groups = nodes = 1
    experts = loads.shape[1]
    phy2log = np.empty((len(loads), replicas), dtype=np.int64)
    for layer, rows in enumerate(loads):
        # ---- pack groups
        size, slot = experts // groups, 0
        of_group = np.arange(experts).reshape(groups, size)
        for packed in _pack(rows[of_group].sum(axis=1), nodes):
            here = of_group[packed].ravel()
            # ---- replicate
            copied, count = _replicate(rows[here], replicas // nodes)
            # ---- pack replicas
            order = np.ravel(_pack((rows[here] / count.astype(np.float32))[copied], gpus // nodes))
            phy2log[layer, slot : slot + len(order)] = here[copied[order]]
            slot += len(order)
    return phy2log


def _pack(weights: Loads, packs: int) -> list[list[int]]:
    """Return the items of each pack, as many in each, in the order in which they came."""
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    total = np.zeros(packs, dtype=np.float32)
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = min((pack for pack in range(packs) if len(packed[pack]) < room), key=total.__getitem__)
        packed[lightest].append(item)
        total[lightest] += weights[item]
    return packed


def _replicate(rows: Loads, slots: int) -> tuple[Indices, Indices]:
    """Return the expert of each slot, and the copies of each expert."""
    copied, count = list(range(len(rows))), np.ones(len(rows), dtype=np.int64)
    for _ in range(slots - len(rows)):
        busiest = int(np.argmax(rows / count.astype(np.float32)))
        copied.append(busiest)
        count[busiest] += 1
    return np.array(copied), count


def _check(loads: Loads, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    asked = f"replicas={replicas}, groups={groups}, nodes={nodes}, gpus={gpus}"
    if loads.ndim != 2 or not loads.size or not (np.isfinite(loads) & (loads >= 0)).all():
        raise ValueError(
            f"the load is [layers, experts], of finite numbers from 0 on; this one has the shape {list(loads.shape)}"
        )
    experts = loads.shape[1]
    if min(replicas, groups, nodes, gpus) < 1:
        raise ValueError(f"{asked}: each of them is at least 1")
    if gpus % nodes:
        raise ValueError(f"{asked}: each node has as many GPUs; gpus={nodes * -(-gpus // nodes)} would work")
    if replicas < experts or replicas % gpus:
        least = gpus * -(-max(replicas, experts) // gpus)
        raise ValueError(
            f"{asked}: each of {experts} experts needs a slot, and GPUs have as many each; replicas={least} would work"
        )
    if experts % groups:
        raise ValueError(
            f"{asked}: {experts} experts do not divide into {groups} groups; groups=1 would work"
        )
