"""FSDP in 16 bits, with prefetch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.exercises.zero import flat
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import count_exposed_layers, gathers_and_layers, ring
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
class Sharded(nn.Module):
    """Computes in bf16 with gathered weights, and keeps an n-th of each in fp32."""

    def __init__(self, ctx: mk.Context, model: nn.Module) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        # instead: self.shards = []
        # instead: raise NotImplementedError("your turn: the shards, and the hooks")
        self.ctx, self.model = ctx, model
        self.weights = [block.get_parameter("weight") for block in model.children()]
        self.shapes = [weight.shape for weight in self.weights]
        self.shards, self.works = [], {}
        for i, block in enumerate(model.children()):
            whole = flat([self.weights[i]], ctx.world_size)
            self.shards.append(whole.chunk(ctx.world_size)[ctx.rank].clone())
            self.free(i)
            block.register_forward_pre_hook(lambda *_, i=i: self.fill(i, i + 1))
            block.register_forward_hook(lambda *_, i=i: self.free(i))
            block.register_full_backward_pre_hook(lambda *_, i=i: self.fill(i, i - 1))
            self.weights[i].register_post_accumulate_grad_hook(lambda _, i=i: self.reduce(i))

    def gather(self, i: int) -> None:
        """Start to gather block i's weight in bf16, if there is such a block and nobody has started."""
        if 0 <= i < len(self.weights) and i not in self.works:
            self.works[i] = self.ctx.comm.all_gather(self.shards[i].bfloat16(), async_op=True)

    def fill(self, i: int, following: int) -> None:
        """Wait for block i's weight, and start to gather the following block's."""
        self.gather(i)
        whole = self.works.pop(i).wait()
        self.gather(following)
        self.weights[i].data = whole[: self.shapes[i].numel()].view(self.shapes[i])

    def free(self, i: int) -> None:
        """Free block i's weight."""
        self.weights[i].data = torch.empty(0, dtype=torch.bfloat16)

    def reduce(self, i: int) -> None:
        """Give block i's shard its n-th of the mean gradient, summed in fp32; free the gradient and the weight."""
        weight, n = self.weights[i], self.ctx.world_size
        self.shards[i].grad = self.ctx.comm.reduce_scatter(flat([weight.grad.float()], n)) / n
        weight.grad = None
        self.free(i)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs in fp32. x: fp32."""
        ### BEGIN SOLUTION
        return self.model(x.bfloat16()).float()
        ### END SOLUTION


# %% checks
SAMPLES, STEPS = 12, 2
SENT, AHEAD = "bytes that a rank sends, on a ring", "gathers under way while a block computes"
EXPOSED = "blocks that compute while no gather is under way"


class Block(nn.Module):
    """A block: tanh(x W) in the weight's precision; products are added up in more bits, as tensor cores do."""

    def __init__(self, width: int, ctx: mk.Context | None) -> None:
        super().__init__()
        self.weight, self.ctx = nn.Parameter(torch.empty(width, width)), ctx

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [samples, width]; put forward and backward on the timeline."""
        self.mark()
        y = torch.tanh(x.double() @ self.weight.double()).to(self.weight.dtype)
        y.register_hook(lambda _: self.mark())
        return y

    def mark(self) -> None:
        """Record that the block computes now."""
        if self.ctx is not None:
            with self.ctx.record.span("block"):
                pass


def model(case: Case, ctx: mk.Context | None = None) -> nn.Sequential:
    """Return the blocks in fp32, the same on every rank."""
    blocks = (Block(case["width"], ctx) for _ in range(case["blocks"]))
    return serial.fill(nn.Sequential(*blocks), case.seed).float()


def batches(case: Case) -> list[serial.Batch]:
    """Return the whole batch of each step."""
    x = torch.randn(STEPS, 2, SAMPLES, case["width"], generator=case.generator())
    return [(inputs, torch.tanh(targets)) for inputs, targets in x]


def count_left(module: nn.Module) -> list[int]:
    """Return how many weights are gathered, and how many have a gradient."""
    gathered = sum(weight.untyped_storage().nbytes() > 0 for weight in module.parameters())
    return [gathered, sum(weight.grad is not None for weight in module.parameters())]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Train; return the losses, this rank's shards, and what is gathered after forwards and backwards."""
    blocks, result = model(case, ctx), {"after the forward": [], "after the backward": [], "losses": []}
    sharded = answer(ctx, blocks)
    optimizer = serial.adam(sharded.shards)
    for batch in batches(case):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        optimizer.zero_grad()
        outputs = sharded(x)
        loss = serial.mse(outputs, y)
        result["after the forward"].append([count_left(blocks)[0], str(outputs.dtype)])
        loss.backward()
        result["after the backward"].append(count_left(blocks))
        optimizer.step()
        result["losses"].append(loss.item())
    return {**result, "shards": list(sharded.shards), "kept in": str(sharded.shards[0].dtype)}


