"""Count the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpkit.course.author import *

if TYPE_CHECKING:
    from torch import nn


# %% answer
def count_the_bytes(psi: int, n: int, stage: int) -> dict[str, float]:
    """Return one of n ranks' bytes for psi parameters, as {"params": ..., "grads": ..., "optimizer": ...}.

    stage: the ZeRO stage; 0 is plain data parallelism.
    """
    ### BEGIN SOLUTION
    params, grads, optimizer = 2.0 * psi, 2.0 * psi, 12.0 * psi
    if stage >= 1:
        optimizer /= n
    if stage >= 2:
        grads /= n
    if stage >= 3:
        params /= n
    return {"params": params, "grads": grads, "optimizer": optimizer}
    ### END SOLUTION


# %% checks
WIDTH, LAYERS = 32, 6
PSI = 1_000_000
N = 4  # ranks
GPT_2_XL = 1_557_611_200


def measured(n: int, stage: int, room: Room) -> dict[str, float]:
    """Return the fullest rank's peak bytes while n real ranks train a small model in bf16."""
    import torch

    model = small()
    x = torch.randn(n, WIDTH)
    plan = mk.Plan.zero(stage, n, precision="bf16") if stage else mk.Plan.ddp(n, precision="bf16")
    run = room.cluster(n).train(
        model,
        [(x, x)],
        plan,
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        steps=2,
        show=False,
    )
    held = run.wait().timeline().peak_memory
    return {name: max(float(rank[name]) for rank in held) for name in ("params", "grads", "optimizer")}


def small() -> nn.Sequential:
    """Return layers whose parameters 2 and 4 ranks divide evenly."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the answer's bytes."""
    return answer(case["psi"], case["n"], case["stage"])


def expected(case: Case) -> list[dict[str, float]]:
    """Return what the solution gives; the last rows compare with what real ranks hold."""
    return [count_the_bytes(case["psi"], case["n"], case["stage"])]


class Formula(OnRanks):
    """An exercise whose answer is a formula that is compared with real runs."""

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Check the answer by numbers first, then by what real ranks hold."""
        for row in super().examine(answer, room):
            yield row
            if not row.ok:
                return
        psi = sum(weight.numel() for weight in small().parameters())
        for n, stage in ((2, 1), (4, 2), (4, 3)):
            case = Case(1, sizes={"psi": psi, "n": n, "stage": stage})
            held, seen = measured(n, stage, room), room.play(self.play, answer, case)
            wrong = difference([held], seen.got)
            what = f"what {n} real ranks hold, ψ = {psi:,}, stage {stage}"
            yield CheckRow(what, spell(held), wrong or "as measured", wrong is None, seen)


SIZES = (
    (PSI, N, 0),
    (PSI, N, 1),
    (PSI, N, 2),
    (PSI, N, 3),
    (GPT_2_XL, 64, 1),
    (GPT_2_XL, 64, 2),
    (GPT_2_XL, 3, 3),
)

EXERCISE = Formula(
    cases=[Case(1, sizes=dict(zip(("psi", "n", "stage"), each, strict=True))) for each in SIZES]
)
