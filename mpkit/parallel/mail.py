"""Mail: tensors on their way from stage to stage, between ranks or on one.

Sends and receives are asynchronous. A receive is posted when the schedule says so and waited for by whoever needs
what comes; a send is waited for when more than p of them are under way, which bounds the memory they hold.
Between two stages on one rank nothing is sent: what one passes on, the other takes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpkit.parallel.job import Spec
from mpkit.schedule import Action

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.wire import Work

__all__ = ["Mail"]

STEP = {"F": 1, "B": -1}
"""Outputs go to the next stage, gradients to the one before."""


class Mail:
    """One rank's half of every message of a pipeline.

    Args:
        context: of this rank.
        rank_of: the rank that holds each stage.
        microbatches: how many there are.
    """

    def __init__(self, context: Context, rank_of: tuple[int, ...], microbatches: int) -> None:
        self._context = context
        self._rank_of = rank_of
        self._microbatches = microbatches
        self._limit = len(set(rank_of))
        # By (way, stage, micro-batch), the stage being the one that sends or that receives. Empty between steps.
        self._outgoing: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self._arriving: dict[tuple[str, int, int], list[Work]] = {}
        self._here: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self._sent: deque[Work] = deque()

    def put(self, way: str, stage: int, m: int, tensors: tuple[Tensor, ...]) -> None:
        """What `stage` made for its neighbour: for it to take, if it is here, else until it is sent."""
        to = stage + STEP[way]
        if self._rank_of[to] == self._rank_of[stage]:
            self._here[way, to, m] = tensors
        else:
            self._outgoing[way, stage, m] = tensors

    def send(self, action: Action) -> None:
        """SEND_F, SEND_B: start sending what was put."""
        way, stage, m = action.kind[-1], action.stage, action.microbatch
        to = stage + STEP[way]
        for i, tensor in enumerate(self._outgoing.pop((way, stage, m))):
            tag = self._tag(way, to, m, i)
            self._sent.append(self._context.comm.isend(tensor, self._rank_of[to], tag))
        while len(self._sent) > self._limit:
            self._sent.popleft().wait()

    def receive(self, action: Action, specs: list[Spec]) -> None:
        """RECV_F, RECV_B: post receives for tensors such as these."""
        way, stage, m = action.kind[-1], action.stage, action.microbatch
        source = self._rank_of[stage - STEP[way]]
        works = []
        for i, spec in enumerate(specs):
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._context.device)
            self._context.record.ledger.track(buffer, "activations")
            works.append(self._context.comm.irecv(buffer, source, self._tag(way, stage, m, i)))
        self._arriving[way, stage, m] = works

    def take(self, way: str, stage: int, m: int) -> tuple[Tensor, ...]:
        """What came for `stage`; waits until it is there."""
        works = self._arriving.pop((way, stage, m), None)
        return self._here.pop((way, stage, m)) if works is None else tuple(work.wait() for work in works)

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft().wait()
        assert not (self._outgoing or self._arriving or self._here), "a valid schedule leaves nothing behind"

    def _tag(self, way: str, receiver: int, m: int, i: int) -> str:
        """What both ends call the i-th tensor of a message: the way and the micro-batch, such as F3.

        Where a rank has several stages, or a message several tensors, the numbers go on.
        """
        rank = self._rank_of[receiver]
        local, held = self._rank_of[:receiver].count(rank), self._rank_of.count(rank)
        return f"{way}{m + self._microbatches * (local + held * i)}"
