"""ZeRO: what all replicas would hold alike is sharded among them.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5. Of psi parameters in mixed precision with Adam, n ranks hold, each, in bytes:

                    parameters   gradients   optimizer states
    DDP                2 psi        2 psi         12 psi
    1  P_os            2 psi        2 psi         12 psi / n
    2  P_os+g          2 psi        2 psi / n     12 psi / n
    3  P_os+g+p        2 psi / n    2 psi / n     12 psi / n

and a step goes through these phases:

    gather     (3) a layer's parameters just before its forward and its backward, freed after        `gather`
    reduce     gradients to who keeps their shard, while the backward goes on                         `gradients`
    update     each rank the optimizer on its shard
    renew      (1, 2) the updated shards are gathered into everybody's parameters

The whole of each stage in 20 to 40 lines: `mpkit.reference.zero1`, `zero2` and `zero3`. This package adds: parameters
whose size the ranks do not divide, buckets, prefetch, offload, micro-batches, pipelines with several stages per rank,
tied, frozen and unused parameters, models that use a parameter outside of its own layer, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.models.chain import layers_of
from mpkit.parallel.axis import Axis
from mpkit.parallel.replica import Piece, Replica, named_parameters
from mpkit.parallel.stage import Stage
from mpkit.parallel.stateful import StatefulBuffers
from mpkit.parallel.zero.flat import Flat, Layout
from mpkit.parallel.zero.gather import Gathering
from mpkit.parallel.zero.gradients import Gradients
from mpkit.parallel.zero.units import group, sites_of
from mpkit.plan import Plan
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Zero", "shard"]


class Zero(Replica):
    """A replica that holds its shards, and what its stage of ZeRO leaves whole.

    Args:
        context: of this rank.
        plan: zero, offload, bucket_mb, prefetch, unused, batchnorm.
        stages: what they hold of the model, on this rank's device.
        replicas: the ranks that would hold the same.
        late: parameters that several stages of the model use.

    Attributes:
        pieces: of every parameter that is trained this rank's part, maybe of no elements.
    """

    divided = True

    def __init__(
        self,
        context: Context,
        plan: Plan,
        stages: dict[int, Stage],
        replicas: Axis,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(stages)
        self._replicas, self._record = replicas, context.record
        self._stage, self._on_host = plan.zero, plan.offload == "params"
        module = nn.ModuleList(stage.layers for stage in stages.values())
        sites = sites_of(stages)
        # ---- flat tensors of parameters, as the first replica has them
        alike = {piece.parameter for piece in (*self.pieces, *super().frozen()) if piece.shard is None}
        units = group(sites, plan.zero, int(plan.bucket_mb * 2**20), set(late), alike)
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
        """Everybody takes the first replica's buffers, and parameters that are not sharded."""
        sharded = {parameter for flat in self._params for parameter in flat.layout.parameters}
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in sharded:
                self._replicas.broadcast(tensor.detach())

    def _divide(self) -> None:
        """Put this rank's parts in the place of whole parameters."""
        gradients_of = {id(grads.layout): grads for grads, _ in self._grads}
        self._gradient_of: list[tuple[Piece, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # of gradient shards on the host
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
        self._frozen = [found.get(piece.parameter, piece) for piece in super().frozen()]

    def frozen(self) -> list[Piece]:
        """What this rank holds of the parameters that are not trained: all of them; in stage 3 its shards."""
        return self._frozen

    # ---- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take the first replica's buffers where they changed; no gradient has come."""
        self._stateful.synchronize()
        for piece in self.pieces:
            piece.held.grad = None
        self._gradients.begin_step()

    def before_backward(self, last: bool, stage: int = 0) -> None:
        """Stages 2 and 3 of ZeRO reduce the gradients of every backward, stage 1 of the last."""
        self._gradients.before_backward(last, stage)

    def after_backward(self) -> None:
        """Nothing of a layer stays."""
        self._gradients.after_backward()
        if self._gathering is not None:
            self._gathering.after_backward()

    def after_input_grads(self) -> None:
        """Nothing of a layer stays."""
        if self._gathering is not None:
            self._gathering.after_backward()

    def before_weight_grads(self, stage: int) -> None:
        """W goes from node to node, and no hook tells which layer is next: have the stage's parameters whole."""
        if self._gathering is not None:
            self._gathering.gather_stage(stage)

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

    def updated(self) -> None:
        """Gather the updated shards into everybody's parameters; in stage 3 that is done when they are needed."""
        if self._gathering is not None:
            self._gathering.after_backward()  # what is whole still is out of date
        else:
            works = [self._replicas.start_all_gather(flat.shard, out=flat.whole) for flat in self._params]
            for work in works:
                work.wait()

    # ---- the end ------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all parameters are whole on every rank; every rank enters. What is written into them is lost."""
        if self._gathering is None:
            yield
        else:
            with self._gathering.gathered():
                yield

    def state_dict(self) -> dict[str, Tensor]:
        """The state on the first replica, nothing on the others; every rank calls it."""
        self._stateful.synchronize()
        with self._record.span("gather the weights"), self.gathered():
            if self._replicas.index != 0:
                return {}
            # Copies: what is gathered is gone when this block is over.
            return {name: value.clone() for name, value in super().state_dict().items()}


def shard(context: Context, model: nn.Module, stage: int = 3, **options: Any) -> Zero:
    """Shard a model of your own, in a function that `Cluster.run` calls on every rank.

    The model's layers work as before, on the same tensors in and out; what is held of them is this rank's shard.

    Args:
        context: the function's first argument.
        model: on `context.device`, or copied there.
        stage: of ZeRO, 1 to 3.
        options: other fields of a Plan, such as prefetch.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    ...     zero = shard(ctx, model)
    ...     optimizer = torch.optim.SGD([piece.held for piece in zero.pieces], lr=0.1)
    ...     zero.begin_step()
    ...     zero.before_backward(last=True)
    ...     model(torch.ones(3, 4)).mean().backward()
    ...     zero.finish()
    ...     optimizer.step()
    ...     zero.updated()
    ...     with zero.gathered():
    ...         return [tuple(piece.held.shape) for piece in zero.pieces], model[0].weight.shape
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)[0]
    ([(20,), (0,), (9,), (0,)], torch.Size([8, 4]))
    """
    plan = Plan(dp=context.world_size, zero=stage, **options)
    return Zero(context, plan, {0: Stage(0, layers_of(model), context.device)}, Axis(context.comm))
