"""DDP: every rank holds the whole model and a part of the batch; gradients are summed while the backward pass runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
`mpkit.strategies.reference.bucketed_ddp` is the whole algorithm in 30 lines. This module adds shares of unequal size,
micro-batches, parameters that get no gradient, frozen and tied parameters, the state of BatchNorm, and buckets in the
order in which gradients actually arrive.

    broadcast   at the start every rank takes the first replica's parameters and buffers
    buckets     gradients lie in buckets of `bucket_mb`, in reverse order of use: the last layer's arrive first
    reduce      as soon as a bucket is full, its sum over ranks starts, while the backward goes on
    wait        the step waits for the sums that are still pending: communication that the backward could not hide
    late        where blocks are recomputed, backwards run within the backward, and a gradient of a block that is used
                several times arrives several times: one whose bucket has been sent already is summed at the end, and
                from the next backward on its bucket waits for the end
    rebuild     after the first step, buckets are rebuilt in the order in which the gradients actually arrived, in the
                same memory: a backend's thread may hold a bucket that it has summed for longer than the rank waits

Each rank's loss is its share of the mean over the batch (`mpkit.strategies.runtime.pipeline`), so a sum over ranks is
correct even where shares differ in size. While gradients accumulate (in all micro-batches but the last), nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from mpkit.strategies.data_parallel.broadcast import broadcast_tensors
from mpkit.strategies.data_parallel.bucket import Bucket, fill_buckets, zeros_for
from mpkit.strategies.data_parallel.buffers import StatefulBuffers
from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.data_parallel.unused_parameters import arrived_late, unused_error
from mpkit.strategies.stage.gradient_sync import GradientSync, Half

__all__ = ["DDP"]


class DDP(GradientSync):
    """Gradients summed over replicas, in buckets, while the backward pass runs.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    reduction = "sum"

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held.stages)
        self._replicas, self._ledger = held.replicas, held.context.record.ledger
        self._replicas_of, self._experts = held.replicas_of, held.expert_parameters
        self._first_of_replicas = held.first_of_replicas
        self._tied, self._unsharded = set(held.tied), held.unsharded_parameters
        self._bucket_bytes, self._allows_unused = held.bucket_bytes, held.allows_unused
        self._allow_unused = held.allow_unused
        self._names = {piece.parameter: piece.name for piece in self.pieces}
        self._sync_this_backward = False  # whether this backward's gradients are complete
        self._grads_ready: dict[nn.Parameter, None] = {}  # in order of arrival
        self._knows_order = False  # whether gradients have shown in which order they arrive
        self._several: set[nn.Parameter] = set()  # had several gradients in one backward
        self._late: dict[nn.Parameter, Tensor] = {}
        # ---- broadcast
        module = held.module
        for replicas, tensors in held.by_replicas():
            broadcast_tensors(replicas, tensors)
        self._stateful = StatefulBuffers(held.replicas, held.plan, module)
        # ---- buckets, but for experts that no other rank holds: their gradients are complete after the backward
        alone = {p for p in self._experts if held.replicas_of(p).size == 1}
        self._order = [piece.parameter for piece in reversed(self.pieces) if piece.parameter not in alone]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._order:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._memory = {dtype: zeros_for(parameters) for dtype, parameters in by_dtype.items()}
        for memory in self._memory.values():
            self._ledger.track(memory, "grads")
        self._build()
        self._sets_late_aside = not held.arrive_once  # by a hook, which costs some microseconds per gradient
        for parameter in self._names:
            if parameter in self._of and self._sets_late_aside:
                parameter.register_hook(partial(self._before_grad, parameter))
            parameter.register_post_accumulate_grad_hook(self._on_grad_ready)

    def _build(self) -> None:
        """Divide the memory of the gradients into buckets, in `_order`; autograd adds into them in place."""
        self._reordered = False
        untied = [parameter for parameter in self._order if parameter not in self._tied]
        tied = [parameter for parameter in self._order if parameter in self._tied]
        used = dict.fromkeys(self._memory, 0)  # elements
        self._buckets: list[Bucket] = []
        for parameters in (untied, tied):
            for bucket in fill_buckets(parameters, self._bucket_bytes, self._unsharded, self._experts):
                dtype, count = bucket[0].dtype, sum(parameter.numel() for parameter in bucket)
                self._buckets.append(Bucket(bucket, self._memory[dtype].narrow(0, used[dtype], count)))
                used[dtype] += count
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.views}

    def _rebuild(self) -> None:
        """Rebuild the buckets once their order is known; gradients that are there move to their new places."""
        if not self._reordered:
            return
        old = {p: p.grad.clone() for p in self._order if p.grad is not None}
        self._build()
        for parameter, gradient in old.items():
            parameter.grad = self._of[parameter].views[parameter].copy_(gradient)

    @property
    def layout(self) -> list[str]:
        """The names of the parameters in the order of the buckets."""
        return [self._names[parameter] for parameter in self._order]

    def lay_out(self, names: list[str]) -> None:
        """Restore the bucket order of an earlier training, which has seen a step."""
        place = {name: parameter for parameter, name in self._names.items()}
        mine = [place[name] for name in names if name in place]  # the others belong to other stages
        order = [parameter for parameter in mine if parameter in self._of]
        if len(order) == len(self._order):
            self._knows_order = True
            self._order = order
            self._build()

    # ---- a step -------------------------------------------------------------------------------------------

    def synchronize_buffers(self) -> None:
        """Take the first replica's buffers where they changed."""
        self._stateful.synchronize()

    def drop_gradients(self) -> None:
        """Zero the buckets."""
        super().drop_gradients()
        self._rebuild()
        self._grads_ready.clear()
        self._late.clear()
        self._next = 0  # the next bucket to reduce
        for bucket in self._buckets:
            bucket.begin()

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce the gradients in a stage's last backward, and in no other."""
        self._sync_this_backward = last and half != "I"
        yield
        self._sync_this_backward = False

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Take the first replica's buffers, with which all replicas evaluate."""
        self._stateful.synchronize()
        yield

    @torch.no_grad()
    def _before_grad(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Set a gradient aside that arrives when its bucket has been sent; autograd then adds zeros."""
        bucket = self._of[parameter]
        if not self._sync_this_backward or parameter in self._tied or parameter in bucket.missing:
            return None
        self._several.add(parameter)
        if bucket.work is None:
            return None
        self._late[parameter] = self._late.get(parameter, 0) + gradient
        return torch.zeros_like(gradient)

    def _on_grad_ready(self, parameter: Tensor) -> None:
        """Note that autograd has added a gradient into its bucket, and reduce the buckets that are full."""
        assert isinstance(parameter, nn.Parameter)
        self._grads_ready[parameter] = None
        if self._sync_this_backward and parameter in self._of and parameter not in self._tied:
            bucket = self._of[parameter]
            if parameter in bucket.missing:
                bucket.missing.remove(parameter)
            elif not self._sets_late_aside:
                if bucket.work is not None:
                    raise arrived_late(self._names[parameter])
                self._several.add(parameter)
            # ---- reduce, in the buckets' order, which is the same on every rank
            while self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
                self._reduce()

    def _is_full(self, bucket: Bucket) -> bool:
        return not bucket.missing and self._several.isdisjoint(bucket.views)

    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        replicas = self._replicas_of(next(iter(bucket.views)))
        bucket.work = replicas.all_reduce(bucket.flat, async_op=True, op=self.reduction)
        self._next += 1

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all sums.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        unused = [name for parameter, name in self._names.items() if parameter not in self._grads_ready]
        if unused and not self._allows_unused:
            raise unused_error(unused, self._allow_unused)
        while self._next < len(self._buckets):
            self._reduce()
        # ---- wait
        for bucket in self._buckets:
            bucket.wait()
        # ---- late
        for parameter in [parameter for parameter in self._order if parameter in self._late]:
            late = self._replicas_of(parameter).all_reduce(self._late.pop(parameter), op=self.reduction)
            self._of[parameter].views[parameter].add_(late)
        if self._allows_unused:
            self._drop_unused()
        # ---- rebuild, before the next backward; nobody has to ask the others: the first rank's order is everybody's
        if not self._knows_order:
            self._knows_order = True
            self._learn_order()

    def _drop_unused(self) -> None:
        """Drop the gradients of parameters that no rank used, so that the optimizer leaves them alone."""
        used = torch.tensor([parameter in self._grads_ready for parameter in self._order], dtype=torch.int32)
        used = self._replicas.all_reduce(used.to(self._buckets[0].flat.device)) if self._buckets else used
        for parameter, count in zip(self._order, used.tolist(), strict=True):
            if count == 0:
                self._drop(parameter)

    def _drop(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of a parameter that no rank used."""
        parameter.grad = None

    def _learn_order(self) -> None:
        """Take the order in which the first replica's gradients arrived."""
        place = {parameter: i for i, parameter in enumerate(self._order)}
        came = [place[p] for p in self._grads_ready if p in place]
        rest = [i for i in range(len(self._order)) if self._order[i] not in self._grads_ready]
        if self._buckets:
            order = torch.tensor(came + rest, device=self._buckets[0].flat.device)
            indices = self._replicas.broadcast(order).tolist()
            self._reordered = indices != list(range(len(indices)))
            self._order = [self._order[i] for i in indices]

    # ---- the end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the first replica of each part, and nothing on the others, which hold the same."""
        self._stateful.synchronize()
        return self._first_of_replicas(super().state_dict())
