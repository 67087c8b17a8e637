"""A placement in words: the ranks by node, who communicates over which link, and what tp, ep and ZeRO divide."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpkit.common.table import table_text
from mpkit.plan.mesh import long_axes, place_text
from mpkit.strategies.placement.placement import STATES, Talk, brief, sharded_states

if TYPE_CHECKING:
    from mpkit.strategies.placement.placement import Placement


REPLICAS, PARAMETERS = 8, 16
"""The most replicas and the most parameters that are shown."""


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
    rows = share_rows(placement)
    lines += [f"  {line}" for line in table_text(rows, range(len(rows[0])))] if len(rows) > 1 else []
    left = len(placement.shares) - PARAMETERS
    return lines + ([f"  and {left} more"] if left > 0 else [])


def share_rows(placement: Placement) -> list[list[str]]:
    """Return a table of the elements of each parameter that each replica holds; the first row has the heads.

    >>> from mpkit import Plan
    >>> share_rows(Plan.zero(1, 2).placement())
    [['elements', 'rank 0', 'rank 1']]
    """
    rows = [["elements", *replica_names(placement)]]
    for share in placement.shares[:PARAMETERS]:
        parts = [
            f"{start}-{end - 1}" if end - start > 1 else str(start) if end > start else "none"
            for start, end in share.parts[:REPLICAS]
        ]
        rows.append([f"{share.name} {list(share.shape)}", *parts])
    return rows


def replica_names(placement: Placement) -> list[str]:
    """Name the replicas: by their rank if each has only one, else by their place."""
    name = "rank" if placement.replicas == placement.mesh.size else "replica"
    return [f"{name} {i}" for i in range(min(placement.replicas, REPLICAS))]


MOST = 64
"""The most ranks, and the most layers, that are listed."""


def placement_text(placement: Placement) -> str:
    """Return the placement as lines of text."""
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
        on = f", on {nodes} node{'s' * (nodes > 1)} of {machine.per_node} {machine.device.name}"
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
    """Return what tp and ep divide: the names of layers, and for each the parts of the ranks along that axis.

    Layers that differ only in numbers and are divided in the same way are put together, with a * for the number. Biases
    are included in their weights.
    """
    lines: dict[tuple[str, ...], None] = {}
    for name, parts in (*placement.shards.items(), *placement.experts.items()):
        layer = name.removesuffix(".weight")
        if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in placement.shards:
            continue
        lines[(re.sub(r"\d+", "*", layer), *parts)] = None
    return [(name, parts if len(set(parts)) > 1 else parts[:1]) for name, *parts in lines]
