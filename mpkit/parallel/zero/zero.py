"""ZeRO: what every replica would hold is sharded among the replicas.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5. With psi parameters in mixed precision with Adam, each of n ranks holds, in bytes:

                    parameters   gradients   optimizer states
    DDP                2 psi        2 psi         12 psi
    1  P_os            2 psi        2 psi         12 psi / n
    2  P_os+g          2 psi        2 psi / n     12 psi / n
    3  P_os+g+p        2 psi / n    2 psi / n     12 psi / n

and a step goes through these phases:

    gather     (3) a layer's parameters just before its forward and its backward, and free them after   `gather`
    reduce     gradients to the rank that keeps their shard, while the backward pass runs               `gradients`
    update     this rank's shard, with the optimizer
    renew      (1, 2) every rank's parameters, by gathering the updated shards

`mpkit.reference.zero1`, `zero2` and `zero3` are the three stages in 20 to 40 lines each. This package adds parameters
whose size is no multiple of the number of ranks, buckets, prefetch, offload, micro-batches, pipelines with several
stages per rank, tied, frozen and unused parameters, models that use a parameter outside of its own layer, and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.comm.communicator import Communicator
from mpkit.parallel.data_parallel.buffers import StatefulBuffers
from mpkit.parallel.stage.gradient_sync import GradientSync, Half, Piece, named_parameters
from mpkit.parallel.stage.stage import Stage
from mpkit.parallel.zero.flat import Flat, Layout
from mpkit.parallel.zero.gather import Gathering
from mpkit.parallel.zero.gradients import Gradients
from mpkit.parallel.zero.units import group, sites_of
from mpkit.plan.plan import Plan
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.process.context import Context

__all__ = ["Zero"]


class Zero(GradientSync):
    """This rank's shards, and what its stage of ZeRO leaves whole.

    Args:
        context: this rank's context.
        plan: read for zero, offload, bucket_mb, prefetch, unused and batchnorm.
        stages: this rank's part of the model, on its device.
        replicas: the ranks that would hold the same part.
        tied: parameters that several stages of the model use.

    Attributes:
        pieces: this rank's part of every trained parameter, possibly empty.
    """

    divided = True

    def __init__(
        self,
        context: Context,
        plan: Plan,
        stages: dict[int, Stage],
        replicas: Communicator,
        tied: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(stages)
        self._replicas, self._record = replicas, context.record
        self._stage, self._on_host = plan.zero, plan.offload == "params"
        module = nn.ModuleList(stage.layers for stage in stages.values())
        sites = sites_of(stages)
        # ---- flat tensors of parameters, as the first replica has them
        alike = {piece.parameter for piece in (*self.pieces, *self.frozen) if piece.shard is None}
        units = group(sites, plan.zero, int(plan.bucket_mb * 2**20), set(tied), alike)
        self._params = [self._flatten(unit.parameters) for unit in units]
        self._broadcast_rest(module)
        self._stateful = StatefulBuffers(replicas, plan, module)
        # ---- of their gradients
        ledger, keeps_whole = context.record.ledger, plan.zero == 1
        self._grads: list[tuple[Flat, int | None]] = []
        for unit, flat in zip(units, self._params, strict=True):
            if unit.parameters[0].requires_grad:
                accumulates = keeps_whole or unit.stage is None
                gradients = Flat(flat.layout, ledger, "grads", keeps_whole=accumulates)
                gradients.drop()
                self._grads.append((gradients, unit.stage))
        self._divide()
        self._gradients = Gradients(
            replicas,
            self._grads,
            {piece.parameter: piece.name for piece in self.pieces},
            keeps_whole=keeps_whole,
            allows_unused=plan.unused == "allow",
        )
        # ---- stage 3: parameters come and go
        self._gathering = None
        if plan.zero == 3:
            self._gathering = Gathering(
                replicas, self._record, sites, self._params, prefetch=plan.prefetch, on_host=self._on_host
            )

    def _flatten(self, parameters: list[nn.Parameter]) -> Flat:
        """Move parameters into a flat tensor, of which they become views."""
        layout = Layout(parameters, self._replicas.index, self._replicas.size)
        flat = Flat(layout, self._record.ledger, "params", keeps_whole=self._stage < 3, on_host=self._on_host)
        for parameter, view in zip(parameters, flat.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        flat.whole[layout.numel :] = 0
        self._replicas.broadcast(flat.whole)
        flat.shard.copy_(flat.mine)
        flat.free()
        return flat

    def _broadcast_rest(self, module: nn.Module) -> None:
        """Broadcast the first replica's buffers, and parameters that are not sharded."""
        sharded = {parameter for flat in self._params for parameter in flat.layout.parameters}
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in sharded:
                self._replicas.broadcast(tensor.detach())

    def _divide(self) -> None:
        """Replace whole parameters by this rank's parts of them."""
        gradients_of = {id(grads.layout): grads for grads, _ in self._grads}
        self._gradient_of: list[tuple[Piece, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # host copies of gradient shards
        found: dict[nn.Parameter, Piece] = {}
        names = {parameter: name for name, parameter in named_parameters(self.stages).items()}
        for flat in self._params:
            pieces = []
            for i, parameter in enumerate(flat.layout.parameters):
                held = nn.Parameter(flat.parts[i], parameter.requires_grad)
                pieces.append(self._piece(names[parameter], parameter, *flat.layout.own(i), held))
                found[parameter] = pieces[-1]
            gradients = gradients_of.get(id(flat.layout))
            if gradients is not None:
                parts = gradients.parts
                if self._on_host:
                    on_host = torch.empty_like(flat.shard)
                    self._copies.append((on_host, gradients.shard))
                    parts = flat.layout.parts(on_host)
                self._gradient_of += zip(pieces, parts, strict=True)
        self.pieces = [found[piece.parameter] for piece in self.pieces]
        self.frozen = [found.get(piece.parameter, piece) for piece in self.frozen]

    # ---- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take the first replica's buffers where they changed, and drop all gradients."""
        self._stateful.synchronize()
        for piece, _ in self._gradient_of:
            piece.held.grad = None
        self._gradients.begin_step()

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce the gradients of every backward in stages 2 and 3 of ZeRO, those of the last one in stage 1."""
        if half != "I":
            self._gradients.before_backward(last, stage)
        if half == "W" and self._gathering is not None:
            # W goes from node to node, and no hook shows which layer is next: keep all of the stage's parameters whole.
            self._gathering.gather_stage(stage)
        yield
        if half != "I":
            self._gradients.after_backward()
        if self._gathering is not None:
            self._gathering.after_backward()

    def finish(self) -> None:
        """Wait for the gradients of this rank's pieces.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        unused = self._gradients.finish()
        if self._on_host:
            op = self._record.begin(Kind.COPY_TO_HOST, nbytes=sum(there.nbytes for _, there in self._copies))
            for host, there in self._copies:
                host.copy_(there)
            self._record.end(op)
        for piece, gradient in self._gradient_of:
            piece.held.grad = None if piece.parameter in unused else gradient

    def renew(self) -> None:
        """Gather the updated shards into every rank's parameters; stage 3 does that when they are needed."""
        if self._gathering is not None:
            self._gathering.after_backward()  # what is still whole is out of date
        else:
            works = [
                self._replicas.all_gather(flat.shard, async_op=True, out=flat.whole) for flat in self._params
            ]
            for work in works:
                work.wait()

    # ---- the end ------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole inside the block, which every rank enters. Changes to them are lost."""
        if self._gathering is None:
            yield
        else:
            with self._gathering.gathered():
                yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the first replica, and nothing on the others; every rank calls it."""
        self._stateful.synchronize()
        with self._record.span("gather the weights"), self.gathered():
            if self._replicas.index != 0:
                return {}
            # Copies, since gathered parameters are freed at the end of this block.
            return {name: value.clone() for name, value in super().state_dict().items()}
