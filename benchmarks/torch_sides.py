"""The other side of `benchmarks.bench_beside_torch`: the same trainings in PyTorch alone, one rank's part of each.

Each function takes the rank's context, the plan, the model and this step's batches, and returns a `Step`: called with
a number it runs that step, and returns the loss of the rank's share of the batch, or None where the rank has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, chain, next_token_loss

Step = Callable[[int], float | None]
Batches = Sequence[tuple[Tensor, Tensor]]
aten = torch.ops.aten


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer of both sides."""
    return torch.optim.AdamW(params, lr=1e-4)


def _step_of(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> Step:
    """Return a plain training step on this rank's batches."""

    def step(number: int) -> float:
        inputs, targets = batches[number % len(batches)]
        optimizer.zero_grad()
        loss = next_token_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _every(n: int, batches: Batches, rank: int) -> Batches:
    return [(x[rank::n], y[rank::n]) for x, y in batches]


def data_parallel(ctx: Any, plan: mk.Plan, net: nn.Module, batches: Batches) -> Step:
    """DDP; DDP with ZeroRedundancyOptimizer for ZeRO-1; FSDP2 of every block for ZeRO-2, ZeRO-3 and hybrid shards."""
    mine = _every(ctx.world_size, batches, ctx.rank)
    if plan.zero < 2:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = (
            ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4)
            if plan.zero
            else adamw(net.parameters())
        )
        return _step_of(net, optimizer, mine)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hybrid = plan.dp_shard not in (None, plan.dp)
    mesh = (
        init_device_mesh("cpu", (plan.dp // 2, 2), mesh_dim_names=("replicate", "shard"))
        if hybrid
        else init_device_mesh("cpu", (plan.dp,))
    )
    for block in net.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=plan.zero == 3)
    fully_shard(net, mesh=mesh, reshard_after_forward=plan.zero == 3)
    return _step_of(net, adamw(net.parameters()), mine)


SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""PyTorch's name for each schedule that both have; it has no naive schedule, no ZB-H1 and no ZB-H2."""


def pipeline(ctx: Any, plan: mk.Plan, net: nn.Module, batches: Batches) -> Step:
    """torch.distributed.pipelining, cut at the same layers; the last stage knows the loss."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.stage import PipelineStage

    holders = plan.build().stage_to_rank
    layers = [layer for _, layer in chain(net)]
    bounds = [0, *plan.cut, len(layers)]
    mine = [stage for stage in range(plan.stages) if holders[stage] == ctx.rank]
    parts = [nn.Sequential(*layers[bounds[stage] : bounds[stage + 1]]) for stage in mine]
    device = torch.device("cpu")
    stages = [PipelineStage(part, s, plan.stages, device) for part, s in zip(parts, mine, strict=True)]
    kind = getattr(pipelining.schedules, SCHEDULES[plan.schedule])
    one = plan.schedule in ("gpipe", "1f1b")
    schedule = kind(stages[0] if one else stages, plan.microbatches, loss_fn=next_token_loss)
    optimizer = adamw(nn.ModuleList(parts).parameters())
    first, last = 0 in mine, plan.stages - 1 in mine

    def step(number: int) -> float | None:
        inputs, targets = batches[number % len(batches)]
        optimizer.zero_grad()
        losses: list[Tensor] = []
        with_loss = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), **with_loss)
        loss = torch.stack(losses).mean().item() if last else None
        optimizer.step()
        return loss

    return step


def tensor_parallel(ctx: Any, plan: mk.Plan, net: GPT, batches: Batches) -> Step:
    """parallelize_module with loss_parallel; FSDP2 of every block over the replicas.

    PyTorch cuts the rows of a weight into equal parts, which for a fused q, k, v would give a rank rows of q alone. So
    the rows are put in another order here, with the heads of rank 0 first.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (plan.dp, plan.tp), mesh_dim_names=("dp", "tp"))
    for layer in net.modules():
        if isinstance(fused := getattr(layer, "qkv", None), nn.Linear):
            for parameter in fused.parameters():
                rows = parameter.data
                by_rank = rows.view(3, plan.tp, -1, *rows.shape[1:]).transpose(0, 1)
                parameter.data = by_rank.reshape(rows.shape)
    parallelize_module(net, mesh["tp"], _tensor_styles(net, sequence=plan.sequence_parallel))
    if plan.zero:
        for layer in net.children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    plain = _step_of(net, adamw(net.parameters()), _every(plan.dp, batches, mesh["dp"].get_local_rank()))

    def step(number: int) -> float | None:
        with loss_parallel():
            return plain(number)

    return step


