"""Skip the step everywhere when one rank overflows.

In fp16 the loss is multiplied by a large number, so that small gradients do not become zero. If it is too large, some
gradients overflow: they are inf, or nan. Then nobody may step: the scale is halved, and the next batch is tried.

With sharded gradients only *one* rank may see the inf, the one whose n-th it is in. The others have to know, or some
parameters are stepped and some are not.

Write one optimizer step. The gradient in `shard.grad` is that of the *scaled* loss; Adam, and its count of steps, must
not notice a step that is skipped. Whether there was an overflow is one number: let the ranks agree on it, with one
collective, of at most 8 bytes.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run some steps; return this rank's weights and the scale after each."""
    assert callable(answer)
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
    start="`torch.isfinite(shard.grad).all()` says whether this rank saw no overflow. What do you have to know of "
    "the others before you may step?",
    mistakes=(
        Mistake(
            "asks-only-after-an-overflow",
            (
                "Some ranks wait in an all-reduce, the others went on without it. Who comes to it?",
                "The branch depends on what a rank has seen alone, so some ranks call the collective and some do "
                "not. All ranks ask, in every step; then all know, and all take the same branch.",
            ),
            """
            def skip_the_step(ctx: mk.Context, optimizer: torch.optim.Optimizer, shard: Tensor, scale: float) -> float:
                if not torch.isfinite(shard.grad).all():
                    ctx.comm.all_reduce(torch.ones(()), op="max")
                    return scale / 2
                shard.grad /= scale
                optimizer.step()
                return scale
            """,
            when=lambda seen: seen.hang or seen.mismatch,
        ),
        Mistake(
            "skips-alone",
            (
                "Compare the scales of the ranks. Do they stay the same?",
                "The rank that sees the inf skips, the others step. From then on their scales differ, and the "
                "parameters are of different steps.",
                'All-reduce one number, with `op="max"`: 1 if this rank overflowed, else 0.',
            ),
            [('ctx.comm.all_reduce(overflow, op="max") > 0', "overflow > 0")],
        ),
        Mistake(
            "knows-no-nan",
            (
                "In which step do you go wrong, and what is in the gradient there: inf, or nan?",
                "inf - inf and 0 × inf are nan, which is not larger than anything and not equal to inf. "
                "`torch.isfinite` refuses both.",
            ),
            [("torch.isfinite(shard.grad).all().float()", "(~torch.isinf(shard.grad)).all().float()")],
        ),
        Mistake(
            "zeroes-instead-of-skipping",
            (
                "After an overflow the weights move, though the gradients are no good. What does Adam do with a "
                "gradient of zero?",
                "Adam steps with a gradient of zero as well: its means carry on, and its count of steps rises. "
                "Skipping means that `step()` is not called.",
            ),
            [
                (
                    "        return scale / 2\n",
                    "        shard.grad.zero_()\n        optimizer.step()\n        return scale / 2\n",
                )
            ],
        ),
        Mistake(
            "cleans-the-gradient",
            (
                "In a step with an overflow, what do the finite gradients tell?",
                "Replacing inf and nan by zero keeps the step, with a gradient of which a part is missing. Skip it "
                "everywhere, and halve the scale.",
            ),
            [
                (
                    "        return scale / 2\n",
                    "        shard.grad = torch.nan_to_num(shard.grad, 0.0, 0.0, 0.0) / scale\n"
                    "        optimizer.step()\n        return scale / 2\n",
                )
            ],
        ),
        Mistake(
            "steps-with-the-scaled-gradient",
            (
                "The first step is wrong already. How large is the gradient that Adam gets?",
                "It is the gradient of the loss times `scale`. Divide by the scale before the step.",
            ),
            [("    shard.grad /= scale\n", "")],
        ),
        Mistake(
            "keeps-the-scale",
            (
                "The steps that overflow are skipped. What will happen in the next one?",
                "With the same scale the same gradients overflow again. Halve it.",
            ),
            [("return scale / 2", "return scale")],
        ),
        Mistake(
            "needs-all-to-overflow",
            (
                "One rank overflows, and nobody skips. What does your all-reduce ask?",
                'The question is whether *any* rank overflowed: "max" of a number that is 1 where it did. "min" asks '
                "whether all did.",
            ),
            [('op="max"', 'op="min"')],
        ),
    ),
    otherwise=("Print scale and overflow on every rank, step by step: all ranks have to print the same.",),
)
