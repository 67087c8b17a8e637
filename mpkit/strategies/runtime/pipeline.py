"""The pipeline runtime: one rank executes its row of a schedule, whichever schedule it is.

A step goes through these phases, on micro-batches from `mpkit.strategies.job.feed`:

    execute     the row's actions, in order:
                    F        forward of a micro-batch through a stage; the last stage computes its loss too
                    B        backward, or its two halves: I, gradients of the inputs, and W, of the weights
                    RECV_F, RECV_B   post the receive of a stage's input, or of its output's gradient
                    SEND_F, SEND_B   send a stage's output on, or its input's gradient back
                    F & B    one after the other: no rank computes both at once
    broadcast   the rank with the last stage sends the loss to the others
    drain       wait until all sends are complete

Recomputation needs no gradient, so it runs before a B or an I waits for its gradient.

`mpkit.strategies.reference.naive_model_parallelism`, `gpipe` and `one_f_one_b` are schedules in 15 lines each. This
module adds schedules as data, several stages per rank, split backwards, skips between stages that are not neighbours,
recomputation, micro-batches of unequal size, and replicas. Serial training is the case of one stage, and naive model
parallelism that of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpkit.plan.schedule import Action, lower
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.compute.stage_forward import PartForward, StageForward
from mpkit.strategies.compute.stage_work import StageWork
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.partition.value import Route
from mpkit.strategies.runtime.stage_messages import StageMessages
from mpkit.strategies.stage.gradient_sync import GradientSync

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


LAST_HALF = ("B", "W")
"""The actions that add to the weights' gradients."""

FORWARDS = ("F", "SEND_F", "RECV_F")
"""The actions of an evaluation."""


class Routes(NamedTuple):
    """The routes that end at a stage, and those that start there."""

    arriving: list[Route]
    leaving: list[Route]


