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

What a stage computes is in `mpkit.strategies.compute.stage_work`, and what is sent between stages in
`mpkit.strategies.runtime.stage_messages`. Recomputed activations need no gradient, so they are computed before a B or
an I waits for its gradient.

`mpkit.strategies.reference.naive_model_parallelism`, `gpipe` and `one_f_one_b` are schedules in 15 lines each. This
module adds schedules as data, several stages per rank, split backwards, skips between stages that are not neighbours,
recomputation, micro-batches of unequal size, and replicas.

Serial training is the case of one stage, and naive model parallelism that of one micro-batch.

The loss of a micro-batch of k samples out of K has weight k/K, so that the sum over micro-batches is the mean over
the batch, and its gradient the batch's gradient, even where micro-batches differ in size. Where replicas share a
batch, each has its share of every micro-batch, and the sum is also over replicas. Losses that return (total, count)
are added up as in `mpkit.strategies.loss.counted`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
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
from mpkit.strategies.runtime.local_model import attention_over
from mpkit.strategies.runtime.stage_messages import StageMessages
from mpkit.strategies.stage.gradient_sync import GradientSync

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


LAST_HALF = ("B", "W")
"""The actions that add to the weights' gradients."""

FORWARDS = ("F", "SEND_F", "RECV_F")
"""The actions of an evaluation."""


class Routes(NamedTuple):
    """The routes that end at a stage, and those that begin there."""

    arriving: list[Route]
    leaving: list[Route]


class Pipeline:
    """One rank's half of every message, and its stages' forwards and backwards.

    Args:
        axes: the mesh's axes; the ranks of a pipeline are a line along pp.
        sync: this rank's stages, and the synchronization of their gradients.
        evaluates: whether only forwards run, and the last stage computes scores, for `Evaluation`.

    Attributes:
        loss_scale: factor of the gradients, which lets fp16 represent them.
        computes_loss: whether this rank computes the loss, and sends it to the others.
    """

    def __init__(
        self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync, *, evaluates: bool = False
    ) -> None:
        self._context, self._job = context, job
        schedule = lower(job.where.schedule)
        self._row = schedule.rows[axes.place.pp]
        if evaluates:  # in the order of the schedule every input is there before it is needed
            self._row = tuple(action for action in self._row if action.kind in FORWARDS)
        self._last_backwards = {a.stage: i for i, a in enumerate(self._row) if a.kind in LAST_HALF}
        forward_of = StageForward if job.where.partition is None else PartForward
        over = partial(attention_over, job.plan, axes.communicator_of)
        self._forwards = {
            s: forward_of(context, job, stage, over(stage.sharded.draws)) for s, stage in sync.stages.items()
        }
        self._work = {
            s: StageWork(context, job, stage, self._forwards[s], sync) for s, stage in sync.stages.items()
        }
        for forward in self._forwards.values():
            forward.evaluates = evaluates
        self._last = schedule.stages - 1
        self.computes_loss = self._last in sync.stages
        self.loss_scale = 1.0
        rank_of = tuple(axes.communicator_of("pp").ranks[place] for place in schedule.stage_to_rank)
        self._messages = StageMessages(context, rank_of, schedule.microbatches)
        self._microbatches: list[MicroBatch] = []
        self._loss: list[Tensor] = []  # the micro-batches' shares: [1], or [2] with the count
        self._broadcasts_early = context.comm.wire.by_name and not evaluates
        self._routes: dict[tuple[Hashable, int], Routes] = {}  # by signature and stage

    def listen(self, heard: ForwardDraws | None) -> None:
        """Note what forwards draw at random from now on; None: no longer."""
        for work in self._work.values():
            work.listen(heard)

    def watch(self, facts: StepFacts) -> None:
        """Note from now on what forwards and losses do."""
        for work in self._work.values():
            work.watch(facts)

    @property
    def takes_data(self) -> bool:
        """Whether this rank needs inputs or targets: it holds the first stage or the last."""
        return (
            0 in self._work or self.computes_loss or self._job.where.partition is not None
        )  # its forward runs on every rank

    @property
    def attended_pairs(self) -> int:
        """The pairs of a query and a key in this rank's attentions of the latest step, over divided sequences."""
        return sum(sum(forward.attended.values()) for forward in self._forwards.values())

    def step(self, number: int, microbatches: list[MicroBatch]) -> list[float]:
        """Run the forward and backward of a batch; gradients are added to the parameters'.

        Returns:
            The mean loss over the batch, or this replica's share of it; for a loss that counts, its total / nominal
            and its count.
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

        Args:
            microbatches: this rank's share of it; a small batch has fewer than the schedule.
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
        place = self._microbatches[action.microbatch].key, action.stage
        routes = self._routes.get(place)
        if routes is None:
            where = self._job.where
            routes = self._routes[place] = Routes(
                where.incoming_routes(*place), where.outgoing_routes(*place)
            )
        return routes

    def _communicate(self, action: Action) -> None:
        """Send what a stage made, or post the receive of what it needs."""
        m, routes = action.microbatch, self._routes_of(action)
        match action.kind:
            case "SEND_F":
                self._messages.send_outputs("F", routes.leaving, m)
            case "SEND_B":
                self._messages.send_outputs("B", routes.arriving, m)
            case "RECV_F":  # what the stages before made for this one
                self._messages.post_receives("F", routes.arriving, m)
            case _:  # RECV_B: the gradients of the stage's outputs, where they have one
                self._messages.post_receives("B", routes.leaving, m)

    def _forward(self, action: Action) -> None:
        """Run F: compute the stage's output, at the last stage the loss, and pass the output on."""
        s, m, routes = action.stage, action.microbatch, self._routes_of(action)
        outputs = self._work[s].forward(m, self._input(s, routes.arriving, m))
        if s == self._last:
            wide = self._job.what.nominal is not None  # a sum over many samples, with a count in float64
            self._loss.append(
                torch.stack([each.detach().double() if wide else each.detach() for each in outputs])
            )
            if self._broadcasts_early and len(self._loss) == len(self._microbatches):
                self._messages.broadcast_loss(sum_of(self._loss))  # long before the other ranks wait for it
        each = [(r, tuple(outputs[i] for i in r.which)) for r in routes.leaving]
        self._messages.set_outputs("F", m, each)

    def _input(self, s: int, routes: list[Route], m: int) -> Value:
        """Return the stage's input on the device: the data, or the output of the stage before, detached."""
        if not routes and self._job.where.partition is None:
            return self._forwards[s].data(m)
        pairs = [
            pair for r in routes for pair in zip(self._messages.wait_input("F", r, m), r.specs, strict=True)
        ]
        # Where the stage before needs a gradient, it is accumulated here.
        tensors = tuple(t.detach().requires_grad_(spec.requires_grad) for t, spec in pairs)
        if self._job.where.partition is not None:
            return tensors
        (route,) = routes
        return self._job.where.boundary(self._microbatches[m].key, route.source).pack(tensors)

    def _backward(self, action: Action, last: bool) -> None:
        """Run B or I: compute the gradients of the stage's input, and pass them on to the stage before.

        Args:
            last: whether it is the stage's last backward of the step.
        """
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
