"""The pipeline runtime: one rank executes its row of a schedule, whichever schedule it is.

A step goes through these phases:

    split     the batch into micro-batches
    execute   the row's actions, in order:
                  F        forward of a micro-batch through a stage; the last stage computes its loss too
                  B        backward, after a forward anew if activations are recomputed
                  RECV_F, RECV_B   post the receive of a stage's input, or of its output's gradient
                  SEND_F, SEND_B   send a stage's output on, or its input's gradient back
    drain     until what was sent has left

Sends and receives are asynchronous. A receive is waited for by the F or B that needs it, a send when more than
p of them are under way, which bounds the memory that they hold. Serial training is the case of one stage, naive
model parallelism that of one micro-batch.

The loss of a micro-batch of n samples out of N counts n/N, so that the sum over micro-batches is the mean over
the batch, and its gradient the batch's gradient, also if they are not of one size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.parallel.job import Boundary, TrainJob
from mpkit.parallel.microbatch import Value, batch_size, leaves, map_tensors, part, signature, split
from mpkit.parallel.stage import RandomState, Stage
from mpkit.record.saved import Saved, saving
from mpkit.schedule import Action, build, lower
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.wire import Work

__all__ = ["Pipeline"]


@dataclass
class MicroBatch:
    """A part of the batch, on the CPU."""

    inputs: Value
    targets: Value
    key: Hashable  # its signature
    weight: float  # its share of the batch


@dataclass
class Kept:
    """What a forward leaves for its backward."""

    inputs: Value
    outputs: tuple[Tensor, ...]  # empty if they are recomputed
    saved: Saved | None
    random: RandomState | None  # at the beginning of the forward, if it is recomputed


class Pipeline:
    """One rank's half of every message, and its stages' forwards and backwards.

    Args:
        context: of this rank.
        job: what to train, and how.
        stages: those that this rank holds, by number.
    """

    def __init__(self, context: Context, job: TrainJob, stages: dict[int, Stage]) -> None:
        self.comm, self.record, self.device = context.comm, context.record, context.device
        self.job, self.stages = job, stages
        schedule = lower(build(job.plan))
        self.row = schedule.rows[context.rank]
        self.rank_of = schedule.stage_to_rank
        self.last = schedule.stages - 1
        self.recompute = job.plan.recompute == "full"
        self._do = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send_output,
            "RECV_F": self._receive_input,
            "SEND_B": self._send_gradient,
            "RECV_B": self._receive_gradient,
        }
        # What is under way, by (stage, micro-batch); all empty between steps.
        self._inputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._gradients: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._arriving: dict[tuple[str, int, int], list[Work]] = {}
        self._outgoing: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._sent: deque[Work] = deque()
        self._loss: Tensor | None = None

    def step(self, inputs: Value, targets: Value) -> float | None:
        """Forward and backward of a batch; gradients are added to the parameters'.

        Returns:
            The mean loss over the batch, on the rank that holds the last stage; None on the others.
        """
        self._split(inputs, targets)
        for action in self.row:
            self._do[action.kind](action)
        self._drain()
        loss, self._loss = self._loss, None
        return None if loss is None else loss.item()

    # ---- split --------------------------------------------------------------------------------------------

    def _split(self, inputs: Value, targets: Value) -> None:
        size = batch_size(inputs)
        self.microbatches = []
        for start, end in split(size, self.job.plan.microbatches):
            x, y = part(inputs, start, end), part(targets, start, end)
            self.microbatches.append(MicroBatch(x, y, signature(x, y), (end - start) / size))

    # ---- forward ------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        """F: the stage's output for its input; at the last stage, the loss."""
        s, m = action.stage, action.microbatch
        key = self.microbatches[m].key
        inputs = self._input(s, m)
        op = self._begin(Kind.FORWARD, action)
        if self.recompute:
            random = RandomState.now(self.device)
            with torch.no_grad():
                outputs = self._compute(s, m, inputs)
            self._kept[s, m] = Kept(inputs, (), None, random)
        else:
            with saving(self.record, s, key) as saved:
                outputs = self._compute(s, m, inputs)
            self._kept[s, m] = Kept(inputs, outputs, saved, None)
        self._track(outputs)
        self.record.end(op)
        if s == self.last:
            loss = outputs[0].detach()
            self._loss = loss if self._loss is None else self._loss + loss
        elif self.rank_of[s + 1] == self.rank_of[s]:
            self._inputs[s + 1, m] = self._as_input(s + 1, m, outputs)
        else:
            self._outgoing["F", s, m] = outputs

    def _input(self, s: int, m: int) -> Value:
        """The stage's input, on the device: of the data, or from the stage before, waited for if it has to come."""
        if s == 0:
            return self._to_device(self.microbatches[m].inputs)
        arriving = self._arriving.pop(("F", s, m), None)
        if arriving is not None:
            buffers = tuple(work.wait() for work in arriving)
            self._inputs[s, m] = self._as_input(s, m, buffers)
        return self.job.boundary(self.microbatches[m].key, s - 1).pack(self._inputs.pop((s, m)))

    def _as_input(self, s: int, m: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors without history, that collect a gradient where the stage before wants one."""
        boundary = self.job.boundary(self.microbatches[m].key, s - 1)
        pairs = zip(tensors, boundary.specs, strict=True)
        return tuple(tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs)

    def _compute(self, s: int, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """What the stage makes: its output's tensors, or the micro-batch's share of the loss."""
        microbatch = self.microbatches[m]
        output = self.stages[s](inputs)
        if s == self.last:
            loss = self.job.loss(output, self._to_device(microbatch.targets))
            return (loss * microbatch.weight,)
        expected, made = self.job.boundary(microbatch.key, s), Boundary.of(output)
        if made is None or made.shapes != expected.shapes:
            raise ValueError(
                f"stage {s} made {made or type(output).__name__} of micro-batch {m}, and {expected} of one of the "
                "same shape before: the shapes that go from stage to stage may depend on the shapes of the data, "
                "and not on its values. Plan.serial() has no stages to go between."
            )
        return (output,) if isinstance(output, Tensor) else output

    # ---- backward -----------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        """B: gradients of the stage's weights, and of its input."""
        s, m = action.stage, action.microbatch
        kept = self._kept.pop((s, m))
        if self.recompute:
            self._forward_again(action, kept)
        gradients = self._gradient(s, m)
        op = self._begin(Kind.BACKWARD, action)
        wanted = [output for output in kept.outputs if output.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, gradients)
        if kept.saved is not None:
            kept.saved.release()
        self.record.end(op)
        if s > 0:
            self._pass_back(s, m, kept.inputs)

    def _forward_again(self, action: Action, kept: Kept) -> None:
        """Recompute what the forward did not keep; before the gradient is waited for, since it needs none of it."""
        s, m = action.stage, action.microbatch
        assert kept.random is not None
        key = self.microbatches[m].key
        op = self._begin(Kind.RECOMPUTE, action)
        again, spare = kept.random.again(self.device), self.stages[s].spare_buffers()
        with again, spare, saving(self.record, s, key) as kept.saved:
            kept.outputs = self._compute(s, m, kept.inputs)
        self._track(kept.outputs)
        self.record.end(op)

    def _gradient(self, s: int, m: int) -> tuple[Tensor, ...] | None:
        """The gradients of the stage's output; None for the loss, whose gradient is 1."""
        if s == self.last:
            return None
        arriving = self._arriving.pop(("B", s, m), None)
        if arriving is not None:
            return tuple(work.wait() for work in arriving)
        return self._gradients.pop((s, m))

    def _pass_back(self, s: int, m: int, inputs: Value) -> None:
        """The gradients of the stage's input, to the stage before."""
        found = []
        for tensor in leaves(inputs):
            if tensor.requires_grad:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        gradients = tuple(found)
        self._track(gradients)
        if self.rank_of[s - 1] == self.rank_of[s]:
            self._gradients[s - 1, m] = gradients
        else:
            self._outgoing["B", s, m] = gradients

    # ---- send and receive ---------------------------------------------------------------------------------

    def _send_output(self, action: Action) -> None:
        """SEND_F: the stage's output, to the next stage."""
        self._send("F", action, to=action.stage + 1)

    def _send_gradient(self, action: Action) -> None:
        """SEND_B: the gradient of the stage's input, to the stage before."""
        self._send("B", action, to=action.stage - 1)

    def _receive_input(self, action: Action) -> None:
        """RECV_F: a buffer for the stage's input."""
        s, m = action.stage, action.microbatch
        boundary = self.job.boundary(self.microbatches[m].key, s - 1)
        self._receive("F", action, self._buffers(boundary), source=s - 1)

    def _receive_gradient(self, action: Action) -> None:
        """RECV_B: a buffer for the gradient of the stage's output, as far as it has one."""
        s, m = action.stage, action.microbatch
        boundary = self.job.boundary(self.microbatches[m].key, s)
        self._receive("B", action, self._buffers(boundary, gradients=True), source=s + 1)

    def _buffers(self, boundary: Boundary, *, gradients: bool = False) -> list[Tensor]:
        specs = [spec for spec in boundary.specs if spec.requires_grad or not gradients]
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]

    def _send(self, way: str, action: Action, to: int) -> None:
        tensors = self._outgoing.pop((way, action.stage, action.microbatch))
        for i, tensor in enumerate(tensors):
            self._sent.append(self.comm.isend(tensor, self.rank_of[to], self._tag(way, to, action, i)))
        while len(self._sent) > self.job.plan.pp:
            self._sent.popleft().wait()

    def _receive(self, way: str, action: Action, buffers: list[Tensor], source: int) -> None:
        self._track(tuple(buffers))
        self._arriving[way, action.stage, action.microbatch] = [
            self.comm.irecv(buffer, self.rank_of[source], self._tag(way, action.stage, action, i))
            for i, buffer in enumerate(buffers)
        ]

    def _tag(self, way: str, receiver: int, action: Action, i: int) -> str:
        """What both ends call the i-th tensor of a message: the way and the micro-batch, such as F3.

        Where two ranks have several stages between them, or a message several tensors, the number goes on.
        """
        local = self.rank_of[:receiver].count(self.rank_of[receiver])
        held = self.rank_of.count(self.rank_of[receiver])
        return f"{way}{action.microbatch + len(self.microbatches) * (local + held * i)}"

    # ---- drain --------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._sent:
            self._sent.popleft().wait()
        assert not (self._kept or self._arriving or self._outgoing or self._inputs or self._gradients)

    # ---- record and device -------------------------------------------------------------------------------------------

    def _begin(self, kind: Kind, action: Action) -> int:
        s, m = action.stage, action.microbatch
        flops = self.job.flops(self.microbatches[m].key, s)
        done, moved = flops.forward, flops.forward_bytes
        if kind == Kind.BACKWARD:
            done, moved = flops.backward, flops.backward_bytes
        return self.record.begin(kind, str(action), stage=s, microbatch=m, flops=done, nbytes=moved)

    def _to_device(self, value: Value) -> Value:
        """A copy on the device, which a layer may write into."""
        host = self.device.type == "cpu"
        op = (
            -1
            if host
            else self.record.begin(Kind.COPY_TO_DEVICE, nbytes=sum(t.nbytes for t in leaves(value)))
        )
        copied = map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
        if not host:
            self.record.end(op)
        self._track(tuple(leaves(copied)))
        return copied

    def _track(self, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            self.record.ledger.track(tensor, "activations")
