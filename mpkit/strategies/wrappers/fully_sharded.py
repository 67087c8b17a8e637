"""mk.fully_shard: ZeRO around a module, for a loop of one's own.

    share        each parameter of the module becomes this rank's share of it (`shares`): what the optimizer is given
    forward      shares that an optimizer has changed reach all ranks: at once in stages 1 and 2, layer by layer in
                 stage 3
    backward     gradients are reduced while autograd goes on, and their means added to those of the shares
    then         optimizer.step(), on each rank its shares

Parameters with one dimension (biases, weights of norms) stay whole on each rank, as small ones do in DeepSpeed
(`stage3_param_persistence_threshold`): there is little to save, and layers can use them at any time. Their gradients
are averaged as in `mk.ddp`, in one bucket at the end of the backward.

The stages are those of `mpkit.strategies.zero`; `half_precision` computes in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import _current_graph_task_id
from mpkit.plan.plan import Plan
from mpkit.strategies.data_parallel.broadcast import broadcast_all
from mpkit.strategies.data_parallel.ddp import DDP
from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.prepare.arguments.task import raise_rejection
from mpkit.strategies.prepare.layers import find_wrong_embedding
from mpkit.strategies.proof.whole_step import Elements
from mpkit.strategies.stage.stage import PRECISIONS, Stage
from mpkit.strategies.update.master_weights import Masters, narrow
from mpkit.strategies.wrappers.backward import ModuleBackwards
from mpkit.strategies.wrappers.gradient_part import clip
from mpkit.strategies.wrappers.half_precision import Half
from mpkit.strategies.wrappers.loop_proof.proof import LoopProof
from mpkit.strategies.wrappers.loop_proof.weights import HeldElements
from mpkit.strategies.wrappers.replicas import (
    Group,
    context_for,
    replicas_of,
    shard_groups_of,
)
from mpkit.strategies.wrappers.shares import ShardedParameters
from mpkit.strategies.wrappers.wrapper import HeldParameters, ModuleWrapper
from mpkit.strategies.zero.stages import zero_sync
from mpkit.trace import Kind

__all__ = ["FullySharded"]

UNUSED = "find_unused_parameters=True in mk.fully_shard"


class FlatNamedModule(nn.Module):
    """Parameters by the names that they have elsewhere, dots included."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._parameters.update(named)


