"""DDP: every rank holds the whole model and a part of the batch; gradients are summed while the backward pass runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
`mpkit.strategies.reference.bucketed_ddp` is the whole algorithm. This module adds shares of unequal size,
micro-batches, parameters that get no gradient, frozen and tied parameters, and the state of BatchNorm.

    broadcast   at the start every rank takes the first replica's parameters and buffers
    buckets     gradients lie in buckets of `bucket_mb`, in reverse order of use: the last layer's arrive first
    reduce      as soon as a bucket is full, its sum over ranks starts, while the backward goes on (`reducer`)
    wait        the step waits for the sums that are still pending: communication that the backward could not hide

Each rank's loss is its share of the mean over the batch (`mpkit.strategies.runtime.pipeline`), so a sum over ranks is
correct even if shares differ in size. Ranks send nothing in the micro-batches before the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mpkit.strategies.replicas.buffers import BufferedSync, broadcast_tensors
from mpkit.strategies.replicas.flat import FlatLayout
from mpkit.strategies.replicas.part import ReplicatedPart
from mpkit.strategies.replicas.reducer import Reducer, WholeGradients
from mpkit.strategies.replicas.units import fill_buckets
from mpkit.strategies.stage.gradient_sync import Half


class DDP(BufferedSync):
    """Gradients summed over replicas, in buckets, while the backward pass runs."""

    reduction: str = "sum"

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        # ---- broadcast
        for replicas, tensors in held.by_replicas():
            broadcast_tensors(replicas, tensors)
        self.watch_buffers(held)
        # ---- buckets, but not for experts that no other rank holds: their gradients are complete after the backward
        shared = [
            p.parameter for p in reversed(self.pieces) if held.holders_of(p.parameter).replicas.size > 1
        ]
        tied = set(held.tied)
        of_one, of_several = [p for p in shared if p not in tied], [p for p in shared if p in tied]
        self._buckets: list[WholeGradients] = []
        for parameters, stage in ((of_one, 0), (of_several, None)):
            for bucket in fill_buckets(parameters, held.bucket_bytes, held.unit_kinds):
                layout, group = FlatLayout(bucket, 0, 1), held.holders_of(bucket[0]).replicas
                gradients = WholeGradients(layout, self._record, group, stage, reduction=self.reduction)
                self._buckets.append(gradients)
        self._reducer = Reducer(
            held.replicas, self._buckets, {piece.parameter: piece.name for piece in self.pieces},
            allows_unused=held.allows_unused, allow_unused=held.allow_unused,
        )  # fmt: skip

    def drop_gradients(self) -> None:
        """Drop all gradients; their memory stays."""
        super().drop_gradients()
        self._reducer.begin_step()

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce the gradients in a stage's last backward only."""
        with self._reducer.backward(last, half):
            yield

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all sums; drop those of parameters that no rank used."""
        unused = self._reducer.finish()
        for bucket in self._buckets:
            for parameter in bucket.zeroed & unused:
                parameter.grad = None
