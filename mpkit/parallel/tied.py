"""Tied weights whose stages are on several ranks: they train as one.

The first stage that computes with a tied weight *owns* it: its rank has the optimizer's states, counts it in the norm
of the gradients, and gives it to checkpoints. The others *borrow* it.

    sum       after the last backward each borrower sends its gradient to the owner, who adds them to its own
    update    the owner alone
    lend      the owner sends the new weight to each borrower

So a step sends twice a weight for each borrower, as an all-reduce of the gradients would (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", SC 2021, do that for embeddings), and the optimizer's states
exist once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.parallel.replica import Piece, Replica, named_parameters
from mpkit.parallel.stage import Stage

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.job import Shared

__all__ = ["Tied"]


class Tied(Replica):
    """What a rank of a pipeline holds, if some of it is tied to what others hold.

    Args:
        context: of this rank.
        shared: the tied weights of the model, the same on every rank.
        rank_of: the rank that holds each stage.
        stages: this rank's.
    """

    shares_alone = False

    def __init__(
        self, context: Context, shared: list[Shared], rank_of: tuple[int, ...], stages: dict[int, Stage]
    ) -> None:
        super().__init__(stages)
        self._comm, self._ledger = context.comm, context.record.ledger
        mine = named_parameters(stages)
        self._owned: list[tuple[str, nn.Parameter, list[int]]] = []  # tag, weight, borrowers
        self._borrowed: list[tuple[str, nn.Parameter, int]] = []  # tag, weight, owner
        for number, weight in enumerate(shared):
            owner, *borrowers = dict.fromkeys(rank_of[stage] for stage in weight.names)
            name = next((name for stage, name in weight.names.items() if stage in stages), None)
            if name is None or not borrowers:
                continue
            if owner == context.rank:
                self._owned.append((str(number), mine[name], borrowers))
            else:
                self._borrowed.append((str(number), mine[name], owner))
        elsewhere = {parameter for _, parameter, _ in self._borrowed}
        self.pieces = [piece for piece in self.pieces if piece.parameter not in elsewhere]
        self._elsewhere, self._lent = elsewhere, False

    def frozen(self) -> list[Piece]:
        """What this rank owns of the parameters that are not trained."""
        return [piece for piece in super().frozen() if piece.parameter not in self._elsewhere]

    def begin_step(self) -> None:
        """Drop the gradients of the step before."""
        super().begin_step()
        for parameter in self._elsewhere:
            parameter.grad = None

    def finish(self) -> None:
        """Sum the gradients of each tied weight on its owner."""
        arriving = [
            (parameter, self._comm.irecv(self._empty(parameter), rank, f"G{tag}"))
            for tag, parameter, borrowers in self._owned
            if parameter.requires_grad
            for rank in borrowers
        ]
        leaving = [
            self._comm.isend(_gradient(parameter), owner, f"G{tag}")
            for tag, parameter, owner in self._borrowed
            if parameter.requires_grad
        ]
        for parameter, work in arriving:
            gradient = work.wait()
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for work in leaving:
            work.wait()

    @torch.no_grad()
    def updated(self) -> None:
        """Lend the new weights to the borrowers; the first time those that are not trained too."""
        leaving = [
            self._comm.isend(parameter, rank, f"U{tag}")
            for tag, parameter, borrowers in self._owned
            if parameter.requires_grad or not self._lent
            for rank in borrowers
        ]
        arriving = [
            (parameter, self._comm.irecv(self._empty(parameter), owner, f"U{tag}"))
            for tag, parameter, owner in self._borrowed
            if parameter.requires_grad or not self._lent
        ]
        self._lent = True
        for parameter, work in arriving:
            parameter.copy_(work.wait())
        for work in leaving:
            work.wait()

    def _empty(self, parameter: nn.Parameter) -> Tensor:
        """Room for what comes, for a moment."""
        buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        self._ledger.track(buffer, "buffers")
        return buffer


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A stage that did not use the weight in this step has no gradient to add."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
