"""The pipeline runtime: one rank executes its row of a schedule, whichever schedule it is.

A step goes through these phases, on micro-batches that `mpkit.parallel.feed` gives:

    execute   the row's actions, in order:
                  F        forward of a micro-batch through a stage; the last stage computes its loss too
                  B        backward, or in two halves: I, gradients of the inputs, and W, of the weights
                  RECV_F, RECV_B   post the receive of a stage's input, or of its output's gradient
                  SEND_F, SEND_B   send a stage's output on, or its input's gradient back
    tell      the loss, by the rank that has the last stage to the others
    drain     until what was sent has left

What a stage computes is in `mpkit.parallel.stage_work`, what goes between stages in `mpkit.parallel.mail`. Where
activations are recomputed, that comes before the gradient of a B or an I is waited for, since it needs none of it.

Each schedule in 15 lines: `mpkit.reference.naive_model_parallelism`, `gpipe` and `one_f_one_b`. This module adds:
schedules as data, several stages per rank, split backwards, skips between stages that are no neighbours, recomputation,
micro-batches of unequal size, and replicas.

Serial training is the case of one stage, naive model parallelism that of one micro-batch.

The loss of a micro-batch of k samples out of K counts k/K, so that the sum over micro-batches is the mean over
the batch, and its gradient the batch's gradient, also if they are not of one size. Where replicas share a batch
each is given its share of every micro-batch, and the sum goes over replicas too. A loss that returns (total, count)
adds up in `mpkit.loss.quotient`'s way.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpkit.parallel.anymodel.work import PartWork
from mpkit.parallel.axis import MeshAxes
from mpkit.parallel.feed import MicroBatch
from mpkit.parallel.job import Route, TrainJob
from mpkit.parallel.mail import Mail
from mpkit.parallel.microbatch import Value
from mpkit.parallel.replica import Replica
from mpkit.parallel.stage_work import StageWork
from mpkit.schedule import Action, build, lower

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Pipeline"]

LAST_HALF = ("B", "W")
"""The actions that add to the weights' gradients."""


class Routes(NamedTuple):
    """The routes that end at a stage, and those that begin there."""

    arriving: list[Route]
    leaving: list[Route]