def expected(case: Case) -> list[dict[str, Any]]:
    """Return the same, by serial training with the same roundings: bf16 where a rank computes, fp32 elsewhere."""
    whole, n = [weight.detach().clone() for weight in model(case).parameters()], case.ranks
    optimizer = serial.adam(whole)
    losses: list[list[float]] = [[] for _ in range(n)]
    for batch in batches(case):
        sums = [torch.zeros_like(weight) for weight in whole]
        for rank in range(n):
            x, y = serial.share(batch, rank, n)
            rounded = model(case).bfloat16()
            for weight, master in zip(rounded.parameters(), whole, strict=True):
                weight.data = master.bfloat16()
            loss = serial.mse(rounded(x.bfloat16()).float(), y)
            losses[rank].append(loss.item())
            loss.backward()
            for total, weight in zip(sums, rounded.parameters(), strict=True):
                assert weight.grad is not None
                total += weight.grad
        for weight, total in zip(whole, sums, strict=True):
            weight.grad = total / n
        optimizer.step()
    same = {
        "after the forward": [[0, "torch.float32"]] * STEPS,
        "after the backward": [[0, 0]] * STEPS,
        "kept in": "torch.float32",
    }
    return [
        {**same, "losses": losses[rank], "shards": [flat([weight], n).chunk(n)[rank] for weight in whole]}
        for rank in range(n)
    ]


def shard_numbers(case: Case) -> int:
    """Return how many numbers a rank's shards have, with what they are filled up with."""
    return int(case["blocks"] * -(-(case["width"] ** 2) // case.ranks))


def bytes_sent(case: Case) -> float:
    """Return the bytes of two gathers in bf16 and a reduce-scatter in fp32, of all blocks."""
    return STEPS * (2 * 2 + 4) * (case.ranks - 1) * shard_numbers(case) + 1


def count_gathers_ahead(seen: Seen) -> float:
    """Return the most gathers that are under way while a block computes."""
    assert seen.trace is not None
    orders = [gathers_and_layers(rank.ops) for rank in seen.trace.ranks]
    return max(
        sum(issued < layer < waited for issued, waited in gathers)
        for gathers, layers in orders
        for layer in layers
    )


def kept_in_16_bits(seen: Seen) -> bool:
    """Return whether the shards are in bf16."""
    return seen.got is not None and seen.got[0]["kept in"] == "torch.bfloat16"


EXERCISE = OnRanks(
    solution=Sharded,
    cases=(
        Case(2, 93, {"blocks": 8, "width": 10}),
        Case(3, 94, {"blocks": 6, "width": 11}),
        Case(4, 95, {"blocks": 7, "width": 9}),
    ),
    play=play,
    expected=expected,
    result=f"losses, shards and what is left in {STEPS} steps",
    budgets=(
        Budget(SENT, ring, bytes_sent, "bytes"),
        Budget(EXPOSED, count_exposed_layers, 2 * STEPS),
        Budget(AHEAD, count_gathers_ahead, 2),
    ),
    after="03-zero",
    place=55,
    when={
        "shards-in-16-bits": kept_in_16_bits,
        "gathers-in-32-bits": lambda seen: seen.budget == SENT,
        "prefetches-in-the-forward-only": lambda seen: (
            seen.budget == EXPOSED and count_exposed_layers(seen) <= STEPS * (seen.case["blocks"] + 1)
        ),
        "waits-at-once": lambda seen: seen.budget == EXPOSED,
        "gathers-everything-first": lambda seen: seen.budget == AHEAD,
    },
)
