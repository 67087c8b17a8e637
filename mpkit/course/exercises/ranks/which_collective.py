"""Which collective is it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpkit.course.author import *

if TYPE_CHECKING:
    from torch import Tensor

# %% answer
answers = {
    ### BEGIN SOLUTION
    # instead: "a": ...,
    # instead: "b": ...,
    # instead: "c": ...,
    # instead: "d": ...,
    # instead: "e": ...,
    # instead: "f": ...,
    # instead: "g": ...,
    # instead: "h": ...,
    # instead: "i": ...,
    # instead: "j": ...,
    "a": "broadcast",
    "b": "scatter",
    "c": "all_reduce",
    "d": "reduce",
    "e": "all_gather",
    "f": "gather",
    "g": "reduce_scatter",
    "h": "all_to_all",
    "i": "reduce_scatter",
    "j": "scatter",
    ### END SOLUTION
}

# %% checks
RANKS = 4
ROOTED = ("broadcast", "scatter", "gather", "reduce")
ALIKE = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")

Table = tuple[list[list[float]], list[list[float]]]
"""Every rank's numbers, before and after."""


def tables() -> dict[str, Table]:
    """Return the questions, as the text shows them."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    drawn = re.findall(r"^    (\w)  before +(.*)\n +after +(.*)$", text, re.M)
    return {name: (_numbers(before), _numbers(after)) for name, before, after in drawn}


def _numbers(row: str) -> list[list[float]]:
    return [[float(each) for each in cell.split() if each != "."] for cell in re.split(r" {2,}", row.strip())]


def every_collective(ctx: mk.Context, befores: list[list[list[float]]]) -> list[dict[str, list[float]]]:
    """Return, for each question, what this rank has after each collective; for those with a root, for every root."""
    import torch

    return [_after(ctx, torch.tensor(before[ctx.rank])) for before in befores]


def _after(ctx: mk.Context, mine: Tensor) -> dict[str, list[float]]:
    results = {}
    for name in ALIKE if len(mine) % RANKS == 0 else ALIKE[:2]:
        results[name] = getattr(ctx.comm, name)(mine.clone())
    for name in ROOTED if len(mine) % RANKS == 0 else ("broadcast", "gather", "reduce"):
        for root in range(RANKS):
            results[f"{name} {root}"] = getattr(ctx.comm, name)(mine.clone(), root)
    return {name: tensor.tolist() for name, tensor in results.items()}


def truth(room: Room) -> Mapping[str, str]:
    """Run every collective on ranks, and return for each question the one whose outcome is in the table."""
    asked = tables()
    done = room.cluster(RANKS).run(every_collective, [before for before, _ in asked.values()])
    right = {}
    for i, (question, (_, after)) in enumerate(asked.items()):
        fits = [name for name in done[0][i] if [done[rank][i][name] for rank in range(RANKS)] == after]
        names = {name.split()[0] for name in fits}
        assert len(names) == 1, f"question {question}: {fits} would fit"
        right[question] = names.pop()
    return right


EXERCISE = Questions()