def _tensor_styles(net: GPT, *, sequence: bool) -> dict[str, Any]:
    """Return the plan for `parallelize_module`: the parallel style of each layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    styles: dict[str, Any] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.logits": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence:
        styles["head.norm"] = SequenceParallel()
        styles["block0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    for name, _ in net.named_children():
        if not name.startswith("block"):
            continue
        styles |= {
            f"{name}.attention.qkv": ColwiseParallel(),
            f"{name}.attention.out": RowwiseParallel(output_layouts=between),
            f"{name}.mlp.up": ColwiseParallel(),
            f"{name}.mlp.out": RowwiseParallel(output_layouts=between),
        }
        for norm, layer in (("norm1", "attention"), ("norm2", "mlp")) if sequence else ():
            styles[f"{name}.{norm}"] = SequenceParallel()
            styles[f"{name}.{layer}"] = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
    return styles


class Ring(torch.autograd.Function):
    """torch's ring around the kernel of CPUs: causal attention of tensors [batch, heads, time / n, width].

    torch's `context_parallel` does not run on a CPU: torch 2.13 has no sharding strategy for
    `_scaled_dot_product_flash_attention_for_cpu`. The ring inside of it takes any kernel, so this calls that ring.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        out, lse = _attention._templated_ring_attention(dist.group.WORLD, 2, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def differentiate(
            *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        q, k, v, out, lse = ctx.saved_tensors
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, differentiate, grad_out, "grad_out", q, k, v, out, lse, is_causal=True
        )[:3]


def ring(ctx: Any, plan: mk.Plan, net: GPT, batches: Batches) -> Step:
    """Ring attention of torch and DDP; a rank has the k-th piece of each sequence from the front and from the back."""
    from torch.nn.parallel import DistributedDataParallel

    pieces = (ctx.rank, 2 * plan.cp - 1 - ctx.rank)
    net.embedding.pieces = pieces
    whole = DistributedDataParallel(net, gradient_as_bucket_view=True)

    def own(tokens: Tensor) -> Tensor:
        parts = tokens.chunk(2 * plan.cp, 1)
        return torch.cat([parts[i] for i in pieces], 1)

    plain = _step_of(whole, adamw(whole.parameters()), [(own(x), own(y)) for x, y in batches])

    def step(number: int) -> float | None:
        with patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: Ring.apply(q, k, v)):
            return plain(number)

    return step


class PlainExperts(nn.Module):
    """This rank's experts of a layer; rows travel to them and back, as one writes it by hand."""

    def __init__(self, whole: nn.Module, count: int, ctx: Any) -> None:
        super().__init__()
        self.count, self.ranks = count, ctx.world_size
        here = count // self.ranks
        for _, parameter in whole.named_parameters():
            parameter.data = parameter.data[ctx.rank * here : (ctx.rank + 1) * here].clone()
        self.experts = whole

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it: x [T, h], chosen and weights [T, k]."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        sends = chosen.flatten().bincount(minlength=self.count)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        to, of = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (sends, receives))
        rows = all_to_all_single_autograd(x[token], of, to, dist.group.WORLD)
        here = torch.arange(self.count // self.ranks).repeat(self.ranks)
        which = here.repeat_interleave(receives)[:, None]
        made = self.experts(rows, which, torch.ones_like(which, dtype=x.dtype))
        back = all_to_all_single_autograd(made, to, of, dist.group.WORLD)
        return torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order, None])


def experts(ctx: Any, plan: mk.Plan, net: GPT, batches: Batches) -> Step:
    """DDP for everything but the experts, and all-to-alls by hand."""
    from torch.nn.parallel import DistributedDataParallel

    for name, module in list(net.named_modules()):
        if name.endswith("mlp.experts"):
            count = next(module.parameters()).shape[0]
            net.get_submodule(name.rpartition(".")[0]).experts = PlainExperts(module, count, ctx)
    own = {name: parameter for name, parameter in net.named_parameters() if ".experts." in name}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(own))
    whole, optimizer = DistributedDataParallel(net, gradient_as_bucket_view=True), adamw(net.parameters())
    mine = _every(plan.dp, batches, ctx.rank)

    def step(number: int) -> float:
        inputs, targets = mine[number % len(mine)]
        optimizer.zero_grad()
        loss = next_token_loss(whole(inputs), targets)
        loss.backward()
        for parameter in own.values():
            if parameter.grad is not None:
                parameter.grad /= plan.dp  # the sum over all tokens of each rank's mean
        optimizer.step()
        return loss.item()

    return step
