"""StageMessages: the tensors that stages pass to each other, between ranks or on one.

Sends and receives are asynchronous. The schedule says when a receive is posted, and the runtime waits when it needs the
tensors; it waits for a send when more than p are pending, which bounds the memory they hold. Stages on one rank send
nothing: one takes what the other passes on.

Most messages go to the next stage, and the schedule has an action for each. A skip goes further: it is sent as soon as
it is made, directly to the stage that needs it, and its receive is posted with the others of that stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.strategies.partition.value import Route, Spec

if TYPE_CHECKING:
    from mpkit.strategies.comm.wire import Work
    from mpkit.strategies.rank_context import Context


SKIPS = {"F": "S", "B": "T"}
"""Letters in the tags of messages that go further than to a neighbour."""

Place = tuple[str, int, int, int]  # direction, sending stage, receiving stage, micro-batch


class StageMessages:
    """One rank's half of every message of a pipeline."""

    def __init__(self, context: Context, rank_of: tuple[int, ...], microbatches: int) -> None:
        self._context, self._rank_of, self._microbatches = context, rank_of, microbatches
        self._limit = len(set(rank_of))
        # Empty between steps.
        self._outgoing: dict[Place, tuple[Tensor, ...]] = {}
        self._arriving: dict[Place, list[Work]] = {}
        self._here: dict[Place, tuple[Tensor, ...]] = {}
        self._sent: deque[list[Work]] = deque()  # one entry per message
        # Not in the schedule's order: ranks that waited for these in between might wait for each other in a ring.
        self._skips: dict[Place, list[Work]] = {}
        self._loss_sends: list[Work] = []  # sends of the loss, likewise

    def set_outputs(self, way: str, m: int, made: Iterable[tuple[Route, tuple[Tensor, ...]]]) -> None:
        """Pass on what an action made, each along its route: to a stage here, at once as a skip, or when SEND runs.

        The `way` is "F" for the source's outputs, "B" for their gradients, which go back.
        """
        for route, tensors in made:
            place = sender, receiver = _ends(way, route)
            if self._rank_of[receiver] == self._rank_of[sender]:
                self._here[way, *place, m] = tensors
            elif _is_skip(route):
                self._skips[way, *place, m] = self._start(way, route, m, tensors)
            else:
                self._outgoing[way, *place, m] = tensors

    def send_outputs(self, way: str, routes: Iterable[Route], m: int) -> None:
        """Start sending what was set for these routes (SEND_F, SEND_B)."""
        for route in routes:
            tensors = self._outgoing.pop((way, *_ends(way, route), m), None)
            if tensors is not None:
                self._sent.append(self._start(way, route, m, tensors))
        while len(self._sent) > self._limit:
            _wait(self._sent.popleft())

    def _start(self, way: str, route: Route, m: int, tensors: tuple[Tensor, ...]) -> list[Work]:
        to = self._rank_of[_ends(way, route)[1]]
        isend = self._context.comm.isend
        return [isend(tensor, to, self._tag(way, route, m, i)) for i, tensor in enumerate(tensors)]

    def post_receives(self, way: str, routes: Iterable[Route], m: int) -> None:
        """Post the receives along these routes from other ranks (RECV_F, RECV_B)."""
        for route in routes:
            sender, receiver = _ends(way, route)
            specs = [spec for spec in route.specs if way == "F" or spec.requires_grad]
            if self._rank_of[sender] != self._rank_of[receiver]:
                self._arriving[way, sender, receiver, m] = [
                    self._post(spec, self._rank_of[sender], self._tag(way, route, m, i))
                    for i, spec in enumerate(specs)
                ]

    def _post(self, spec: Spec, source: int, tag: str) -> Work:
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._context.device)
        self._context.record.ledger.track(buffer, "activations")
        return self._context.comm.irecv(buffer, source, tag)

    def wait_input(self, way: str, route: Route, m: int) -> tuple[Tensor, ...]:
        """Wait for the tensors of a route, and return them."""
        place = (way, *_ends(way, route), m)
        if place in self._here:
            return self._here.pop(place)
        if place not in self._arriving:  # a skip to a stage that receives nothing else from other ranks
            self.post_receives(way, [route], m)
        arrived = tuple(work.wait() for work in self._arriving.pop(place))
        if way == "B" and arrived:
            # Then the outputs of these gradients have arrived too, and need not be held any longer.
            _wait(self._skips.pop(("F", *_ends("F", route), m), ()))
        return arrived

    def wait_gradients(self, routes: list[Route], m: int) -> dict[int, Tensor] | None:
        """Return the gradients of a stage's outputs that have one, by the output's number; None at the last stage.

        Gradients of an output that several stages used are summed. The dry run knows which outputs have one; those of a
        recomputed block do not say.
        """
        if not routes:
            return None
        sums: dict[int, Tensor] = {}
        for route in routes:
            wanting = [i for i, spec in zip(route.which, route.specs, strict=True) if spec.requires_grad]
            for i, gradient in zip(wanting, self.wait_input("B", route, m), strict=True):
                sums[i] = sums[i] + gradient if i in sums else gradient
        return {i: sums[i] for i in sorted(sums)}

    def broadcast_loss(self, loss: Tensor) -> None:
        """Send the loss, [1] or [2], from the rank with the last stage to the others."""
        value = loss.detach().to(torch.float64)
        others = sorted(set(self._rank_of) - {self._rank_of[-1]})
        self._loss_sends += [self._context.comm.isend(value, rank, "L0") for rank in others]

    def receive_loss(self, numbers: int) -> Tensor:
        """Wait for the loss from the rank with the last stage, and return its one or two numbers."""
        value = torch.empty(numbers, dtype=torch.float64, device=self._context.device)
        return self._context.comm.irecv(value, self._rank_of[-1], "L0").wait()

    def drain(self) -> None:
        """Wait until all sends are complete."""
        while self._sent:
            _wait(self._sent.popleft())
        while self._skips:
            _wait(self._skips.popitem()[1])
        _wait(self._loss_sends)
        self._loss_sends.clear()
        assert not (self._outgoing or self._arriving or self._here), "a valid schedule leaves nothing behind"

    def _tag(self, way: str, route: Route, m: int, i: int) -> str:
        """Return the tag of the i-th tensor of a message: its direction and micro-batch, such as F3.

        If a rank has several stages, or a message several tensors, the numbers continue.
        """
        sender, receiver = _ends(way, route)
        local, held = self._local(receiver)
        if not _is_skip(route):
            return f"{way}{m + self._microbatches * (local + held * i)}"
        other, others = self._local(sender)
        return f"{SKIPS[way]}{m + self._microbatches * (local + held * (other + others * i))}"

    def _local(self, stage: int) -> tuple[int, int]:
        """Return the place of a stage among its rank's stages, and the number of these."""
        rank = self._rank_of[stage]
        return self._rank_of[:stage].count(rank), self._rank_of.count(rank)


def _wait(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _ends(way: str, route: Route) -> tuple[int, int]:
    """Return the stage that sends and the one that receives."""
    return (route.source, route.target) if way == "F" else (route.target, route.source)


def _is_skip(route: Route) -> bool:
    return route.target - route.source > 1
