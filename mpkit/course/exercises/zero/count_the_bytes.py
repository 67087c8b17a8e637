"""Count the bytes.

In mixed precision, with Adam, one parameter takes 16 bytes of memory:

    parameter    2     fp16 or bf16
    gradient     2     fp16 or bf16
    optimizer   12     fp32: a copy of the parameter, and Adam's two means

In plain data parallelism (stage 0) each of n ranks has all of that. ZeRO shards it among the ranks: stage 1 the
optimizer states, stage 2 the gradients as well, stage 3 the parameters as well.

Write the formula: how many bytes of each does a rank hold, of a model with ψ parameters? It is checked for large
models, and then against what real ranks hold that train a small one.

Source: Rajbhandari et al., SC 2020, sections 3.1 and 5, figure 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mpkit as mk
from mpkit.course.framework.equal import difference, spell
from mpkit.course.framework.exercise import Case, CheckRow, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.room import PackedAnswer, Room

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
VARIES = {"PSI": (1_000_000, 2_000_000, 3_500_000, 7_000_000), "N": (4, 5, 8, 10)}


def formula(psi: int, n: int, stage: int) -> dict[str, float]:
    """Return the right bytes."""
    return {
        "params": 2 * psi / (n if stage >= 3 else 1),
        "grads": 2 * psi / (n if stage >= 2 else 1),
        "optimizer": 12 * psi / (n if stage >= 1 else 1),
    }


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the answer's bytes."""
    assert callable(answer)
    return answer(case["psi"], case["n"], case["stage"])


def expected(case: Case) -> list[dict[str, float]]:
    """Return what the formula gives."""
    return [formula(case["psi"], case["n"], case["stage"])]


class Formula(OnRanks):
    """An exercise whose answer is a formula that is compared with real runs."""

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Check the answer by numbers first, then by what real ranks hold."""
        for row in super().examine(answer, room):
            yield row
            if not row.ok:
                return
        if not room.has_ranks:
            return
        psi = sum(weight.numel() for weight in small().parameters())
        for n, stage in ((2, 1), (4, 2), (4, 3)):
            case = Case(1, sizes={"psi": psi, "n": n, "stage": stage})
            held, seen = measured(n, stage, room), room.play(self.play, answer, case)
            wrong = difference([held], seen.got)
            what = f"what {n} real ranks hold, ψ = {psi:,}, stage {stage}"
            yield CheckRow(what, spell(held), wrong or "as measured", wrong is None, seen)


def sized(psi: int, n: int, stage: int) -> Case:
    """Return a case that needs numbers only."""
    return Case(1, sizes={"psi": psi, "n": n, "stage": stage})


EXERCISE = Formula(
    solution=count_the_bytes,
    cases=(
        sized(PSI, N, 0),
        sized(PSI, N, 1),
        sized(PSI, N, 2),
        sized(PSI, N, 3),
        sized(GPT_2_XL, 64, 1),
        sized(GPT_2_XL, 64, 2),
        sized(GPT_2_XL, 3, 3),
    ),
    play=play,
    expected=expected,
    result="bytes on one rank",
    after="03-zero",
    place=10,
    start="Begin with stage 0: multiply each line of the table by ψ. Then, stage by stage: which of the three "
    "numbers is divided by n, and does it stay so in the next stage?",
    mistakes=(
        Mistake(
            "no-fp32-copy",
            (
                "Add up what you have for one parameter in stage 0. Is it 16 bytes?",
                "Adam's two means are 8 bytes. In mixed precision the optimizer also keeps an fp32 copy of the "
                "parameter: an update may be too small for 16 bits.",
                "12 bytes per parameter: 4 + 4 + 4.",
            ),
            [("12.0 * psi", "8.0 * psi")],
        ),
        Mistake(
            "bytes-of-fp32",
            (
                "Your sum is 16 bytes per parameter. How many bytes does one number in bf16 take?",
                "4 + 4 + 8 is training in fp32. In mixed precision parameter and gradient have 2 bytes each, and the "
                "optimizer has three numbers in fp32.",
            ),
            [("2.0 * psi, 2.0 * psi, 12.0 * psi", "4.0 * psi, 4.0 * psi, 8.0 * psi")],
        ),
        Mistake(
            "divides-everything",
            (
                "In stage 1, whose optimizer states does a rank hold, and whose parameters?",
                "Only stage 3 shards all three. In stage 1 every rank still computes with all parameters, and has "
                "gradients of all.",
            ),
            [("if stage >= 2", "if stage >= 1"), ("if stage >= 3", "if stage >= 1")],
        ),
        Mistake(
            "one-stage-one-thing",
            (
                "What becomes of the optimizer states in stage 2?",
                "The stages add up: each shards what the one before shards, and one thing more.",
                "`if stage >= 1:`, `if stage >= 2:`, `if stage >= 3:`, without `elif`.",
            ),
            [("stage >= 1", "stage == 1"), ("stage >= 2", "stage == 2"), ("stage >= 3", "stage == 3")],
        ),
        Mistake(
            "parameters-before-gradients",
            (
                "What does a rank need whole for longer, the parameters or the gradients?",
                "Stage 2 shards the gradients: a rank steps its n-th only, so it needs those alone. The parameters "
                "are needed by every forward and backward; they come last, in stage 3.",
            ),
            [
                ("stage >= 3:\n        params", "stage >= 3:\n        GRADS"),
                ("        grads /= n", "        params /= n"),
                ("GRADS", "grads"),
            ],
        ),
        Mistake(
            "shards-in-stage-0",
            (
                "What is shared in plain data parallelism?",
                "Stage 0 is DDP: every rank has all 16 bytes of every parameter.",
            ),
            [("stage >= 1", "stage >= 0"), ("stage >= 2", "stage >= 1"), ("stage >= 3", "stage >= 2")],
        ),
    ),
    otherwise=("Work it out for ψ = 1 and n = 4, stage by stage: 16, 7, 5.5 and 4 bytes.",),
)
