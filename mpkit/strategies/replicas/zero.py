"""ZeRO: flat tensors of states, of which each replica keeps and updates its shard.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5. With psi parameters in mixed precision with Adam, each of n ranks holds, in bytes:

                          parameters   gradients   optimizer states
    DDP                      2 psi        2 psi         12 psi
    Zero1  P_os              2 psi        2 psi         12 psi / n
    Zero2  P_os+g            2 psi        2 psi / n     12 psi / n
    Zero3  P_os+g+p          2 psi / n    2 psi / n     12 psi / n

Each stage is a class; its docstring has the stage's own step. All of them

    flatten       parameters and their gradients into flat tensors, cut into one shard per rank (`units`, `flat`)
    begin_step    drop the gradients
    backward      reduce gradients to the rank that keeps their shard (`reducer`)
    finish        give each of this rank's pieces its gradient
    update        these pieces, with the optimizer (`mpkit.strategies.update`)
    renew         every rank's parameters

Hybrid sharding (HSDP) divides the replicas into groups, such as nodes, of dp_shard ranks. ZeRO shards within each
group: above, n is dp_shard, and gathers and reduce-scatters stay inside. Ranks of different groups hold the same
shards, and sum their gradients by an all-reduce of the shard once per step
(`mpkit.strategies.reference.hybrid_shards`).

Source of hybrid sharding: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
section 3.2.2; Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", VLDB 2022.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import ClassVar

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.wire import PendingWork
from mpkit.strategies.replicas.buffers import BufferedSync, broadcast_tensors
from mpkit.strategies.replicas.flat import Flat, FlatLayout, ShardedFlat
from mpkit.strategies.replicas.gather import GatherHooks
from mpkit.strategies.replicas.part import Holders, ReplicatedPart
from mpkit.strategies.replicas.reducer import Gradients, Reducer, ShardedGradients, WholeGradients
from mpkit.strategies.replicas.units import Unit, sites_of, units_of
from mpkit.strategies.stage.gradient_sync import Half, Piece, named_parameters
from mpkit.trace import Kind


class Zero(BufferedSync):
    """This rank's shards; `pieces` has its part of every trained parameter, possibly empty."""

    divided = True
    flat_params: ClassVar[type[Flat]]
    flat_grads: ClassVar[type[Gradients]]

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        self._sites = sites_of(held.stages)
        units = units_of(
            self._sites, held.plan.zero, held.bucket_bytes, held.tied, held.unit_kinds, by_owner=held.by_owner
        )
        # ---- flatten: the first replica's parameters
        self._params = [self._flatten(unit, held) for unit in units]
        sharded = {parameter for flat in self._params for parameter in flat.layout.parameters}
        for replicas, tensors in held.by_replicas():
            broadcast_tensors(replicas, (tensor for tensor in tensors if tensor not in sharded))
        self.watch_buffers(held)
        # ---- flatten: their gradients
        self._grads = [
            self._gradients_of(unit, flat.layout, held.holders_of(unit.parameters[0]))
            for unit, flat in zip(units, self._params, strict=True)
            if unit.parameters[0].requires_grad
        ]
        # ---- divide
        self.pieces_of = self._divide()
        for each in (*self._params, *(grads.flat for grads in self._grads)):
            held_names = [piece.name for piece in self.pieces_of[each.layout]]
            each.layer, each.names = _layer_of(held_names), " ".join(held_names)
        self._gradient_of = self._pair([grads.flat.parts for grads in self._grads])
        names = {piece.parameter: piece.name for piece, _ in self._gradient_of}
        self._reducer = Reducer(
            held.replicas, self._grads, names,
            allows_unused=held.allows_unused, allow_unused=held.allow_unused,
        )  # fmt: skip

    def _flatten(self, unit: Unit, held: ReplicatedPart) -> Flat:
        """Move a unit's parameters into a flat tensor, and make them views of it."""
        holders = held.holders_of(unit.parameters[0])
        layout = FlatLayout(unit.parameters, holders.shard.index, holders.shard.size, by_owner=held.by_owner)
        flat = self.flat_params(layout, self._record, "params", holders.shard)
        flat.whole.zero_()
        for parameter, view in zip(unit.parameters, flat.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        holders.replicas.broadcast(flat.whole)
        flat.shard.copy_(flat.mine)
        flat.free()
        return flat

    def _gradients_of(self, unit: Unit, layout: FlatLayout, holders: Holders) -> Gradients:
        """Make room for a unit's gradients; those of a tied weight accumulate in every stage of ZeRO."""
        keep = WholeGradients if unit.stage is None else self.flat_grads
        return keep(layout, self._record, holders.shard, unit.stage, holders.replicate)

    def _divide(self) -> dict[FlatLayout, list[Piece]]:
        """Replace whole parameters by this rank's parts of them; return these parts by the flat tensor's layout."""
        names = {parameter: name for name, parameter in named_parameters(self.stages).items()}
        pieces_of: dict[FlatLayout, list[Piece]] = {}
        for flat in self._params:
            layout = flat.layout
            pieces_of[layout] = []
            for i, parameter in enumerate(layout.parameters):
                held = nn.Parameter(flat.parts[i], parameter.requires_grad)
                pieces_of[layout].append(self._piece(names[parameter], parameter, *layout.own(i), held))
        found = {piece.parameter: piece for pieces in pieces_of.values() for piece in pieces}
        self.pieces = [found.get(piece.parameter, piece) for piece in self.pieces]
        self.frozen = [found.get(piece.parameter, piece) for piece in self.frozen]
        return pieces_of

    def _pair(self, parts: list[list[Tensor]]) -> list[tuple[Piece, Tensor]]:
        """Pair each trained piece with its gradient, one of these parts of each unit's shard."""
        return [
            pair
            for grads, of_unit in zip(self._grads, parts, strict=True)
            for pair in zip(self.pieces_of[grads.layout], of_unit, strict=True)
        ]

    # ---- a step: shared by the stages

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for piece, _ in self._gradient_of:
            piece.held.grad = None
        self._reducer.begin_step()

    def finish(self) -> None:
        """Wait for the gradients of this rank's pieces: None for parameters that no rank used."""
        unused = self._reducer.finish()
        for piece, gradient in self._gradient_of:
            piece.held.grad = None if piece.parameter in unused else gradient

    def renew(self) -> None:
        """All-gather the updated shards into every rank's parameters."""
        works = []
        for flat in self._params:
            with flat.shard_group.wire.sending_for(flat.layer):
                works.append(flat.start_all_gather())
        for work in works:
            work.wait()

    # ---- the end

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the first replica of each part, and nothing on the others; all ranks call it."""
        with self._record.span("gather the weights"), self.gathered():
            # Copies, since gathered parameters are freed at the end of this block.
            return {name: value.clone() for name, value in super().state_dict().items()}


def _layer_of(names: list[str]) -> str:
    """Return the innermost module that holds all of these parameters; "" for the model.

    >>> _layer_of(["h.3.attn.weight", "h.3.attn.bias", "h.3.mlp.weight"]), _layer_of(["embed.weight", "norm.weight"])
    ('h.3', '')
    """
    paths = [name.split(".")[:-1] for name in names]
    common = zip(*paths, strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, common))


# ---------------------------------------------------------------- stages 1 and 2


class Zero1(Zero):
    """P_os: parameters and gradients stay whole; each of n replicas keeps the optimizer states of its n-th.

        backward          gradients accumulate, whole, until the last micro-batch
        reduce-scatter    in the last backward, as soon as a flat tensor is full: rank r gets the sum of its shard
        update            the shard, with this rank's optimizer states
        all-gather        the updated shards, into every rank's parameters

    The volume is DDP's, 2 psi. `mpkit.strategies.reference.zero1` is the algorithm. This class adds micro-batches,
    buckets, overlap with the backward, parameters whose size is not a multiple of n, several stages per rank, and tied,
    frozen and unused parameters.

    For an optimizer that needs whole parameters, such as Muon, each parameter's states are on one rank, its owner
    (`FlatLayout`). Then a stage's gradients are one flat tensor, which balances the owners, reduced at the end of the
    backward. Source: section 5.1.
    """

    flat_params = Flat
    flat_grads = WholeGradients

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter gradients in a stage's last backward; in the others they accumulate."""
        with self._reducer.backward(last, half):
            yield


class Zero2(Zero):
    """P_os+g: as ZeRO-1, and each rank keeps the gradients of its shards only.

        backward      as soon as a flat tensor of gradients is full: reduce-scatter it, add to the shard, free the rest
        update        the shard, with this rank's optimizer states
        all-gather    the updated shards, into every rank's parameters

    The volume is DDP's, 2 psi, if a step has one micro-batch; with m of them, every backward reduces: (m + 1) psi.
    A rank holds 2 psi / n bytes of gradients, and those being reduced. `mpkit.strategies.reference.zero2` is the
    algorithm. Source: section 5.2.
    """

    flat_params = Flat
    flat_grads = ShardedGradients

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter the gradients of every backward, and add them to the shards."""
        with self._reducer.backward_of(stage, last, half):
            yield


class Zero3(Zero):
    """P_os+g+p: each rank keeps its n-th of everything, and a layer's parameters are whole while it computes.

        forward     layer by layer: all-gather its parameters, compute, free them (`gather`)
        backward    layer by layer: all-gather again, compute; reduce-scatter the gradients, free both
        update      the shards, with this rank's optimizer states

    With one micro-batch each parameter is gathered twice and its gradient reduced once: 3 psi, 1.5 times DDP's volume.
    `mpkit.strategies.reference.zero3` is the algorithm. Source: sections 5.3 and 7.2.2.
    """

    flat_params = ShardedFlat
    flat_grads = ShardedGradients

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        self._gathering = GatherHooks(self._sites, self._params, prefetch=held.plan.prefetch)

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter the gradients of every backward; free the parameters that it gathered."""
        with self._reducer.backward_of(stage, last, half):
            self._gathering.goes_back = True
            if half == "W":  # it goes from node to node, and no hook shows which layer is next
                self._gathering.gather_stage(stage)
            yield
        self._gathering.after_backward()

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Evaluate with the first replica's buffers; then free the parameters that the forwards gathered."""
        with super().evaluation_mode():
            yield
        self._gathering.after_backward()

    def renew(self) -> None:
        """Free parameters that are still whole and now out of date; the next forward gathers the updated shards."""
        self._gathering.after_backward()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole inside the block, which every rank enters. Changes to them are lost."""
        with self._gathering.gather_all():
            yield


class OffloadedFlat(ShardedFlat):
    """A flat tensor with its shard in the host's memory, which the device's ledger does not count."""

    def _new_shard(self, category: str) -> Tensor:
        # Pinned, so that the device can read it without the CPU.
        return torch.zeros(self.layout.k, dtype=self.whole.dtype, device="cpu", pin_memory=self.whole.is_cuda)

    def start_all_gather(self) -> PendingWork:
        """Copy the shard to its place on the device, and start gathering the others."""
        op = self._record.begin(Kind.COPY_TO_DEVICE, nbytes=self.shard.nbytes)
        self.mine.copy_(self.shard, non_blocking=True)
        self._record.end(op)
        return self.shard_group.all_gather(self.mine, async_op=True, out=self.whole)


class OffloadedZero3(Zero3):
    """Stage 3 with pieces, their gradients (after `finish`) and the update on the host.

    Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021.
    """

    flat_params = OffloadedFlat

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        self._host = [torch.empty_like(grads.flat.shard, device="cpu") for grads in self._grads]
        self._gradient_of = self._pair(
            [grads.layout.parts(host) for grads, host in zip(self._grads, self._host, strict=True)]
        )

    def finish(self) -> None:
        """Wait for the gradients of this rank's pieces, and copy them to the host."""
        super().finish()
        shards = [grads.flat.shard for grads in self._grads]
        op = self._record.begin(Kind.COPY_TO_HOST, nbytes=sum(shard.nbytes for shard in shards))
        for host, shard in zip(self._host, shards, strict=True):
            host.copy_(shard)
        self._record.end(op)


def zero_sync(held: ReplicatedPart) -> Zero:
    """Return the stage of ZeRO that the plan asks for."""
    offloads = held.plan.offload == "params"
    return {1: Zero1, 2: Zero2, 3: OffloadedZero3 if offloads else Zero3}[held.plan.zero](held)
