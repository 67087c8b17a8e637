"""Skip the step everywhere when one rank overflows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import calls, payload
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import adam
from mpkit.trace import Kind


# %% answer
def skip_the_step(ctx: mk.Context, optimizer: torch.optim.Optimizer, shard: Tensor, scale: float) -> float:
    """Step this rank's shard if the gradients are finite on all ranks; return the scale for the next step.

    shard: [k], which `optimizer` (an Adam) steps; `shard.grad` is the gradient of the loss times `scale`.
    """
    assert shard.grad is not None
    ### BEGIN SOLUTION
    overflow = 1.0 - torch.isfinite(shard.grad).all().float()
    if ctx.comm.all_reduce(overflow, op="max") > 0:
        return scale / 2
    shard.grad /= scale
    optimizer.step()
    return scale
    ### END SOLUTION


# %% checks
STEPS, SCALE = 6, 2.0**15
FEATURES, SAMPLES = 12, 8
SENT = "bytes of collectives beside the harness's own"


def batches(case: Case) -> list[tuple[Tensor, Tensor, int]]:
    """Return the batches of all ranks, with the place of a nan in the gradient, -1 if there is none.

    Some features are large in some steps, so that their gradients overflow.
    """
    generator = case.generator()
    made = []
    for step in range(STEPS):
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        if step in (1, 2, 4):
            x[:, int(torch.randint(FEATURES, (1,), generator=generator))] *= 40
        nan = (FEATURES - 1, 0)[case.seed % 2] if step == 3 else -1
        made.append((x, torch.randn(SAMPLES, generator=generator), nan))
    return made


def gradient(weights: Tensor, batch: tuple[Tensor, Tensor, int], scale: float) -> Tensor:
    """Return the gradient of the scaled loss in half precision: what is larger than 65504 is inf, inf - inf is nan."""
    x, y, nan = batch
    held = weights.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(nn.functional.mse_loss(x @ held, y) * scale, held)
    half = grad.half().float()
    if nan >= 0:
        half[nan] = torch.nan
    return half


def start(case: Case) -> Tensor:
    """Return the initial weights."""
    return torch.randn(FEATURES, generator=case.generator(7))


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run some steps; return this rank's weights and the scale after each."""
    shard = start(case).chunk(case.ranks)[ctx.rank].clone()
    optimizer, scale, states = adam([shard]), SCALE, []
    for batch in batches(case):
        weights = ctx.comm.all_gather(shard)
        shard.grad = gradient(weights, batch, scale).chunk(case.ranks)[ctx.rank].clone()
        scale = answer(ctx, optimizer, shard, scale)
        states.append({"scale": scale, "weights": shard.clone()})
    return states


def expected(case: Case) -> list[list[dict[str, object]]]:
    """Return the same, computed on one device."""
    weights, scale = start(case), SCALE
    optimizer = adam([weights])
    after = []
    for batch in batches(case):
        grad = gradient(weights, batch, scale)
        if torch.isfinite(grad).all():
            weights.grad = grad / scale
            optimizer.step()
        else:
            scale /= 2
        after.append((scale, weights.clone()))
    return [
        [{"scale": scale, "weights": weights.chunk(case.ranks)[rank]} for scale, weights in after]
        for rank in range(case.ranks)
    ]


EXERCISE = OnRanks(
    solution=skip_the_step,
    cases=(Case(2, seed=71), Case(3, seed=72), Case(4, seed=73)),
    play=play,
    expected=expected,
    result=f"scale and weights after each of {STEPS} steps",
    budgets=(
        Budget("all-reduces", calls(Kind.ALL_REDUCE), STEPS),
        Budget(SENT, lambda seen: payload(seen) - STEPS * FEATURES * 4, 8 * STEPS, "bytes"),
    ),
    after="03-zero",
    place=80,
    when={
        "asks-only-after-an-overflow": lambda seen: seen.hang or seen.mismatch,
    },
)