class Pipeline:
    """One rank's half of every message, and its stages' forwards and backwards.

    Args:
        context: of this rank.
        job: what to train, and how.
        axes: of the mesh; the ranks of a pipeline are a line along pp.
        replica: what this rank holds; told when gradients are about to come.

    Attributes:
        loss_scale: what gradients are multiplied by, for fp16 to show them.
        tells: whether this rank computes the loss, which the others are told.
    """

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, replica: Replica) -> None:
        self._job, self._replica = job, replica
        schedule = lower(build(job.plan))
        self._row = schedule.rows[axes.place.pp]
        self._last_backwards = {a.stage: i for i, a in enumerate(self._row) if a.kind in LAST_HALF}
        split = {
            s: [a.microbatch for a in self._row if a.kind == "I" and a.stage == s] for s in replica.stages
        }
        work = StageWork if job.opened is None else PartWork
        self._work = {
            s: work(context, job, stage, replica, axes.of("cp"), split[s])
            for s, stage in replica.stages.items()
        }
        self._last = schedule.stages - 1
        self.tells = self._last in replica.stages
        self.loss_scale = 1.0
        rank_of = tuple(axes.of("pp").ranks[place] for place in schedule.stage_to_rank)
        self._mail = Mail(context, rank_of, schedule.microbatches)
        self._microbatches: list[MicroBatch] = []
        self._loss: list[Tensor] = []  # the micro-batches' shares, [1], or [2] with the count
        self._tells_early = context.comm.by_name
        self._known_routes: dict[tuple[Hashable, int], Routes] = {}  # by signature and stage

    @property
    def takes_data(self) -> bool:
        """Whether this rank needs inputs or targets: it holds the first stage or the last."""
        return 0 in self._work or self.tells or self._job.opened is not None  # whose forward runs everywhere

    def step(self, number: int, microbatches: list[MicroBatch]) -> list[float]:
        """Forward and backward of a batch; gradients are added to the parameters'.

        Args:
            number: of the step.
            microbatches: this rank's share of the batch.

        Returns:
            The mean loss over the batch, or this replica's share of it; of a loss that counts, its total / nominal and
            its count.
        """
        self._microbatches = microbatches
        for work in self._work.values():
            work.begin_step(number, microbatches, self.loss_scale)
        # ---- execute
        for i, action in enumerate(self._row):
            if action.kind in LAST_HALF:
                last = i == self._last_backwards[action.stage]
                self._replica.before_backward(last, action.stage)
                if action.kind == "W":
                    self._replica.before_weight_grads(action.stage)
            self._execute(action)
        # ---- tell
        if self.tells and not self._tells_early:
            self._mail.tell(sum_of(self._loss))
        heard = sum_of(self._loss) if self.tells else self._mail.hear(1 if self._job.nominal is None else 2)
        self._loss.clear()
        # ---- drain
        self._mail.drain()
        return [value.item() for value in heard]

    # ---- execute ------------------------------------------------------------------------------------------

    def _execute(self, action: Action) -> None:
        m, work, routes = action.microbatch, self._work[action.stage], self._routes(action)
        match action.kind:
            case "F":
                self._forward(action, routes)
            case "B" | "I":
                self._backward(action, routes)
            case "W":
                work.weight_grads(m)
            case "SEND_F":
                self._mail.send("F", routes.leaving, m)
            case "SEND_B":
                self._mail.send("B", routes.arriving, m)
            case "RECV_F":  # what the stages before made for this one
                self._mail.receive("F", routes.arriving, m)
            case _:  # RECV_B: the gradient of the own outputs, as far as they have one
                self._mail.receive("B", routes.leaving, m)

    def _routes(self, action: Action) -> Routes:
        """What comes to the action's stage and goes from it, for micro-batches of this one's shapes."""
        place = self._microbatches[action.microbatch].key, action.stage
        found = self._known_routes.get(place)
        if found is None:
            found = self._known_routes[place] = Routes(self._job.arriving(*place), self._job.leaving(*place))
        return found

    def _forward(self, action: Action, routes: Routes) -> None:
        """F: the stage's output for its input; at the last stage, the loss."""
        s, m = action.stage, action.microbatch
        outputs = self._work[s].forward(m, self._input(s, routes.arriving, m))
        if s == self._last:
            wide = self._job.nominal is not None  # sums of many, whose counts are of float64
            self._loss.append(
                torch.stack([each.detach().double() if wide else each.detach() for each in outputs])
            )
            if self._tells_early and len(self._loss) == len(self._microbatches):
                self._mail.tell(sum_of(self._loss))  # long before the others ask: nobody waits
        for route in routes.leaving:
            self._mail.put("F", route, m, tuple(outputs[i] for i in route.which))

    def _input(self, s: int, routes: list[Route], m: int) -> Value:
        """The stage's input, on the device: of the data, or what the stage before made, without its history."""
        if not routes and self._job.opened is None:
            return self._work[s].data(m)
        pairs = [pair for r in routes for pair in zip(self._mail.take("F", r, m), r.specs, strict=True)]
        # Where the stage before wants a gradient, it is collected here.
        tensors = tuple(t.detach().requires_grad_(spec.requires_grad) for t, spec in pairs)
        if self._job.opened is not None:
            return tensors
        (route,) = routes
        return self._job.boundary(self._microbatches[m].key, route.source).pack(tensors)

    def _backward(self, action: Action, routes: Routes) -> None:
        """B or I: gradients of the stage's input, for the stage before."""
        m, work = action.microbatch, self._work[action.stage]
        work.recompute(m)
        gradients = self._gradients(routes.leaving, m)
        made = work.backward(m, gradients) if action.kind == "B" else work.input_grads(m, gradients)
        left = iter(made)
        for route in routes.arriving:
            wanting = sum(spec.requires_grad for spec in route.specs)
            self._mail.put("B", route, m, tuple(islice(left, wanting)))

    def _gradients(self, routes: list[Route], m: int) -> tuple[Tensor, ...] | None:
        """Of a stage's outputs, summed over the stages that used them; None at the last: that of the loss is 1."""
        if not routes:
            return None
        if len(routes) == 1:
            return self._mail.take("B", routes[0], m)
        sums: dict[int, Tensor] = {}
        for route in routes:
            wanting = [i for i, spec in zip(route.which, route.specs, strict=True) if spec.requires_grad]
            for i, gradient in zip(wanting, self._mail.take("B", route, m), strict=True):
                sums[i] = sums[i] + gradient if i in sums else gradient
        return tuple(sums[i] for i in sorted(sums))


def sum_of(losses: list[Tensor]) -> Tensor:
    """In the order of the forwards."""
    return sum(losses[1:], losses[0])
