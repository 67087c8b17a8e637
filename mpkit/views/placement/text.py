"""A placement in the terminal: the ranks by node, who communicates over which link, and what tp, ep and ZeRO divide.

What ZeRO shards is a picture, too: the states of a replica as bars, the elements of each parameter as a table.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.plan.mesh_of_trace import long_axes, place_text
from mpkit.strategies.placement.placed_ranks import Talk, brief
from mpkit.strategies.placement.zero_shares import STATES, Share, sharded_states
from mpkit.views.drawing.colours import ink_of
from mpkit.views.theme import MARGIN, wrap_words

if TYPE_CHECKING:
    from mpkit.strategies.placement.placed_ranks import Placement

__all__ = [
    "divided_heading",
    "divided_layers",
    "held_words",
    "link_words",
    "placement_text",
    "shape_words",
    "zero_svg",
    "zero_text",
]

REPLICAS, PARAMETERS = 8, 16
"""The most replicas and the most parameters that are shown."""

BAR, TALL = 210.0, 14.0
"""Pixels: the most width of a state, and the height of a bar."""


def held_words(placement: Placement) -> str:
    """Describe what each replica holds.

    >>> from mpkit import Plan
    >>> held_words(Plan.zero(1, 4).placement())
    'parameters and gradients whole, 1/4 of optimizer states'
    """
    parted = sharded_states(placement.zero)
    whole = " and ".join(state for state in STATES if not parted[state])
    part = ", ".join(state for state in STATES if parted[state])
    return ", ".join(
        filter(None, [f"{whole} whole" if whole else "", f"1/{placement.shard_count} of {part}"])
    )


def zero_text(placement: Placement) -> list[str]:
    """Return lines for the terminal; none without ZeRO."""
    if not placement.zero:
        return []
    lines = ["", f"what ZeRO-{placement.zero} shards: each replica has {held_words(placement)}"]
    shown = placement.shares[:PARAMETERS]
    if not shown:
        return lines
    rows = [[_name(share), *_parts(share)] for share in shown]
    rows.insert(0, ["elements", *_replicas(placement)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    left = len(placement.shares) - len(shown)
    return lines + ([f"  and {left} more"] if left > 0 else [])


def zero_svg(placement: Placement, y: float, width: float) -> tuple[list[str], float]:
    """Draw a bar per replica and state, filled where the replica holds it, and a table of parameters.

    Returns the elements and the y below them.
    """
    if not placement.zero:
        return [], y
    n, left, parted = placement.shard_count, MARGIN + 10, sharded_states(placement.zero)
    bar = min(BAR, (width - left - 64 - MARGIN) / len(STATES) - 24)
    y += 14
    parts = [_words(left, y, f"what ZeRO-{placement.zero} shards", "words", ' font-weight="600"')]
    y += 20
    starts = [left + 64 + i * (bar + 24) for i in range(len(STATES))]
    for state, x in zip(STATES, starts, strict=True):
        how = f", 1/{n} each" if parted[state] else ", whole"
        word = wrap_words(state + how, bar + 24)[0].rstrip(",")  # the bars below say how
        parts.append(_words(x, y, word, "faint"))
    for replica, name in enumerate(_replicas(placement)):
        y += TALL + 6
        parts.append(_words(left, y, name, "words"))
        for state, x in zip(STATES, starts, strict=True):
            first, wide = (x + bar * (replica % n) / n, bar / n) if parted[state] else (x, bar)
            told = f"{name}: {'1/' + str(n) + ' of the ' if parted[state] else 'all '}{state}"
            parts.append(
                f"<g><title>{escape(told)}</title>"
                f'<rect class="box" x="{x:.1f}" y="{y - TALL + 3:.1f}" width="{bar:g}" height="{TALL:g}" rx="3"/>'
                f'<rect fill="{ink_of("dp")}" x="{first:.1f}" y="{y - TALL + 3:.1f}" width="{max(wide, 2):.1f}" '
                f'height="{TALL:g}" rx="3"/></g>'
            )
    if placement.replicas > REPLICAS:
        y += 18
        parts.append(_words(left, y, f"and {placement.replicas - REPLICAS} more", "faint"))
    table, y = _table(placement, y + 12, width)
    return parts + table, y + 20


def _table(placement: Placement, y: float, width: float) -> tuple[list[str], float]:
    """Draw a table of the elements of each parameter that each replica holds."""
    shown = placement.shares[:PARAMETERS]
    if not shown:
        return [], y
    left, wide = MARGIN + 10, max(len(_name(share)) for share in shown) * 6.8 + 24
    column = max(len(part) for share in shown for part in _parts(share)) * 6.6 + 20
    y += 18
    parts = [_words(left, y, "elements", "words", ' font-weight="600"')]
    fits = max(1, min(REPLICAS, int((width - 40 - wide) / max(column, 40))))
    for i, name in enumerate(_replicas(placement)[:fits]):
        parts.append(_words(left + wide + max(column, 40) * i, y, name, "faint"))
    for share in shown:
        y += 18
        parts.append(_words(left, y, _name(share), "words"))
        for i, word in enumerate(_parts(share)[:fits]):
            parts.append(_words(left + wide + max(column, 40) * i, y, word, "faint"))
    if len(placement.shares) > len(shown):
        y += 18
        parts.append(_words(left, y, f"and {len(placement.shares) - len(shown)} more", "faint"))
    return parts, y


def _replicas(placement: Placement) -> list[str]:
    """Name the replicas: by their rank if each has only one, else by their place."""
    one_each = placement.replicas == placement.mesh.size
    names = [f"rank {i}" if one_each else f"replica {i}" for i in range(placement.replicas)]
    return names[:REPLICAS]


def _name(share: Share) -> str:
    return f"{share.name} {list(share.shape)}"


def _parts(share: Share) -> list[str]:
    return [_elements(start, end) for start, end in share.parts[:REPLICAS]]


def _elements(start: int, end: int) -> str:
    """Name a range of elements.

    >>> _elements(0, 4), _elements(8, 9), _elements(0, 0)
    ('0-3', '8', 'none')
    """
    if end - start < 2:
        return str(start) if end > start else "none"
    return f"{start}-{end - 1}"


def _words(x: float, y: float, words: str, look: str, more: str = "") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


MOST = 64
"""The most ranks, and the most layers, that are listed."""


def placement_text(placement: Placement) -> str:
    """Return the placement as lines of text.

    Args:
        placement: what to show.
    """
    lines = [shape_words(placement)]
    for number, ranks in enumerate(placement.nodes):
        lines += ["", f"node {number}"] if placement.hardware else [""]
        for rank in ranks[: MOST if not number else max(0, MOST - ranks[0])]:
            held = brief(placement.layers_of(rank))
            if placement.zero == 3 and held:
                held = f"1/{placement.shard_count} of {held}"
            lines.append(f"  rank {rank:<3} {place_text(placement.mesh, rank)}{'   ' + held if held else ''}")
        if ranks[-1] >= MOST:
            lines.append(f"  ... to rank {ranks[-1]}")
    if placement.talks:
        lines += ["", "who talks to whom"]
        lines += [f"  {talk.axis}  {groups_words(talk)}{link_words(talk)}" for talk in placement.talks]
    lines += zero_text(placement)
    if rows := divided_layers(placement):
        lines += ["", divided_heading(placement)]
        wide = max(len(name) for name, _ in rows)
        lines += [f"  {name:<{wide}}  {' | '.join(parts)}" for name, parts in rows[:MOST]]
    return "\n".join([*lines, *([""] if placement.notes else []), *placement.notes])


def shape_words(placement: Placement) -> str:
    """Describe how many ranks there are, along which axes, on which machine."""
    mesh = placement.mesh
    long = [f"{axis} {mesh.degree(axis)}" for axis in long_axes(mesh)]
    many = f"{mesh.size} rank{'s' * (mesh.size > 1)}"
    machine = placement.hardware
    on = ""
    if machine is not None:
        nodes = len(placement.nodes)
        kinds = " and ".join(dict.fromkeys(each.name for each in machine.mixed or (machine.device,)))
        on = f", on {nodes} node{'s' * (nodes > 1)} of {machine.per_node} {kinds}"
    return f"{' x '.join(long) + ' = ' if len(long) > 1 else ''}{many}{on}"


def groups_words(talk: Talk, most: int = 8) -> str:
    """List the groups; if there are many, only the first.

    >>> groups_words(Talk("tp", ((0, 1), (2, 3)), None, False))
    '(0 1) (2 3)'
    """
    shown = [f"({' '.join(map(str, group[:8]))}{' ...' * (len(group) > 8)})" for group in talk.groups[:most]]
    left = len(talk.groups) - most
    return " ".join(shown) + (f" and {left} more" if left > 0 else "")


def link_words(talk: Talk) -> str:
    """Name the link; "" if it is not known."""
    if talk.link is None:
        return ""
    where = "between nodes" if talk.crosses else "within a node"
    return f", {talk.link.name} {where}, {talk.link.bandwidth / 1e9:.3g} GB/s"


def divided_heading(placement: Placement) -> str:
    """Return the heading of the layers that are divided, with the axes that do: tp and ep."""
    mesh = placement.mesh
    axes = [axis for axis in ("tp", "ep") if mesh.degree(axis) > 1] or ["tp"]
    return f"what {' and '.join(axes)} divide{'s' * (len(axes) == 1)}"


def divided_layers(placement: Placement) -> list[tuple[str, list[str]]]:
    """Return what tp and ep divide: the names of layers, and for each the part of every tp rank.

    Layers that differ only in numbers and are divided in the same way are put together, with a * for the number. Biases
    are included in their weights.
    """
    lines: dict[tuple[str, ...], None] = {}
    for name in placement.shards:
        layer = name.removesuffix(".weight")
        if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in placement.shards:
            continue
        parts = [placement.part(name, rank) for rank in range(placement.mesh.tp)]
        lines[(re.sub(r"\d+", "*", layer), *parts)] = None
    return [(name, parts if len(set(parts)) > 1 else parts[:1]) for name, *parts in lines]
