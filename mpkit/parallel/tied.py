"""Tied weights whose stages are on several ranks: they train as one.

The first stage that computes with a tied weight *owns* it: its rank has the optimizer's states, counts it in the norm
of the gradients, and gives it to checkpoints. The others *borrow* it.

    sum       after the last backward each borrower sends its gradient to the owner, who adds them to its own
    update    the owner alone
    lend      the owner sends the new weight to each borrower

That is about the ranks of one pipeline. Each of them may have replicas, which sum their gradients before, and under
ZeRO hold shards: then these are what is sent, summed and lent, and replicas gather them after.

So a step sends twice a weight for each borrower, as an all-reduce of the gradients would (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", SC 2021, do that for embeddings), and the optimizer's states
exist once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.parallel.replica import Piece, Replica, named_parameters
from mpkit.parallel.stage import Stage

if TYPE_CHECKING:
    from mpkit.launch.context import Context
    from mpkit.parallel.job import Shared

__all__ = ["Tied", "late_parameters"]


class Tied(Replica):
    """What a rank of a pipeline holds, if some of it is tied to what others hold.

    Args:
        context: of this rank.
        shared: the tied weights of the model, the same on every rank.
        rank_of: the rank that holds each stage, of those that this one is in a pipeline with.
        inner: how this rank's stages are kept in step with their replicas. Where these divide a tied weight, owner and
            borrowers divide it alike (`late`), so that what is exchanged are shards.
    """

    def __init__(
        self, context: Context, shared: list[Shared], rank_of: Sequence[int], inner: Replica
    ) -> None:
        super().__init__(inner.stages)
        self._comm, self._device, self._ledger = context.comm, context.device, context.record.ledger
        self._inner, self.divided = inner, inner.divided
        mine = {piece.name: piece for piece in (*inner.pieces, *inner.frozen())}
        self._owned: list[tuple[str, Piece, list[int]]] = []  # tag, weight, borrowers
        self._borrowed: list[tuple[str, Piece, int]] = []  # tag, weight, owner
        for number, weight in enumerate(shared):
            owner, *borrowers = dict.fromkeys(rank_of[stage] for stage in weight.names)
            name = next((name for stage, name in weight.names.items() if stage in inner.stages), None)
            if name is None or not borrowers:
                continue
            if owner == context.rank:
                self._owned.append((str(number), mine[name], borrowers))
            else:
                self._borrowed.append((str(number), mine[name], owner))
        elsewhere = {piece for _, piece, _ in self._borrowed}
        self.pieces = [piece for piece in inner.pieces if piece not in elsewhere]
        self._elsewhere, self._lent = elsewhere, False

    def frozen(self) -> list[Piece]:
        """What this rank owns of the parameters that are not trained."""
        return [piece for piece in self._inner.frozen() if piece not in self._elsewhere]

    # ---- sum and lend -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Sum the gradients of each tied weight on its owner."""
        self._inner.finish()
        arriving = [
            (piece.held, self._comm.irecv(self._empty(piece), rank, f"G{tag}"))
            for tag, piece, borrowers in self._owned
            if piece.parameter.requires_grad
            for rank in borrowers
        ]
        leaving = [
            self._comm.isend(_gradient(piece.held).to(self._device), owner, f"G{tag}")
            for tag, piece, owner in self._borrowed
            if piece.parameter.requires_grad
        ]
        for held, work in arriving:
            gradient = work.wait().to(held.device)
            held.grad = gradient if held.grad is None else held.grad.add_(gradient)
        for work in leaving:
            work.wait()

    @torch.no_grad()
    def updated(self) -> None:
        """Lend the new weights to the borrowers; the first time those that are not trained too."""
        leaving = [
            self._comm.isend(piece.held.to(self._device), rank, f"U{tag}")
            for tag, piece, borrowers in self._owned
            if piece.parameter.requires_grad or not self._lent
            for rank in borrowers
        ]
        arriving = [
            (piece.held, self._comm.irecv(self._empty(piece), owner, f"U{tag}"))
            for tag, piece, owner in self._borrowed
            if piece.parameter.requires_grad or not self._lent
        ]
        self._lent = True
        for held, work in arriving:
            held.copy_(work.wait())
        for work in leaving:
            work.wait()
        self._inner.updated()

    def _empty(self, piece: Piece) -> Tensor:
        """Room for what comes, for a moment."""
        buffer = torch.empty(piece.held.shape, dtype=piece.held.dtype, device=self._device)
        self._ledger.track(buffer, "buffers")
        return buffer

    # ---- the rest is as if nothing were tied ----------------------------------------------------------------

    @property
    def layout(self) -> list[str]:
        """As it is without ties."""
        return self._inner.layout

    def lay_out(self, names: list[str]) -> None:
        """As without ties."""
        self._inner.lay_out(names)

    def begin_step(self) -> None:
        """As without ties."""
        self._inner.begin_step()

    def before_backward(self, last: bool, stage: int = 0) -> None:
        """As without ties."""
        self._inner.before_backward(last, stage)

    def after_backward(self) -> None:
        """As without ties."""
        self._inner.after_backward()

    def after_input_grads(self) -> None:
        """As without ties."""
        self._inner.after_input_grads()

    def before_weight_grads(self, stage: int) -> None:
        """As without ties."""
        self._inner.before_weight_grads(stage)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """As without ties."""
        with self._inner.gathered():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """As without ties: borrowers know the weight by names of their own."""
        return self._inner.state_dict()


def late_parameters(stages: dict[int, Stage], shared: list[Shared]) -> list[nn.Parameter]:
    """The parameters whose gradients come from several stages, here or elsewhere.

    Args:
        stages: this rank's.
        shared: the tied weights of the model.
    """
    mine = named_parameters(stages)
    names = {name for weight in shared for stage, name in weight.names.items() if stage in stages}
    return [parameter for name, parameter in mine.items() if name in names]


def _gradient(held: nn.Parameter) -> Tensor:
    """A stage that did not use the weight in this step has no gradient to add."""
    return torch.zeros_like(held) if held.grad is None else held.grad
