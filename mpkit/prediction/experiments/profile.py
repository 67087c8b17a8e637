"""Profile: measure a model's step on this machine once, and predict any plan before it runs.

    measure     training on this machine: serially, with micro-batches of three sizes, and in two stages whose backward
                is split; seconds of CPU that the whole model's forward, backward and update take, by kind of action
    beside      the same in two replicas at once, and collectives between two busy ranks: `measured_times`
    start       what an operator takes beside its arithmetic, from micro-batches of two sizes
    count       the same plans played on tensors without content (`mk.trace_fake`): what the roofline of an assumed
                core, and starting each operator, makes of these actions
    factor      measured / counted of the whole model, by kind, for a micro-batch of the plan's size
    predict     the plan is played, its actions take the factor times what is counted, and the replay adds
                communication: over the loopback link, each rank on a core of its own, or as between busy ranks
    share       actions take longer in proportion to the time in which other ranks compute, and on the measured clock to
                the time in which communication takes a core from them

So the plan's own code says which operators and messages there are, and this machine says how fast it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.this_process import cores
from mpkit.common.tracebacks import public
from mpkit.common.units import seconds
from mpkit.devices.catalogue import hardware as find
from mpkit.launch.session.cluster import Cluster, borrow_clusters
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ZB_H1
from mpkit.prediction.experiments.factors import (
    HALVES,
    LIKE,
    WHOLE,
    PlayedTraining,
    first_samples,
    kinds_of,
    scale_trace,
    with_starts,
)
from mpkit.prediction.experiments.measured_times import (
    BusyRanks,
    action_times,
    measure_busy,
    overlapped_share,
    whole_model,
)
from mpkit.timeline.answer import PROFILED
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Trace

if TYPE_CHECKING:
    import torch

    from mpkit.launch.session.run import Run

__all__ = ["Profile", "profile"]

SERIAL, SPLIT = Plan.serial(), Plan(pp=2, schedule=ZB_H1, microbatches=4)  # whole and split backwards
TRIALS = {
    SERIAL: (2, 8, 16),
    SPLIT: (2, 4),
}  # plans to measure, with the numbers by which the batch is divided
REPLICAS = Plan.ddp(2)
Trial = Callable[[Plan, Sequence[int], Collection[Kind]], Mapping[int, Mapping[Kind, float]]]
"""Trains under a plan on batches of so many samples; returns seconds of the whole model's actions of each kind."""