class FullySharded(ModuleWrapper):
    """A module of which each rank keeps its shard; made by `mk.fully_shard`.

    Args:
        module: the module, which is changed in place.
        plan: read for dp and its groups, zero, precision, bucket_mb, prefetch, unused and offload.
        group: the ranks that share the work.
        prove: the number of steps that are compared with plain PyTorch.

    Attributes:
        skipped: number of backwards in fp16 whose gradients were not finite, and were dropped on all ranks.
    """

    def __init__(self, module: nn.Module, plan: Plan, group: Group, prove: int = 0) -> None:
        context = context_for(module)
        replicas = replicas_of(context, group, hybrid=True)
        groups = shard_groups_of(context, group, plan)
        self._shard_group = groups.shard if groups else replicas
        raise_rejection(find_wrong_embedding(module, shared=replicas.size > 1, local=True))
        dtype = PRECISIONS.get(plan.precision)
        proof = LoopProof("mk.fully_shard", prove, module, replicas, dtype=dtype, divided=True)
        super().__init__(module)
        self._replicas, self._record = replicas, context.record
        self._stage = plan.zero
        small = {name: p for name, p in module.named_parameters() if p.dim() < 2}
        # ---- 16 bits: the first rank's parameters, before they are cast
        if plan.precision != "full":
            broadcast_all(self._replicas, module)
        fp32_params = narrow(plan, module)
        self._half = Half(plan.precision, self._replicas, context.device)
        # Before the hooks of strategies, which need a backward that has begun; after the cast, since autograd remembers
        # the dtype.
        self._backwards = ModuleBackwards(module.parameters(), self._begin, self._end, second=plan.zero < 3)
        # ---- shard what is large, replicate what is small
        stage = Stage(0, [("", module)], context.device)
        self._sync = zero_sync(
            ReplicatedPart(
                context,
                plan,
                {0: stage},
                self._replicas,
                whole=tuple(small.values()),
                allow_unused=UNUSED,
                groups=groups,
            )
        )
        own = Stage(0, [("", FlatNamedModule(small))], context.device)
        self._small = DDP(ReplicatedPart(context, plan, {0: own}, self._replicas, allow_unused=UNUSED))
        # ---- share
        in_zero = [piece for pieces in self._sync.pieces_of.values() for piece in pieces]
        rest = [piece for piece in self._sync.frozen if piece not in in_zero and piece.name not in small]
        pieces = [*in_zero, *rest, *self._small.pieces, *self._small.frozen]
        # Of frozen ones too, which a state has in full precision.
        numbers = [piece for piece in pieces if piece.parameter.is_floating_point()]
        masters = Masters(context, plan, numbers, fp32_params)
        self._shares = ShardedParameters(
            module, pieces, self._sync.pieces_of, masters, self._shard_group, context.record.ledger
        )
        self._is_shared = set(in_zero)
        self._open: ExitStack | None = None
        self._stale = False  # whether a backward was complete since the shares reached all ranks
        self._op = -1
        allows_unused = plan.unused == "allow"
        self._held = HeldParameters(module, "mk.fully_shard", allows_unused=allows_unused)
        self._proof = proof
        held = [
            HeldElements(Elements(context.rank, p.name, p.start, None), share)
            for p, share in self._shares.of.items()
        ]
        proof.attach(module, held)
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    @property
    def skipped(self) -> int:
        """Number of backwards whose gradients were dropped on all ranks, since they were not finite in fp16."""
        return self._half.skipped

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shares, by the names of their parameters in the user's module."""
        self._forget_failed()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients accumulate, as outside of it: each backward reduces its own.

        That no rank keeps whole gradients is what sharding is for, so there is nothing to save here, and what comes
        out is the same.
        """
        yield

    # ---- forward --------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        op = self._record.begin(Kind.FORWARD, "forward")
        output = self.module(*args, **kwargs)
        self._record.end(op)
        return output

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._forget_failed()
        self._proof.enter(args, kwargs)
        if not self._shares.is_hidden:
            if torch.is_grad_enabled():
                self._held.check()
                self._shares.freeze()
            self._update()
            self._sync.synchronize_buffers()
        self._proof.note_buffers()
        self._shares.hide()
        return self._half.cast_inputs(args), self._half.cast_inputs(kwargs)

    def _after_forward(self, _: nn.Module, _inputs: Any, output: Any) -> Any:
        self._shares.show()
        output = self._proof.leave(self._half.cast_outputs(output))
        if torch.is_grad_enabled() and output is not None:
            self._backwards.watch(output)
            self._half.watch(output)
        return output

    def _update(self) -> None:
        """Let shares that have changed reach all ranks, if any has on any rank."""
        changed = self._shares.is_changed
        if self._stage < 3:
            if self._stale:
                flag = torch.tensor([float(changed)], device=self._shares.device)
                changed = self._replicas.all_reduce(flag, op="max").item() > 0
            elif changed:
                raise ValueError(
                    "Parameters were changed by hand since the last backward, and under stage "
                    f"{self._stage} of ZeRO each rank has changed its own share only. model.renew(), on every rank, "
                    "brings them to all ranks; after a backward that happens without a call."
                )
            if not changed:
                return
        self.renew()

    def renew(self) -> None:
        """Bring the module's parameters up to date with the shares of all ranks; every rank calls it.

        A forward does this itself after an optimizer's step. It is for parameters that are changed in another way.
        """
        self._forget_failed()
        self._shares.give()
        self._sync.renew()
        self._stale = False

    # ---- backward -------------------------------------------------------------------------------------------

    def _forget_failed(self, *, now: bool = False) -> None:
        """Give up a backward that began and failed; `now` if another begins, and otherwise outside of any."""
        if self._open is not None and (now or _current_graph_task_id() == -1):
            self._open = None
            self._shares.show()

    def _begin(self) -> None:
        self._forget_failed(now=True)
        self._op = self._record.begin(Kind.BACKWARD, "backward")
        self._proof.begin()
        self._half.begin_backward()
        self._shares.hide()  # a checkpoint calls the module's layers again
        self._sync.drop_gradients()
        self._small.drop_gradients()
        self._open = ExitStack()
        self._open.enter_context(self._sync.backward())
        # Where ranks use other parameters, reductions of both in one backward would not have one order.
        self._open.enter_context(self._small.backward(last=False))

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        self._shares.show()
        self._record.end(self._op)
        self._sync.finish()
        self._small.finish()
        gradients = [piece.held.grad for piece in self._shares.of if piece.held.grad is not None]
        finite = self._half.all_finite(gradients)
        if finite:
            self._shares.take(self._replicas.size * self._half.scale)
        else:
            self._shares.drop_gradients()
        self._sync.drop_gradients()
        self._small.drop_gradients()
        self._stale = True
        self._proof.end(scale=self._half.scale, dropped=not finite)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down to a norm over all ranks' shares, and return the norm before; every rank calls it.

        torch.nn.utils.clip_grad_norm_ would see this rank's shares only.

        Args:
            max_norm: the largest norm.
            norm_type: p of the p-norm; inf for the largest element.
        """
        mine = [s.grad for p, s in self._shares.of.items() if s.grad is not None and p in self._is_shared]
        everywhere = [
            s.grad for p, s in self._shares.of.items() if s.grad is not None and p not in self._is_shared
        ]
        return clip(mine, everywhere, max_norm, norm_type, self._shard_group, self._shares.device)

    # ---- whole parameters -----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return the whole module's state on every rank, with fp32 weights where it computes in 16 bits.

        Every rank calls it; the tensors are gathered, and are copies.
        """
        self._forget_failed()
        state = self.module.state_dict(*args, prefix=prefix, **kwargs)
        whole = self._shares.full(self._shares.of)
        first = {id(share): piece.name for piece, share in self._shares.of.items()}
        for name, share in self.module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = whole[first[id(share)]]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole module's state, of which each rank takes its shares; every rank calls it with the same.

        Raises:
            ValueError: `assign` is set.
            RuntimeError: names or shapes do not fit, as for any module.
        """
        with self.summon_full_params(writeback=False):
            result = super().load_state_dict(state_dict, strict, assign)
        self._shares.load(state_dict)
        self.renew()
        return result

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Within the block the module has its whole parameters, as FSDP.summon_full_params; every rank enters.

        Args:
            writeback: whether changes to them, which every rank makes alike, remain.
        """
        self.renew()
        with self._sync.gathered():
            self._shares.hide()
            try:
                yield
            finally:
                self._shares.show()
            if writeback:
                self._shares.load({name: p.detach() for name, p in self._whole_parameters()})
        if writeback:
            self.renew()

    def _whole_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((piece.name, piece.parameter) for piece in self._shares.of)
