"""Where experts should be: DeepSeek's load balancer (EPLB), and what its placement would do to the rows of a run.

A router chooses *logical* experts; GPUs have slots for *physical* ones. There are more slots than experts, so that busy
experts get several, which share their rows evenly. For each layer, from the rows that its experts computed:

    replicate   each further slot goes to the expert whose copies have the most rows each
    pack        the heaviest slot first, each onto the least busy GPU that has room; all GPUs have as many
    keep        a layer stays as it is if the greedy packing is not better, which can be

A layer of experts takes as long as its busiest GPU, because all meet in the all-to-all. So the time of all layers
changes as the sum of their busiest GPUs' rows does.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.4 ("redundant experts"), and the
repository deepseek-ai/EPLB, of which this is the *global* policy, and whose name `phy2log` is. As there, loads are
float32. Of equal ones the first is taken, which that code leaves to torch's sort; apart from such ties the placements
are the same.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mpkit.common.display import DrawnResult
from mpkit.trace.expert_load import ExpertLoad, Rows

Indices = npt.NDArray[np.int64]


def place_experts(rows: npt.ArrayLike, replicas: int, gpus: int) -> Indices:
    """Return a placement in which GPUs are about equally busy: phy2log, [R], the logical expert of each slot.

    GPU g of n has the slots g R/n to (g + 1) R/n - 1. `rows`, [E], counts each expert's; `replicas` is R, at least E
    and a multiple of `gpus`.

    >>> place_experts([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], 16, gpus=8).tolist()
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1]
    """
    load = np.asarray(rows, dtype=np.float32)
    # ---- replicate
    expert_of, copies = list(range(len(load))), np.ones(len(load), dtype=np.float32)
    for _ in range(replicas - len(load)):
        busiest = int(np.argmax(load / copies))
        expert_of.append(busiest)
        copies[busiest] += 1
    phy2log: Indices = np.array(expert_of)
    if gpus == replicas:
        return phy2log
    # ---- pack
    weights = (load / copies)[phy2log]
    packed: list[list[int]] = [[] for _ in range(gpus)]
    total = np.zeros(gpus, dtype=np.float32)
    for slot in np.argsort(-weights, kind="stable").tolist():
        open_gpus = (gpu for gpu in range(gpus) if len(packed[gpu]) < replicas // gpus)
        least = min(open_gpus, key=total.__getitem__)
        packed[least].append(slot)
        total[least] += weights[slot]
    return np.asarray(phy2log[np.ravel(packed)])


@dataclass(frozen=True, eq=False)
class LayerBalance:
    """One layer's experts on GPUs."""

    name: str
    rows: Rows  # [E]: the rows of each expert
    phy2log: Indices  # [R]: the expert of each slot; a GPU has R / gpus neighbouring slots
    gpus: int

    @property
    def copies(self) -> Indices:
        """[E]: how many slots hold each expert."""
        return np.bincount(self.phy2log, minlength=len(self.rows))

    @property
    def held_before(self) -> list[Indices]:
        """The experts that each GPU holds now: neighbours in the run's order share a GPU."""
        experts = np.arange(len(self.rows))
        return [experts[experts * self.gpus // len(experts) == gpu] for gpu in range(self.gpus)]

    @property
    def load_before(self) -> Rows:
        """[gpus]: the rows of each GPU with the run's placement."""
        return np.array([self.rows[held].sum() for held in self.held_before], dtype=np.float64)

    @property
    def load_after(self) -> Rows:
        """[gpus]: the rows of each GPU, whose slots have even shares of their experts' rows."""
        loads: Rows = (self.rows / self.copies)[self.phy2log].reshape(self.gpus, -1).sum(axis=1)
        return loads

    @property
    def moves(self) -> int:
        """How many experts' weights GPUs receive because they did not have them."""
        after = self.phy2log.reshape(self.gpus, -1)
        return sum(len(np.setdiff1d(new, old)) for new, old in zip(after, self.held_before, strict=True))


@dataclass(frozen=True, eq=False)
class ExpertBalance(DrawnResult):
    """A placement of experts; it prints as a table, and shows itself as the loads of GPUs before and after.

    >>> load = ExpertLoad({"block0": np.array([[[9.0, 1.0, 1.0, 1.0]]])}, first=0)
    >>> balance = load.balance(6, gpus=2)
    >>> balance.layers[0].phy2log.tolist(), balance.imbalance
    ([0, 0, 3, 0, 1, 2], {'block0': (1.6666666666666667, 1.1666666666666667)})
    >>> balance.time_ratio
    0.7
    """

    layers: tuple[LayerBalance, ...]
    step: int  # the number of the step whose rows these are

    @property
    def imbalance(self) -> dict[str, tuple[float, float]]:
        """The rows of the busiest GPU divided by their mean, before and after, by layer."""
        found = {}
        for each in self.layers:
            mean = max(float(each.load_before.mean()), 1e-300)
            found[each.name] = float(each.load_before.max()) / mean, float(each.load_after.max()) / mean
        return found

    @property
    def time_ratio(self) -> float:
        """The predicted time of a step's experts, divided by what it was: the busiest GPUs' rows, summed over layers.

        Assumed: time grows with rows, all layers' experts have one size, each copy of an expert gets as many rows, and
        routers choose as in this step. Not counted: moving the weights, and what training with copies sends.
        """
        before = sum(float(each.load_before.max()) for each in self.layers)
        return sum(float(each.load_after.max()) for each in self.layers) / max(before, 1e-300)

    @property
    def moves(self) -> int:
        """How many experts' weights GPUs receive, in all layers."""
        return sum(each.moves for each in self.layers)

    __repr__ = DrawnResult.__str__


def balance_load(load: ExpertLoad, replicas: int, gpus: int) -> ExpertBalance:
    """Return what `ExpertLoad.balance` describes."""
    layers: list[LayerBalance] = []
    for name, steps in load.rows.items():
        rows, experts = steps[-1], steps.shape[1]
        if not 1 <= gpus <= experts:
            raise ValueError(
                f"balance(gpus={gpus}): the {experts} experts of {name} are divided over 1 to {experts} GPUs"
            )
        if replicas < experts or replicas % gpus:
            least = gpus * -(-max(replicas, experts) // gpus)
            raise ValueError(
                f"balance(replicas={replicas}, gpus={gpus}): each of {experts} experts needs a slot, and GPUs have as "
                f"many each; replicas={least} would work"
            )
        layer = LayerBalance(name, rows, place_experts(rows, replicas, gpus), gpus)
        if layer.load_after.max() >= layer.load_before.max():
            kept = [np.resize(here, replicas // gpus) for here in layer.held_before]
            layer = replace(layer, phy2log=np.concatenate(kept))
        layers.append(layer)
    return ExpertBalance(tuple(layers), load.first + len(next(iter(load.rows.values()))) - 1)
