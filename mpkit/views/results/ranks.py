"""Charts of what ranks do unequally: bytes from rank to rank, attention, rows of experts and where experts are."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.table import table_text
from mpkit.common.units import bytes_text
from mpkit.views.chart.chart import COUNT, Axis, Chart, Panel, Series
from mpkit.views.drawing.colours import ink_of, tint
from mpkit.views.theme import GREY

if TYPE_CHECKING:
    import numpy.typing as npt

    from mpkit.prediction.expert_balance import ExpertBalance, LayerBalance
    from mpkit.timeline.traffic import CommMatrix
    from mpkit.trace.attention_work import AttentionWork
    from mpkit.trace.expert_load import ExpertLoad


# ---- bytes from rank to rank

LISTED = 16
"""The most ranks for which each pair is printed."""


def traffic(matrix: CommMatrix) -> Chart:
    """Return a heatmap per axis: a row per sender, a column per receiver, by the square root of the bytes."""
    highest = max((float(amounts.max()) for amounts in matrix.by_axis.values()), default=1.0)
    ranks = [str(rank) for rank in range(len(matrix.places))]
    names = [
        f"rank {rank} ({place})" if place else f"rank {rank}" for rank, place in enumerate(matrix.places)
    ]
    panels = []
    for axis, amounts in matrix.by_axis.items():
        ink, (factor, unit) = ink_of(axis), suitable_unit(amounts)
        rows = [
            Series(
                ranks[sender], row, inks=[tint(ink, sqrt(value / highest)) for value in row],
                labels=[f"{value / factor:.3g}" for value in row],
                told=[
                    f"{names[sender]} to {name}: {bytes_text(value)} along {axis}"
                    for name, value in zip(names, row, strict=True)
                ],
            )
            for sender, row in enumerate(amounts.tolist())
        ]  # fmt: skip
        note = f"{bytes_text(float(amounts.sum()))}" + f", cells in {unit}" * (len(ranks) <= 8)
        panels.append(Panel(rows, ranks, "cells", axis, note))
    note = "row: who sends; column: who receives; the stronger, the more" if panels else ""
    return Chart(matrix.title, panels, traffic_text(matrix), note=note, tall=44.0 * len(ranks))


def traffic_text(matrix: CommMatrix) -> str:
    """Return the matrices, one below the other; with many ranks, only the total of each axis."""
    lines = [f"{matrix.title}, row to column"]
    for axis, amounts in matrix.by_axis.items():
        lines += ["", f"{axis}: {bytes_text(amounts.sum())}, {int((amounts > 0).sum())} pairs"]
        if len(amounts) <= LISTED:
            factor, unit = suitable_unit(amounts)
            words = [[f"{value / factor:.3g}" if value else "·" for value in row] for row in amounts.tolist()]
            head = [unit, *map(str, range(len(words)))]
            lines += table_text([head, *([str(rank), *row] for rank, row in enumerate(words))], ())
    return "\n".join(lines if matrix.by_axis else [f"{matrix.title}."])


def suitable_unit(amounts: npt.NDArray[np.float64]) -> tuple[float, str]:
    """Return the unit that suits all amounts of a matrix: the divisor and the unit's name.

    >>> suitable_unit(np.array([[0.0, 131072.0]]))
    (1000.0, 'kB')
    """
    most = float(amounts.max(initial=0.0))
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= factor * 0.9995:
            return factor, unit
    return 1.0, "B"


# ---- attention


def attention(work: AttentionWork) -> Chart:
    """Return a bar per rank of the last step, and a line at the mean of the ranks that share its sequences."""
    ranks = [rank for group in work.groups for rank in group]
    means = [float(np.mean([work.by_rank[each] for each in group])) for group in work.groups for _ in group]
    pairs = [work.by_rank[rank] for rank in ranks]
    ends = [
        f"{value:,.0f}, {value / (mean or 1.0):.2f} x mean" for value, mean in zip(pairs, means, strict=True)
    ]
    series = [Series("pairs", pairs, ink_of("cp"), key=None), Series("mean", means, GREY, "mark", key=None)]
    panel = Panel(
        series, [f"rank {rank}" for rank in ranks], "rows", x=Axis(unit=COUNT, hidden=True), ends=ends,
        groups=[("", len(group)) for group in work.groups],
    )  # fmt: skip
    note = (
        "pairs of a query and a key, in all heads and layers; dashed: the mean of ranks that share sequences"
    )
    return Chart(f"Attention by rank in step {_last(work)}", [panel], attention_text(work), note=note)


def _last(work: AttentionWork) -> int:
    return work.first + len(work.pairs) - 1


def attention_text(work: AttentionWork) -> str:
    """Return a line per rank of the last step: its pairs, and how many times the mean of its group they are."""
    rows = [["", "pairs", "of the mean"]]
    for group in work.groups:
        mean = sum(work.by_rank[rank] for rank in group) / len(group) or 1.0
        rows += [
            [f"rank {r}", f"{work.by_rank[r]:,.0f}", f"{work.by_rank[r] / mean:.2f} x mean"] for r in group
        ]
    head = f"Attention in step {_last(work)}: pairs of a query and a key, in all heads and layers of a rank"
    busiest = f"The busiest rank has {work.imbalance:.2f} x the mean: the others wait for it."
    return "\n".join([head, *table_text(rows), busiest])


# ---- experts

BLOCKS = " ▁▂▃▄▅▆▇█"


def load(load: ExpertLoad) -> Chart:
    """Return a heatmap per layer: a row per expert, a column per step; the stronger, the more rows than the mean."""
    panels = []
    for layer, rows in load.rows.items():
        steps = [str(load.first + step) for step in range(len(rows))]
        shares = rows / rows.mean(axis=1, keepdims=True).clip(min=1e-300) / 2
        worst = load.imbalance(layer)
        series = [
            Series(
                str(expert), [value or 1e-9 for value in rows[:, expert].tolist()],
                inks=[tint(ink_of("ep"), float(share)) for share in shares[:, expert]],
                told=[f"step {step}, expert {expert}: {rows[i, expert]:.0f} rows" for i, step in enumerate(steps)],
            )
            for expert in range(rows.shape[1])
        ]  # fmt: skip
        note = f"busiest {worst[0]:.2f} x mean at first, {worst[-1]:.2f} x now"
        panels.append(Panel(series, steps, "cells", layer, note))
    note = "row: an expert; column: a step; pale: no row, strong: twice the mean"
    return Chart("Rows by expert and step", panels, load_text(load), note=note, across=1, tall=132)


def load_text(load: ExpertLoad) -> str:
    """Return a line per layer: its experts' shares of the last step's rows, and the busiest beside the mean."""
    steps = len(next(iter(load.rows.values())))
    rows = []
    for layer, each in load.rows.items():
        last = each[-1]
        unused = int((last == 0).sum())
        told = f"busiest {load.imbalance(layer)[-1]:.2f} x mean" + (
            f", {unused} without rows" if unused else ""
        )
        blocks = "".join(BLOCKS[round(8 * value / max(last.max(), 1.0))] for value in last)
        rows.append([layer, blocks, told])
    head = f"Rows by expert in step {load.first + steps - 1}; a full block is the busiest expert's"
    return "\n".join([head, *table_text(rows, (0, 1, 2))])


PALE = 0.35
"""The tint of an expert that has one slot."""


def balance(balance: ExpertBalance) -> Chart:
    """Return the load of each GPU before and after, a part per slot, strong where its expert has several."""
    panels = []
    for each in balance.layers:
        before, after = balance.imbalance[each.name]
        mean = float(each.load_before.mean())
        now = [held.tolist() for held in each.held_before]
        placed = each.phy2log.reshape(each.gpus, -1).tolist()
        for words, ratio, held, copies in (
            ("before", before, now, np.ones_like(each.copies)), ("after", after, placed, each.copies),
        ):  # fmt: skip
            series = [*_slots(each, held, copies.tolist()), Series("mean", [mean] * each.gpus, GREY, "mark")]
            gpus = [f"GPU {gpu}" for gpu in range(each.gpus)]
            note = f"busiest {ratio:.2f} x mean"
            panels.append(Panel(series, gpus, "bars", f"{each.name} {words}", note, y=Axis(unit=COUNT)))
    time = f"the experts of a step take {balance.time_ratio:.2f} x their time"
    note = f"Strong colour: an expert with several slots. Predicted, if routers choose as here: {time}."
    return Chart(_where(balance), panels, balance_text(balance), note=note, across=2, tall=120, shared=False)


def _slots(layer: LayerBalance, held: list[list[int]], copies: list[int]) -> Iterator[Series]:
    """Yield the slots of all GPUs, the busiest of each first."""
    rows = [sorted(((layer.rows[e] / copies[e], e) for e in gpu), reverse=True) for gpu in held]
    for slot in range(max(map(len, rows))):
        mine = [gpu[slot] if slot < len(gpu) else (0.0, 0) for gpu in rows]
        yield Series(
            f"slot {slot}", [float(size) for size, _ in mine], key=None, labels=[str(e) for _, e in mine],
            inks=[tint(ink_of("ep"), 1.0 if copies[e] > 1 else PALE) for _, e in mine],
            told=[
                f"expert {e}: {size:.0f} rows" + f", one of {copies[e]} copies" * (copies[e] > 1) for size, e in mine
            ],
        )  # fmt: skip


def _where(balance: ExpertBalance) -> str:
    first = balance.layers[0]
    where = f"{len(first.rows)} experts in {len(first.phy2log)} slots of {first.gpus} GPUs"
    return f"{where}, rows of step {balance.step}"


def balance_text(balance: ExpertBalance) -> str:
    """Return a line per layer, then what moves, and the predicted time of experts with what it assumes."""
    rows = [["layer", "busiest GPU x mean", "slots with copies", "weights that move"]]
    for each in balance.layers:
        before, after = balance.imbalance[each.name]
        copied = int((each.copies[each.phy2log] > 1).sum())
        rows.append([each.name, f"{before:.2f} -> {after:.2f}", str(copied), str(each.moves)])
    return "\n".join(
        [
            _where(balance),
            *table_text(rows, (0, 1, 2, 3)),
            f"{balance.moves} weights of experts move",
            f"Predicted: the experts of a step take {balance.time_ratio:.2f} x their time.",
            "Assumed: a layer takes as long as its busiest GPU, time grows with rows, copies share rows evenly, and "
            "routers choose as in this step. Moving weights is not in it, nor is what copies send in each step.",
        ]
    )
