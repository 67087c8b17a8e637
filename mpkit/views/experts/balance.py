"""A placement of experts: a line per layer, and a picture of the load of each GPU before and after.

left       a bar per GPU as experts are placed now
right      the same with the placement; a segment per slot, in full colour if its expert has copies
dashes     the mean, below which no placement can bring the busiest GPU
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import bytes_text
from mpkit.views.drawing.axes import ink_of, legible_on, tint
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.theme import MARGIN, THEMES

if TYPE_CHECKING:
    from mpkit.prediction.experts.expert_balance import ExpertBalance, LayerBalance

__all__ = ["balance_svg", "balance_text"]

TOP, TALL, GAP, APART, PALE = 68.0, 120.0, 62.0, 32.0, 0.35
"""Pixels: the upper edge, the highest bar, between layers, between before and after; the tint of a single copy."""


def balance_text(balance: ExpertBalance) -> str:
    """Return a line per layer, then what moves, and the predicted time of experts with what it assumes.

    Args:
        balance: what to show.
    """
    wide = max(len("layer"), *(len(each.name) for each in balance.layers))
    lines = [
        _title(balance),
        f"{'layer'.ljust(wide)}  busiest GPU x mean  slots with copies  weights that move",
    ]
    for each in balance.layers:
        before, after = balance.imbalance[each.name]
        copied = int((each.copies[each.phy2log] > 1).sum())
        change = f"{before:.2f} -> {after:.2f}"
        lines.append(f"{each.name.ljust(wide)}  {change:<18}  {copied:<17}  {each.moves}")
    sized = "" if balance.moved_bytes is None else f" ({bytes_text(balance.moved_bytes)})"
    lines.append(f"{balance.moves} weights of experts move{sized}")
    lines.append(f"Predicted: the experts of a step take {balance.time_ratio:.2f} x their time.")
    lines.append(
        "Assumed: a layer takes as long as its busiest GPU, time grows with rows, copies share rows evenly, and "
        "routers choose as in this step. Moving weights is not in it, nor is what copies send in each step."
    )
    return "\n".join(lines)


def balance_svg(balance: ExpertBalance, width: int = 720) -> str:
    """Draw the bars.

    Args:
        balance: what to draw.
        width: in pixels.
    """
    full = ink_of("ep")
    looks = [(f'fill="{tint(full, PALE)}"', "an expert's only slot"), (f'fill="{full}"', "a slot of several")]
    legend = keys(looks, 42, width)
    panels, y = [], TOP + legend.more
    for each in balance.layers:
        before, after = balance.imbalance[each.name]
        panels.append(_panel(each, f"busiest {before:.2f} x mean before, {after:.2f} x after", y, width))
        y += TALL + GAP
    time = f"the experts of a step take {balance.time_ratio:.2f} x their time"
    note = f"dashes: the mean; predicted: {time}, if routers choose as here"
    body = [*legend.parts, *panels]
    classes = {name: {"mean": f"stroke:{theme.text}"} for name, theme in THEMES.items()}
    title, head = "Experts on GPUs", _title(balance)
    return sheet("balance", title, str(balance), body, width, y - 18, head=head, foot=note, classes=classes)


def _title(balance: ExpertBalance) -> str:
    first = balance.layers[0]
    nodes = f" of {balance.nodes} nodes" if balance.nodes > 1 else ""
    where = f"{len(first.rows)} experts in {len(first.phy2log)} slots of {balance.gpus} GPUs{nodes}"
    return f"{where}, {balance.policy} policy, rows of step {balance.step}"


def _panel(layer: LayerBalance, told: str, y: float, width: int) -> str:
    """Draw one layer: its bars before and after, on one scale."""
    half = (width - 2 * MARGIN - APART) / 2
    highest = max(float(layer.load_before.max()), float(layer.load_after.max()), 1.0)
    mean = float(layer.load_before.mean())
    before = [held.tolist() for held in layer.held_before]
    after = layer.phy2log.reshape(layer.gpus, -1).tolist()
    parts = [
        f'<text class="words" x="{MARGIN:g}" y="{y + 12:g}"><tspan font-weight="600">{escape(layer.name)}</tspan>'
        f'<tspan class="faint" dx="8">{told}</tspan></text>'
    ]
    bottom = y + 22 + TALL
    for x, placed, copies in (
        (MARGIN, before, layer.copies_before),
        (MARGIN + half + APART, after, layer.copies),
    ):
        for gpu, experts in enumerate(placed):
            at = x + half * gpu / layer.gpus
            parts += _bar(
                layer, gpu, experts, copies.tolist(), (at, half / layer.gpus), bottom, TALL / highest
            )
        up = bottom - TALL * mean / highest
        parts.append(
            f'<path class="mean" d="M{x:g} {up:.1f}h{half:.1f}" fill="none" stroke-dasharray="4 3"/>'
        )
    return f'<g aria-label="{escape(layer.name)}">{"".join(parts)}</g>'


def _bar(
    layer: LayerBalance, gpu: int, experts: list[int], copies: list[int], place: tuple[float, float],
    bottom: float, scale: float,
) -> list[str]:  # fmt: skip
    """Draw one GPU: its slots on top of each other, the busiest lowest.

    Args:
        layer: the layer.
        gpu: its number.
        experts: the expert of each of its slots.
        copies: by expert, how many slots have it.
        place: the bar's left edge, and its width with a gap.
        bottom: the bar's lower edge.
        scale: pixels per row.
    """
    (x, step), y, parts = place, bottom, list[str]()
    wide = max(step - min(6.0, step / 4), 0.5)
    for rows, expert in sorted(((layer.rows[each] / copies[each], each) for each in experts), reverse=True):
        tall = float(rows) * scale
        y -= tall
        fill = tint(ink_of("ep"), 1.0 if copies[expert] > 1 else PALE)
        told = f"GPU {gpu}, expert {expert}: {rows:.0f} rows" + (
            f", one of {copies[expert]} copies" if copies[expert] > 1 else ""
        )
        parts.append(
            f'<rect fill="{fill}" x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{max(tall - 0.8, 0.2):.2f}">'
            f"<title>{told}</title></rect>"
        )
        if tall >= 11 and wide >= 16:
            parts.append(
                f'<text fill="{legible_on(fill)}" font-size="10" x="{x + wide / 2:.1f}" y="{y + tall / 2 + 3:.1f}" '
                f'text-anchor="middle">{expert}</text>'
            )
    if wide >= 12:
        parts.append(
            f'<text class="faint" font-size="10" x="{x + wide / 2:.1f}" y="{bottom + 13:.1f}" '
            f'text-anchor="middle">{"GPU " * (wide >= 40)}{gpu}</text>'
        )
    return parts
