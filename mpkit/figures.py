"""Figures: what a Timeline says in numbers, of the last step that all ranks completed."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit import metrics
from mpkit.trace import Lane

__all__ = ["Figures"]

Array = npt.NDArray[Any]


class Figures:
    """The figures of a timeline; a Timeline has them all."""

    spans: Array
    held: Array
    world_size: int
    meta: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that all ranks completed."""
        return metrics.steps(self.spans, self.world_size)

    @cached_property
    def _last(self) -> Array:
        """The spans of the last complete step; all, where there are no steps."""
        steps = self.steps
        return self.spans[self.spans["step"] == steps[-1]] if steps else self.spans

    @cached_property
    def makespan(self) -> float:
        """Seconds from the step's first action to the end of its last, over all ranks: what a bubble is a share of.

        Loading the step's data belongs to it: ranks are idle meanwhile.
        """
        start, end = metrics.extent(metrics.done(self._last))
        return end - start

    @property
    def step_time(self) -> float:
        """Seconds from the start of the step's first action, message or copy to the end of its last.

        A rank that waits for the step's first message while others finish the step before is not in this step yet.
        """
        start, end = metrics.extent(metrics.active(self._last))
        return end - start

    @property
    def busy(self) -> list[float]:
        """Seconds of work by rank."""
        return [float(b) for b in metrics.busy(self._last, self.world_size)]

    @property
    def idle(self) -> list[float]:
        """Seconds without work by rank, within the makespan."""
        makespan = self.makespan
        return [makespan - busy for busy in self.busy]

    @property
    def utilisation(self) -> list[float]:
        """The share of the makespan that each rank works."""
        makespan = self.makespan
        return [busy / makespan if makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle share of the makespan, averaged over ranks; 0 where nobody computes.

        This is GPipe's definition (Huang et al. 2019, section 2.3), by which p stages and m micro-batches have
        (p-1)/(m+p-1). Megatron's is `ideal_bubble`.
        """
        return 1.0 - sum(self.utilisation) / self.world_size if self.makespan else 0.0

    @property
    def ideal_bubble(self) -> float:
        """Idle time over work, averaged over ranks: (p-1)/m of GPipe (Narayanan et al. 2021, section 2.2)."""
        work = sum(self.busy)
        return sum(self.idle) / work if work else 0.0

    @property
    def comm_time(self) -> list[float]:
        """Seconds by rank in which at least one communication of it is under way."""
        return [metrics.length(metrics.covered(spans)) for spans in self._lanes(Lane.COMM)]

    @property
    def exposed_comm(self) -> list[float]:
        """Seconds by rank in which it communicates and does not compute meanwhile: what communication costs.

        An action that waits for communication in its middle (a BatchNorm's over all ranks) does not compute then.
        """
        return [
            metrics.exposed(comm, compute)
            for comm, compute in zip(self._lanes(Lane.COMM), self._lanes(Lane.COMPUTE), strict=True)
        ]

    @property
    def data_time(self) -> list[float]:
        """Seconds by rank in which it gets its share of the batch: reads and collates it, or waits for who does.

        What workers load while the rank computes is not in it.
        """
        return [metrics.length(metrics.covered(spans)) for spans in self._lanes(Lane.DATA)]

    @property
    def overlap(self) -> float:
        """The share of all communication time, summed over ranks, that is hidden behind compute; 1 where there is none.

        1 - exposed_comm / comm_time: what DDP's buckets are for (Li et al. 2020, section 3.2.3).
        """
        whole = sum(self.comm_time)
        return 1.0 - sum(self.exposed_comm) / whole if whole else 1.0

    @property
    def comm_bytes(self) -> list[dict[str, int]]:
        """Payload bytes by rank, by kind of communication; a message counts at both its ends."""
        return metrics.bytes_by_kind(self._last, self.world_size)

    @property
    def peak_memory(self) -> list[dict[str, int]]:
        """The most bytes held in the step, by rank: by category, each at its own peak, and of all as "total"."""
        return metrics.peak(self.held, metrics.extents(self._last, self.world_size))

    @property
    def peak_memory_of_run(self) -> list[dict[str, int]]:
        """`peak_memory`, of all steps and of what comes before and after them."""
        return metrics.peak(self.held, [(-np.inf, np.inf)] * self.world_size)

    def throughput(self, samples: int | None = None) -> float:
        """Samples a second; `samples` a step are those of the run's batch if not given.

        Raises:
            ValueError: nobody knows how many samples a step has.
        """
        samples = samples if samples is not None else self.meta.get("batch_size")
        if samples is None:
            raise ValueError(
                "This timeline does not know how many samples a step has: throughput(samples=32), say"
            )
        return samples / self.step_time if self.step_time else 0.0

    def _lanes(self, lane: Lane) -> list[Array]:
        spans = self._last
        spans = spans[spans["lane"] == lane]
        return [spans[spans["rank"] == rank] for rank in range(self.world_size)]
