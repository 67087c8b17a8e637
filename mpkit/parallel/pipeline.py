"""The pipeline runtime: one rank executes its row of a schedule, whichever schedule it is.

A step goes through these phases, on micro-batches that `mpkit.parallel.feed` gives:

    execute   the row's actions, in order:
                  F        forward of a micro-batch through a stage; the last stage computes its loss too
                  B        backward, after a forward anew if activations are recomputed
                  RECV_F, RECV_B   post the receive of a stage's input, or of its output's gradient
                  SEND_F, SEND_B   send a stage's output on, or its input's gradient back
    drain     until what was sent has left

Serial training is the case of one stage, naive model parallelism that of one micro-batch.

The loss of a micro-batch of k samples out of K counts k/K, so that the sum over micro-batches is the mean over
the batch, and its gradient the batch's gradient, also if they are not of one size. Where replicas share a batch
each is given its share of every micro-batch, and the sum goes over replicas too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpkit.parallel.feed import MicroBatch
from mpkit.parallel.job import Boundary, Route, TrainJob
from mpkit.parallel.mail import Mail
from mpkit.parallel.microbatch import Value, leaves, map_tensors
from mpkit.parallel.replica import Replica
from mpkit.parallel.stage import PRECISIONS, RandomState, cast
from mpkit.record.flops import Flops
from mpkit.record.saved import Saved, saving
from mpkit.schedule import Action, build, lower
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Pipeline"]


@dataclass
class Kept:
    """What a forward leaves for its backward."""

    inputs: Value
    outputs: tuple[Tensor, ...]  # empty if they are recomputed
    saved: Saved | None
    random: RandomState | None  # at the beginning of the forward, if it is recomputed


class Routes(NamedTuple):
    """The routes that end at a stage, and those that begin there."""

    arriving: list[Route]
    leaving: list[Route]


class Pipeline:
    """One rank's half of every message, and its stages' forwards and backwards.

    Args:
        context: of this rank.
        job: what to train, and how.
        replica: what this rank holds; told when gradients are about to come.

    Attributes:
        loss_scale: what gradients are multiplied by, for fp16 to show them.
    """

    def __init__(self, context: Context, job: TrainJob, replica: Replica) -> None:
        self.record, self.device = context.record, context.device
        self.job, self.replica, self.stages = job, replica, replica.stages
        schedule = lower(build(job.plan))
        place = job.plan.mesh.place(context.rank)
        self.row = schedule.rows[place.pp]
        self._last_backward = max((i for i, action in enumerate(self.row) if action.kind == "B"), default=-1)
        self._dtype = PRECISIONS.get(job.plan.precision)
        self.loss_scale = 1.0
        self.mail = Mail(context, schedule.stage_to_rank, schedule.microbatches)
        self.last = schedule.stages - 1
        self.recompute = job.plan.recompute == "full"
        self.microbatches: list[MicroBatch] = []
        self._kept: dict[tuple[int, int], Kept] = {}  # by stage and micro-batch
        self._loss: Tensor | None = None
        self._flops: dict[tuple[Hashable, int], Flops] = {}  # by signature and stage
        self._known_routes: dict[tuple[Hashable, int], Routes] = {}  # likewise

    @property
    def takes_data(self) -> bool:
        """Whether this rank needs inputs or targets: it holds the first stage or the last."""
        return not {0, self.last}.isdisjoint(self.stages)

    def step(self, microbatches: list[MicroBatch]) -> float | None:
        """Forward and backward of a batch; gradients are added to the parameters'.

        Args:
            microbatches: this rank's share of the batch.

        Returns:
            The mean loss over the batch, or this replica's share of it, on the rank that holds the last stage; None
            on the others.
        """
        self.microbatches = microbatches
        for i, action in enumerate(self.row):
            if action.kind == "B":
                self.replica.before_backward(last=i == self._last_backward)
            self._execute(action)
        self.mail.drain()
        loss, self._loss = self._loss, None
        return None if loss is None else loss.item()

    # ---- execute ------------------------------------------------------------------------------------------

    def _execute(self, action: Action) -> None:
        match action.kind:
            case "F":
                self._forward(action)
            case "B":
                self._backward(action)
            case "SEND_F":
                self.mail.send("F", self._routes(action).leaving, action.microbatch)
            case "SEND_B":
                self.mail.send("B", self._routes(action).arriving, action.microbatch)
            case "RECV_F":  # what the stages before made for this one
                self.mail.receive("F", self._routes(action).arriving, action.microbatch)
            case _:  # RECV_B: the gradient of the own outputs, as far as they have one
                self.mail.receive("B", self._routes(action).leaving, action.microbatch)

    def _routes(self, action: Action) -> Routes:
        """What comes to the action's stage and goes from it, for micro-batches of this one's shapes."""
        place = self.microbatches[action.microbatch].key, action.stage
        found = self._known_routes.get(place)
        if found is None:
            found = self._known_routes[place] = Routes(self.job.arriving(*place), self.job.leaving(*place))
        return found

    def _boundary(self, s: int, m: int) -> Boundary:
        """What crosses from stage s to the next for a micro-batch."""
        return self.job.boundary(self.microbatches[m].key, s)

    # ---- forward ------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        """F: the stage's output for its input; at the last stage, the loss."""
        s, m = action.stage, action.microbatch
        key = self.microbatches[m].key
        routes = self._routes(action)
        inputs = self._input(routes.arriving, m)
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
        for route in routes.leaving:
            self.mail.put("F", route, m, tuple(outputs[i] for i in route.which))

    def _input(self, routes: list[Route], m: int) -> Value:
        """The stage's input, on the device: of the data, or what the stage before made, without its history."""
        if not routes:
            inputs = self._to_device(self.microbatches[m].inputs)
            return inputs if self._dtype is None else cast(inputs, self._dtype)
        (route,) = routes
        pairs = zip(self.mail.take("F", route, m), route.specs, strict=True)
        # Where the stage before wants a gradient, it is collected here.
        tensors = tuple(t.detach().requires_grad_(spec.requires_grad) for t, spec in pairs)
        return self._boundary(route.source, m).pack(tensors)

    def _compute(self, s: int, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """What the stage makes: its output's tensors, or the micro-batch's share of the loss."""
        microbatch = self.microbatches[m]
        output = self.stages[s](inputs)
        if s == self.last:
            if self._dtype is not None:
                output = cast(output, torch.float32)  # a loss sums much, which 16 bits are too few for
            loss = self.job.loss(output, self._to_device(microbatch.targets))
            return (loss * microbatch.weight,)
        expected, made = self._boundary(s, m), Boundary.of(output)
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
        routes = self._routes(action)
        gradients: tuple[Tensor, ...] | None = None  # that of the loss is 1
        for route in routes.leaving:
            gradients = self.mail.take("B", route, m)
        op = self._begin(Kind.BACKWARD, action)
        wanted = [output for output in kept.outputs if output.requires_grad]
        if wanted and gradients is None and self.loss_scale != 1.0:
            gradients = tuple(torch.full_like(loss, self.loss_scale) for loss in wanted)
        if wanted:
            torch.autograd.backward(wanted, gradients)
        if kept.saved is not None:
            kept.saved.release()
        self.replica.after_backward()
        self.record.end(op)
        for route in routes.arriving:
            self._pass_back(route, m, kept.inputs)

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

    def _pass_back(self, route: Route, m: int, inputs: Value) -> None:
        """The gradients of the stage's input, to the stage where it was made."""
        found = []
        for tensor in leaves(inputs):
            if tensor.requires_grad:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        gradients = tuple(found)
        self._track(gradients)
        self.mail.put("B", route, m, gradients)

    # ---- record and device --------------------------------------------------------------------------------

    def _begin(self, kind: Kind, action: Action) -> int:
        """Record that the action's compute begins, with its FLOPs and bytes."""
        s, m = action.stage, action.microbatch
        key = self.microbatches[m].key
        flops = self._flops.get((key, s))
        if flops is None:
            flops = self._flops[key, s] = self.job.flops(key, s)
        done, moved = flops.forward, flops.forward_bytes
        if kind == Kind.BACKWARD:
            done, moved = flops.backward, flops.backward_bytes
        return self.record.begin(kind, str(action), stage=s, microbatch=m, flops=done, nbytes=moved)

    def _to_device(self, value: Value) -> Value:
        """A copy on the device, which a layer may write into."""
        copies = self.device.type != "cpu"
        nbytes = sum(tensor.nbytes for tensor in leaves(value))
        op = self.record.begin(Kind.COPY_TO_DEVICE, nbytes=nbytes) if copies else -1
        copied = map_tensors(lambda tensor: tensor.to(self.device, copy=True), value)
        if copies:
            self.record.end(op)
        self._track(tuple(leaves(copied)))
        return copied

    def _track(self, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            self.record.ledger.track(tensor, "activations")