class Pipeline:
    """One rank's half of every message, and its stages' forwards and backwards.

    If it `evaluates`, only forwards run, and the last stage computes scores (`Evaluation`).
    """

    def __init__(
        self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync, *, evaluates: bool = False
    ) -> None:
        self._context, self._job = context, job
        schedule = lower(job.where.schedule)
        self._row = schedule.rows[axes.place.pp]
        if evaluates:  # in the schedule's order, every input arrives before it is needed
            self._row = tuple(action for action in self._row if action.kind in FORWARDS)
        self._last_backwards = {a.stage: i for i, a in enumerate(self._row) if a.kind in LAST_HALF}
        forward_of = StageForward if job.where.partition is None else PartForward
        self._forwards: dict[int, StageForward] = {}
        self._work: dict[int, StageWork] = {}
        for s, stage in sync.stages.items():
            forward = self._forwards[s] = forward_of(context, job, stage, stage.sharded.attention)
            forward.evaluates = evaluates
            self._work[s] = StageWork(context, job, stage, forward, sync)
        self._last = schedule.stages - 1
        self.computes_loss = self._last in sync.stages  # and sends it to the other ranks
        self.loss_scale = 1.0  # factor of the gradients, which lets fp16 represent them
        rank_of = tuple(axes.communicator_of("pp").ranks[place] for place in schedule.stage_to_rank)
        self._messages = StageMessages(context, rank_of, schedule.microbatches)
        self._microbatches: list[MicroBatch] = []
        self._loss: list[Tensor] = []  # the micro-batches' shares: [1], or [2] with the count
        self._broadcasts_early = context.comm.wire.by_name and not evaluates
        self._routes: dict[tuple[Hashable, int], Routes] = {}  # by signature and stage

    def listen(self, heard: ForwardDraws | None) -> None:
        """Note what forwards draw at random from now on; stop at None."""
        for work in self._work.values():
            work.listen(heard)

    def watch(self, facts: StepFacts) -> None:
        """Note what forwards and losses do from now on."""
        for work in self._work.values():
            work.watch(facts)

    @property
    def takes_data(self) -> bool:
        """Whether this rank needs inputs or targets; a partitioned model's forward runs on every rank."""
        return 0 in self._work or self.computes_loss or self._job.where.partition is not None

    @property
    def attended_pairs(self) -> int:
        """The pairs of a query and a key in this rank's attentions over divided sequences, in the latest step."""
        return sum(sum(forward.attended.values()) for forward in self._forwards.values())

    def step(self, number: int, microbatches: list[MicroBatch]) -> list[float]:
        """Run the forward and backward of a batch, and add to the parameters' gradients.

        Return [mean loss over the batch], or this replica's share; for a loss that counts, [total / nominal, count].
        """
        self._microbatches = microbatches
        for work in self._work.values():
            work.begin_step(number, microbatches, self.loss_scale)
        # ---- execute
        for i, action in enumerate(self._row):
            last = self._last_backwards.get(action.stage) == i
            match action.kind:
                case "F":
                    self._forward(action)
                case "B" | "I":
                    self._work[action.stage].recompute(action.microbatch)
                    self._backward(action, last)
                case "W":
                    self._work[action.stage].weight_grads(action.microbatch, last)
                case _:
                    self._communicate(action)
        # ---- broadcast
        if self.computes_loss:
            loss = sum_of(self._loss)
            if not self._broadcasts_early:
                self._messages.broadcast_loss(loss)
        else:
            loss = self._messages.receive_loss(1 if self._job.what.nominal is None else 2)
        self._loss.clear()
        # ---- drain
        self._messages.drain()
        return [value.item() for value in loss]

    def scores(self, number: int, microbatches: list[MicroBatch]) -> Tensor | None:
        """Return the sums and weights of a batch's scores on ranks with the last stage; None on the others.

        A small batch has fewer micro-batches than the schedule.
        """
        self._microbatches = microbatches
        for work in self._work.values():
            work.begin_step(number, microbatches, 1.0)
        for action in self._row:
            if action.kind == "F" and action.microbatch < len(microbatches):
                self._forward(action)
            elif action.microbatch < len(microbatches):
                self._communicate(action)
        self._messages.drain()
        added = sum_of(self._loss) if self.computes_loss else None
        self._loss.clear()
        return None if added is None else added.to(self._context.device, torch.float64)

    # ---- execute ------------------------------------------------------------------------------------------

    def _routes_of(self, action: Action) -> Routes:
        """Return the routes to and from an action's stage, for the shapes of its micro-batch; each looked up once."""
        place, where = (self._microbatches[action.microbatch].key, action.stage), self._job.where
        if place not in self._routes:
            self._routes[place] = Routes(where.incoming_routes(*place), where.outgoing_routes(*place))
        return self._routes[place]

    def _communicate(self, action: Action) -> None:
        """Send what a stage made, or post the receive of what it needs."""
        m, routes = action.microbatch, self._routes_of(action)
        match action.kind:
            case "SEND_F":
                self._messages.send_outputs("F", routes.leaving, m)
            case "SEND_B":
                self._messages.send_outputs("B", routes.arriving, m)
            case "RECV_F":
                self._messages.post_receives("F", routes.arriving, m)
            case _:  # RECV_B
                self._messages.post_receives("B", routes.leaving, m)

    def _forward(self, action: Action) -> None:
        """Run F: compute the stage's output, or the loss at the last stage, and pass the output on."""
        s, m, routes = action.stage, action.microbatch, self._routes_of(action)
        outputs = self._work[s].forward(m, self._input(s, routes.arriving, m))
        if s == self._last:
            wide = self._job.what.nominal is not None  # a sum over many samples, with a count in float64
            losses = [each.detach().double() if wide else each.detach() for each in outputs]
            self._loss.append(torch.stack(losses))
            if self._broadcasts_early and len(self._loss) == len(self._microbatches):
                self._messages.broadcast_loss(sum_of(self._loss))  # long before the other ranks wait for it
        each = [(r, tuple(outputs[i] for i in r.which)) for r in routes.leaving]
        self._messages.set_outputs("F", m, each)

    def _input(self, s: int, routes: list[Route], m: int) -> Value:
        """Return the stage's input on the device: the data, or earlier stages' outputs, as leaves with gradients."""
        if not routes and self._job.where.partition is None:
            return self._forwards[s].data(m)
        tensors = tuple(
            tensor.detach().requires_grad_(spec.requires_grad)
            for r in routes
            for tensor, spec in zip(self._messages.wait_input("F", r, m), r.specs, strict=True)
        )
        if self._job.where.partition is not None:
            return tensors
        (route,) = routes
        return self._job.where.boundary(self._microbatches[m].key, route.source).pack(tensors)

    def _backward(self, action: Action, last: bool) -> None:
        """Run B or I: compute the gradients of the stage's input, and pass them back; `last` is of the step."""
        m, routes = action.microbatch, self._routes_of(action)
        work = self._work[action.stage]
        gradients = self._messages.wait_gradients(routes.leaving, m)
        made = work.backward(m, gradients, last) if action.kind == "B" else work.input_grads(m, gradients)
        left, wanting = iter(made), [sum(spec.requires_grad for spec in r.specs) for r in routes.arriving]
        each = [(r, tuple(islice(left, n))) for r, n in zip(routes.arriving, wanting, strict=True)]
        self._messages.set_outputs("B", m, each)


def sum_of(losses: list[Tensor]) -> Tensor:
    """Sum the losses in the order of the forwards."""
    return sum(losses[1:], losses[0])
