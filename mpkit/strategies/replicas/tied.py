"""Tied weights of stages on several ranks, trained as one weight.

The first stage that computes with a tied weight *owns* it: its rank keeps the optimizer states, counts the weight in
the norm of the gradients, and saves it in checkpoints. The other stages hold copies.

    sum       after the last backward each copy's rank sends its gradient to the owner, which adds it to its own
    update    only the owner updates the weight
    send      the owner sends the new weight to the rank of each copy

This concerns the ranks of one pipeline. Each may have replicas, which sum their gradients first. Under ZeRO, ranks
send, sum and return shards, and replicas gather them afterwards.

Each step sends a weight twice per copy, as an all-reduce of the gradients would (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", SC 2021, do that for embeddings), and the optimizer states exist
only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.strategies.stage.gradient_sync import GradientSync, Piece, named_parameters
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.partition.value import SharedWeight
    from mpkit.strategies.rank_context import Context


class TiedWeights:
    """The weights of this rank's stages that are tied to weights of other stages.

    Args:
        shared: the model's tied weights, the same on every rank.
        rank_of: the rank that holds each stage, within this rank's pipeline.
        sync: synchronizes this rank's stages with their replicas; copies are removed from its pieces. If replicas
            divide a tied weight, the ranks of all copies divide it in the same way, so that they can exchange shards.
    """

    def __init__(
        self, context: Context, shared: Sequence[SharedWeight], rank_of: Sequence[int], sync: GradientSync
    ) -> None:
        self._comm, self._device, self._ledger = context.comm, context.device, context.record.ledger
        mine = {piece.name: piece for piece in (*sync.pieces, *sync.frozen)}
        self._owned: list[tuple[str, Piece, list[int]]] = []  # tag, weight, ranks of its copies
        self._copies: list[tuple[str, Piece, int]] = []  # tag, weight, owner
        for number, weight in enumerate(shared):
            owner, *holders = dict.fromkeys(rank_of[stage] for stage in weight.names)
            name = next((name for stage, name in weight.names.items() if stage in sync.stages), None)
            if name is None or not holders:
                continue
            if owner == context.rank:
                self._owned.append((str(number), mine[name], holders))
            else:
                self._copies.append((str(number), mine[name], owner))
        copies = {piece for _, piece, _ in self._copies}
        sync.pieces = [piece for piece in sync.pieces if piece not in copies]
        sync.frozen = [piece for piece in sync.frozen if piece not in copies]
        self._sent = False  # whether the first exchange, which includes frozen weights, is done

    def sum_gradients(self) -> None:
        """Sum the gradients of each tied weight on its owner."""
        arriving = [
            (piece.held, self._comm.irecv(self._empty(piece), rank, f"G{tag}"))
            for tag, piece, holders in self._owned
            if piece.parameter.requires_grad
            for rank in holders
        ]
        leaving = [
            self._comm.isend(_gradient(piece.held).to(self._device), owner, f"G{tag}")
            for tag, piece, owner in self._copies
            if piece.parameter.requires_grad
        ]
        for held, work in arriving:
            gradient = work.wait().to(held.device)
            held.grad = gradient if held.grad is None else held.grad.add_(gradient)
        for work in leaving:
            work.wait()

    @torch.no_grad()
    def send_weights(self) -> None:
        """Send the new weights to the ranks of their copies; the first time, also frozen weights."""
        leaving = [
            self._comm.isend(piece.held.to(self._device), rank, f"U{tag}")
            for tag, piece, holders in self._owned
            if piece.parameter.requires_grad or not self._sent
            for rank in holders
        ]
        arriving = [
            (piece.held, self._comm.irecv(self._empty(piece), owner, f"U{tag}"))
            for tag, piece, owner in self._copies
            if piece.parameter.requires_grad or not self._sent
        ]
        self._sent = True
        for held, work in arriving:
            held.copy_(work.wait())
        for work in leaving:
            work.wait()

    def _empty(self, piece: Piece) -> Tensor:
        """Allocate a temporary buffer to receive into."""
        buffer = torch.empty(piece.held.shape, dtype=piece.held.dtype, device=self._device)
        self._ledger.track(buffer, "buffers")
        return buffer


def tied_parameters(stages: dict[int, Stage], shared: Sequence[SharedWeight]) -> list[nn.Parameter]:
    """Return the parameters whose gradients come from several stages, here or elsewhere."""
    mine = named_parameters(stages)
    names = {name for weight in shared for stage, name in weight.names.items() if stage in stages}
    return [parameter for name, parameter in mine.items() if name in names]


def _gradient(held: nn.Parameter) -> Tensor:
    """Return the gradient, or zeros in a stage that did not use the weight in this step."""
    return torch.zeros_like(held) if held.grad is None else held.grad
