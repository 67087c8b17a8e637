"""The chart of a training: the loss and logged metrics over the steps, a panel per metric.

What is measured in training and in evaluation shares a panel: "loss" and "eval loss", "accuracy" and "eval accuracy".
A metric that several ranks logged with different values has a line for each of them.
"""

from collections.abc import Sequence

from mpkit.trace.metrics import Metrics
from mpkit.views.chart.chart import COUNT, NUMBER, Axis, Chart, Panel, Series
from mpkit.views.drawing.colours import INKS, Key

MOST, LINES = 12, 4
"""The most panels, and the most lines of a panel."""
KEYS = (Key.FORWARD, Key.INPUT_GRAD, Key.OPTIMIZER, Key.COMM, Key.DATA, Key.COMPUTE)


def losses(
    values: Sequence[float], first_step: int, metrics: Metrics, steps: int | None = None
) -> Chart | None:
    """Return the loss first, then metrics in the order in which they were logged; None if there is too little to draw.

    `values` has the loss of each step from `first_step` on. There is room for `steps` of them (None: unknown).
    """
    lines: dict[str, dict[str, dict[int, float]]] = {}
    if values or (steps or 0) > 2:
        lines["loss"] = {"loss": dict(enumerate(values, first_step))}
    for name in metrics:
        mine, by_rank = lines.setdefault(name.removeprefix("eval "), {}), metrics.by_rank(name)
        if len({tuple(each.items()) for each in by_rank.values()}) == 1:
            mine[name] = next(iter(by_rank.values()))
        else:
            mine |= {f"{name}, rank {rank}": each for rank, each in by_rank.items()}
    if not metrics and max(len(values), steps or 0) < 3:
        return None
    panels = [_panel(name, mine, steps) for name, mine in [*lines.items()][:MOST]]
    more = ", ".join([*lines][MOST:])
    told = "; ".join(f"{panel.title} is {panel.note}" for panel in panels if panel.note)
    return Chart(
        "", panels, f"Loss and metrics by step. {told}", f"not drawn: {more}"[:140] if more else "", least=280,
        tall=110, shared=False,
    )  # fmt: skip


def _panel(name: str, lines: dict[str, dict[int, float]], steps: int | None) -> Panel:
    inks = [(INKS[key].light, INKS[key].dark) for key in KEYS]
    series = [
        Series(
            each,
            [*values.values()],
            inks[i % len(inks)],
            "line",
            at=[*values],
            key="" if len(lines) > 1 else None,
        )
        for i, (each, values) in enumerate(sorted(lines.items(), key=lambda line: len(line[1]) == 0))
    ]
    latest = [f"{each.removeprefix(f'{name}, ')} {NUMBER.words(v[max(v)])}" for each, v in lines.items() if v]
    note = latest[0].removeprefix(name).strip() if len(latest) == 1 else ", ".join(latest[:LINES])
    note += f" and {len(latest) - LINES} more" if len(latest) > LINES else ""
    last = None if steps is None or steps < 2 else steps - 1
    return Panel(
        series,
        kind="lines",
        title=name,
        note=note,
        keys=len(lines) > 1,
        x=Axis("step", COUNT, None, last),
        y=Axis(unit=NUMBER),
    )