@dataclass(frozen=True)
class Profile:
    """What a model's step takes on this machine; `predict` says what a plan would take.

    Attributes:
        measured: seconds that the whole model's action takes, by kind and by samples in the micro-batch.
        samples: samples of the batch that plans divide.
        whole: why a split backward could not be measured; "" where it was.
        beside: how many times as long an action takes while the other rank computes, by kind; 1 where not measured.
        busy: what ranks that both compute take from each other.
        start: seconds to start an operator, on the scale of the assumed core.
    """

    measured: Mapping[Kind, Mapping[int, float]]
    samples: int
    whole: str
    beside: Mapping[Kind, float]
    busy: BusyRanks
    start: float
    _played: PlayedTraining = field(repr=False, compare=False)
    _train: Callable[[Plan, Cluster, int], Run] = field(repr=False, compare=False)
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
        counted = with_starts(self._played.trace(plan, cluster=cluster), self.start)
        samples = max(1, round(self.samples / (plan.dp * plan.microbatches)))
        kinds = kinds_of(counted)
        factors = {kind: self._factor(LIKE.get(kind, kind), samples, cluster) for kind in kinds}
        trace = scale_trace(
            counted, lambda rank, kind, ops: factors[kind], kinds, issued=self.busy.issue_seconds
        )
        # ---- share
        hardware = None if clock == "virtual" else replace(find("cpu"), name="cpu-busy", link=self.busy.link)
        alone = Timeline.of(trace, hardware)
        others = overlapped_share(alone, kinds, comm=False)
        taken = self.busy.taken if clock == "measured" and plan.ranks >= cores() else 0.0
        copies = overlapped_share(alone, kinds, comm=True) if taken else {}

        def slow_down(rank: int, kind: Kind, ops: Any) -> float:
            beside = self.beside.get(LIKE.get(kind, kind), 1.0)
            return (1 + (beside - 1) * others.get((rank, kind), 0.0)) * (
                1 + taken * copies.get((rank, kind), 0.0)
            )

        return replace(Timeline.of(scale_trace(trace, slow_down, kinds), hardware), basis=PROFILED)

    def train(self, plan: Plan, cluster: Cluster, *, steps: int) -> Run:
        """Start a training of the profiled model on its batch, to compare a prediction with it.

        Raises:
            ValueError: as for `Cluster.train`.
        """
        return self._train(plan, cluster, steps)

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
            trace = with_starts(self._played.trace(plan, samples=size, cluster=cluster), self.start)
            counted = whole_model(Timeline.of(trace), (*WHOLE, *HALVES))
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
        message, rate = seconds(self.busy.link.latency), self.busy.link.rate(Kind.ALL_REDUCE) / 1e9
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
    >>> from mpkit.strategies.data.datasets import spirals
    >>> found = mk.profile(
    ...     mk.models.MLP(2, 3), spirals(32, 1), loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> 0.05 < found.predict(mk.Plan.gpipe(2, 4)).bubble < 0.5
    True
    """
    batch = _batch_of(data)
    samples = _samples(batch)
    played = PlayedTraining(model, batch, loss=loss, optimizer=optimizer)

    def train(plan: Plan, on: Cluster, steps: int) -> Run:
        return on.train(model, [batch], plan, loss=loss, optimizer=optimizer, steps=steps, show=False)

    with borrow_clusters(cluster.resized if cluster is not None else None, "cpu") as clusters:

        def trial(plan: Plan, sizes: Sequence[int], kinds: Collection[Kind]) -> dict[int, dict[Kind, float]]:
            def on_batches(turns: Sequence[int]) -> Timeline:
                run = clusters(plan.ranks).train(
                    model, [first_samples(size, batch) for size in turns], plan, loss=loss, optimizer=optimizer,
                    steps=len(turns), show=False,
                )  # fmt: skip
                return run.wait().timeline(clock="virtual")

            return action_times(on_batches, sizes, kinds)

        measured, whole = _measure_kinds(trial, samples)
        beside = _slowdown_beside(trial, samples, measured)
        busy = measure_busy(clusters(2))
        start = _start(lambda size: played.trace(SERIAL, samples=size, cluster=cluster), measured)
    return Profile(measured, samples, whole, beside, busy, start, played, train)


def _measure_kinds(trial: Trial, samples: int) -> tuple[dict[Kind, dict[int, float]], str]:
    """Return the seconds of the whole model by kind and size, and why a split backward could not be measured."""
    measured: dict[Kind, dict[int, float]] = {}
    whole = ""
    for plan, parts in TRIALS.items():
        sizes = sorted({max(plan.microbatches, samples // part) for part in parts})
        kinds = HALVES if plan is SPLIT else WHOLE
        try:
            found = trial(plan, sizes, kinds)
        except ValueError as error:
            if plan is not SPLIT:
                raise
            whole = str(error)  # what `predict` says if it is asked for such a plan
            continue
        for size, times in found.items():
            for kind in kinds:
                measured.setdefault(kind, {})[size // plan.microbatches] = times[kind]
    return measured, whole


def _slowdown_beside(
    trial: Trial, samples: int, measured: Mapping[Kind, Mapping[int, float]]
) -> dict[Kind, float]:
    """Return how many times as long actions take while another rank computes; nothing for a batch of one sample."""
    half = samples // 2
    if not half:
        return {}
    both = trial(REPLICAS, [2 * half], WHOLE)[2 * half]
    beside = {kind: max(1.0, both[kind] / REPLICAS.ranks / measured[kind][half]) for kind in WHOLE}
    return beside | dict.fromkeys(HALVES, beside[Kind.BACKWARD])


def _start(played: Callable[[int], Trace], measured: Mapping[Kind, Mapping[int, float]]) -> float:
    """Return the seconds to start an operator.

    Forward and backward of two sizes take f (N start + R), where N operators take R by the roofline: two equations for
    f and the start. A start that the measurements do not show is 0.
    """
    small, large = min(measured[Kind.FORWARD]), max(measured[Kind.FORWARD])
    if small == large:
        return 0.0

    def both(trace: Trace) -> float:
        found = whole_model(Timeline.of(trace), (*WHOLE, *HALVES))
        return found[Kind.FORWARD] + found[Kind.BACKWARD]

    took = {size: measured[Kind.FORWARD][size] + measured[Kind.BACKWARD][size] for size in (small, large)}
    counted = {size: played(size) for size in (small, large)}
    roofline = {size: both(trace) for size, trace in counted.items()}
    operators = both(with_starts(counted[small], 1.0)) - roofline[small]
    f = (took[large] - took[small]) / (roofline[large] - roofline[small])
    if f <= 0:
        return took[small] / operators  # the larger one takes no longer: starting is all there is
    return max(0.0, (took[small] / f - roofline[small]) / operators)


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
    from mpkit.common.torch_private import tree_leaves

    return next(int(leaf.shape[0]) for leaf in tree_leaves(batch) if hasattr(leaf, "shape"))
