"""Profile: measure a model's step on this machine once, and predict any plan before it runs.

    measure     training on this machine: serially, with micro-batches of three sizes, and in two stages whose backward
                is split; seconds of CPU that the whole model's forward, backward and update take, by kind of action
    beside      the same in two replicas at once, and collectives between two busy ranks: `busy_ranks`
    count       the same plans played on tensors without content (`mk.trace_fake`): what the roofline of an assumed
                core makes of these actions
    factor      measured / counted of the whole model, by kind, for a micro-batch of the plan's size
    predict     the plan is played, its actions take the factor times what is counted, and the replay adds
                communication: over the loopback link, each rank on a core of its own, or as between busy ranks
    share       actions take longer in proportion to the time in which other ranks compute, and on the measured clock to
                the time in which communication takes a core from them

So the plan's own code says which operators and messages there are, and this machine says how fast it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.api.borrowed_cluster import lent_of_any_size
from mpkit.api.cluster import Cluster
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.link import Link
from mpkit.experiments.busy_ranks import measure_link, overlapped
from mpkit.experiments.factors import HALVES, LIKE, WHOLE, kinds_of, scaled
from mpkit.experiments.played_training import PlayedTraining, first_samples
from mpkit.plan.plan import Plan
from mpkit.support.cores import cores
from mpkit.support.tracebacks import public
from mpkit.support.units import seconds
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind

if TYPE_CHECKING:
    import torch

__all__ = ["Profile", "profile"]

STEPS = 3  # of which the first warms up
SERIAL, SPLIT = Plan.serial(), Plan(pp=2, schedule="zb_h1", microbatches=4)  # whole and split backwards
TRIALS = {
    SERIAL: (2, 8, 16),
    SPLIT: (2, 4),
}  # plans to measure, with the numbers by which the batch is divided
REPLICAS = Plan.ddp(2)


@dataclass(frozen=True)
class Profile:
    """What a model's step takes on this machine; `predict` says what a plan would take.

    Attributes:
        measured: seconds that the whole model's action takes, by kind and by samples in the micro-batch.
        samples: samples of the batch that plans divide.
        whole: why a split backward could not be measured; "" where it was.
        beside: how many times as long an action takes while the other rank computes, by kind; 1 where not measured.
        link: messages and collectives between two ranks that both compute.
        taken: cores that a rank's collective keeps busy.
    """

    measured: Mapping[Kind, Mapping[int, float]]
    samples: int
    whole: str
    beside: Mapping[Kind, float]
    link: Link
    taken: float
    _played: PlayedTraining = field(repr=False, compare=False)
    _counted: dict[tuple[Kind, int], float] = field(default_factory=dict, repr=False, compare=False)

    def predict(self, plan: Plan, *, clock: str = "virtual", cluster: Cluster | None = None) -> Timeline:
        """Return the predicted step of a plan.

        Args:
            plan: any plan for CPU ranks.
            clock: "virtual": each rank on a core of its own, as in `Run.timeline`. "measured": as long as a step takes
                on this machine's clock, whose cores also copy what ranks send.
            cluster: any cluster, whose helper process to use; None: start one.

        Raises:
            ValueError: the plan does not fit the model or the batch; there is no such clock; or the plan splits the
                backward, and the model's could not be measured so (`whole` says why).
        """
        if clock not in ("virtual", "measured"):
            raise ValueError(f"clock={clock!r}: a profile predicts clock='virtual' or clock='measured'")
        # ---- count and factor
        counted = self._played.trace(plan, cluster=cluster)
        samples = max(1, round(self.samples / (plan.dp * plan.microbatches)))
        kinds = kinds_of(counted)
        factors = {kind: self._factor(LIKE.get(kind, kind), samples, cluster) for kind in kinds}
        trace = scaled(counted, lambda rank, kind, ops: factors[kind], kinds)
        # ---- share
        hardware = None if clock == "virtual" else replace(find("cpu"), name="cpu-busy", link=self.link)
        alone = Timeline.of(trace, hardware)
        others = overlapped(alone, kinds, comm=False)
        taken = self.taken if clock == "measured" and plan.ranks >= cores() else 0.0
        copies = overlapped(alone, kinds, comm=True) if taken else {}

        def shared(rank: int, kind: Kind, ops: Any) -> float:
            beside = self.beside.get(LIKE.get(kind, kind), 1.0)
            return (1 + (beside - 1) * others.get((rank, kind), 0.0)) * (
                1 + taken * copies.get((rank, kind), 0.0)
            )

        return Timeline.of(scaled(trace, shared, kinds), hardware)

    def _factor(self, kind: Kind, samples: int, cluster: Cluster | None) -> float:
        """Return how much longer an action takes here than counted, for micro-batches of so many samples."""
        if kind not in self.measured:
            raise ValueError(
                f"this plan splits the backward in two, which could not be measured: {self.whole}. Schedules whose "
                "backward is whole can be predicted: mk.Plan(pp=2, schedule='1f1b', microbatches=4)"
            )
        if (kind, samples) not in self._counted:
            plan = SPLIT if kind in HALVES else SERIAL
            size = samples * plan.microbatches
            counted = _whole_model(Timeline.of(self._played.trace(plan, samples=size, cluster=cluster)))
            self._counted.update({(each, samples): time for each, time in counted.items()})
        return self.seconds(kind, samples) / self._counted[kind, samples]

    def seconds(self, kind: Kind, samples: int) -> float:
        """Return the seconds of the whole model's action for a micro-batch of so many samples.

        Between the sizes that were measured it is on the line between them, beyond the largest in proportion. An update
        does not depend on samples.
        """
        times = self.measured[kind]
        if kind == Kind.OPTIMIZER:
            return median(times.values())
        sizes = sorted(times)
        between = float(np.interp(samples, sizes, [times[size] for size in sizes]))
        return between * max(1.0, samples / sizes[-1])

    def __str__(self) -> str:
        lines = ["measured on one core of this machine, by samples of a micro-batch:"]
        for kind, times in self.measured.items():
            parts = ", ".join(f"{size}: {seconds(time)}" for size, time in sorted(times.items()))
            ratio = f"; beside another rank x {self.beside[kind]:.2f}" if kind in self.beside else ""
            lines.append(f"  {Kind(kind).name.lower().replace('_', ' '):<12} {parts}{ratio}")
        message, rate = seconds(self.link.latency), self.link.rate(Kind.ALL_REDUCE) / 1e9
        lines.append(
            f"between two busy ranks a message waits {message}, and all-reduces reach {rate:.3g} GB/s"
        )
        return "\n".join(lines)


@public
def profile(
    model: torch.nn.Module, data: Any, *, loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer], cluster: Cluster | None = None,
) -> Profile:  # fmt: skip
    """Measure a model's training step on this machine, to predict plans from it.

    Args:
        model, loss, optimizer: as for `Cluster.train`.
        data: a batch (inputs, targets), or a sequence of which the first is taken, as for `Cluster.train`.
        cluster: any cluster, whose helper process to use; None: start one.

    Raises:
        ValueError: as for `Cluster.train`; or the data are neither.

    >>> import torch, mpkit as mk
    >>> from mpkit.data.datasets import spirals
    >>> found = mk.profile(
    ...     mk.models.MLP(2, 3), spirals(32, 1), loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> 0.05 < found.predict(mk.Plan.gpipe(2, 4)).bubble < 0.5
    True
    """
    batch = _batch_of(data)
    samples = _samples(batch)
    played = PlayedTraining(model, batch, loss=loss, optimizer=optimizer)
    measured: dict[Kind, dict[int, float]] = {}
    beside: dict[Kind, float] = {}
    with lent_of_any_size(cluster.resized if cluster is not None else None, "cpu") as clusters:

        def trial(plan: Plan, size: int) -> dict[Kind, float]:
            run = clusters(plan.ranks).train(
                model,
                [first_samples(size, batch)],
                plan,
                loss=loss,
                optimizer=optimizer,
                steps=STEPS,
                show=False,
            )
            return _whole_model(run.wait().timeline(clock="virtual"))

        def sizes(plan: Plan) -> list[int]:
            return sorted({max(plan.microbatches, samples // part) for part in TRIALS[plan]})

        # ---- measure
        for size in sizes(SERIAL):
            for kind, time in trial(SERIAL, size).items():
                measured.setdefault(kind, {})[size] = time
        # ---- beside
        if half := samples // 2:
            both = trial(REPLICAS, 2 * half)
            beside = {kind: max(1.0, both[kind] / REPLICAS.ranks / measured[kind][half]) for kind in WHOLE}
            beside |= dict.fromkeys(HALVES, beside[Kind.BACKWARD])
        link, taken = measure_link(clusters(2))
        whole = _measure_halves(trial, sizes(SPLIT), measured)
    return Profile(measured, samples, whole, beside, link, taken, played)


def _measure_halves(
    trial: Callable[[Plan, int], dict[Kind, float]], sizes: list[int], measured: dict[Kind, dict[int, float]]
) -> str:
    """Add the halves of a split backward; return why they cannot be measured, "" where they can."""
    try:
        for size in sizes:
            found = trial(SPLIT, size)
            for kind in HALVES:
                measured.setdefault(kind, {})[size // SPLIT.microbatches] = found[kind]
    except ValueError as error:
        return str(error)  # what `predict` says if it is asked for such a plan
    return ""


def _whole_model(timeline: Timeline) -> dict[Kind, float]:
    """Return the seconds of each kind of action of the whole model: medians after the first step, summed over ranks."""
    spans = timeline.spans[timeline.spans["depth"] == 0]
    if len(timeline.steps) > 1:
        spans = spans[spans["step"] > timeline.steps[0]]
    found: dict[Kind, float] = {}
    for rank in sorted(set(spans["rank"].tolist())):
        for kind in (*WHOLE, *HALVES):
            mine = spans[(spans["rank"] == rank) & (spans["kind"] == kind)]
            if len(mine):
                found[kind] = found.get(kind, 0.0) + float(np.median(mine["end"] - mine["start"]))
    return found


def _batch_of(data: Any) -> tuple[Any, Any]:
    """Return the first batch.

    Raises:
        ValueError: there is none.
    """
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list):
        return data
    try:
        inputs, targets = next(iter(data))
    except (TypeError, ValueError, StopIteration):
        raise ValueError(
            f"profile(model, {type(data).__name__}): give a batch, (inputs, targets), or a sequence of batches: "
            "mk.profile(model, [(x, y)], loss=..., optimizer=...)"
        ) from None
    return inputs, targets


def _samples(batch: tuple[Any, Any]) -> int:
    from torch.utils._pytree import tree_leaves

    return next(int(leaf.shape[0]) for leaf in tree_leaves(batch) if hasattr(leaf, "shape"))
