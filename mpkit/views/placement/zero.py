"""What ZeRO shards, in a placement: the states of a replica as bars, and the elements of each parameter as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.strategies.placement.zero_shares import STATES, Share, sharded_states
from mpkit.views.drawing.axes import ink_of
from mpkit.views.theme import MARGIN, wrap_words

if TYPE_CHECKING:
    from mpkit.strategies.placement.placed_ranks import Placement

__all__ = ["held_words", "zero_svg", "zero_text"]

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
