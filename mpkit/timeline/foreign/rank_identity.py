"""What a file says of its rank: which it is, of how many, in which process groups, on which device."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.timeline.foreign.reading.sound_event import text_of
from mpkit.trace.validation import MOST_RANKS

__all__ = ["RankIdentity", "read_header"]

LONGEST = 1_000_000
"""The most characters of a mapping that is written as a text."""

_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})", re.IGNORECASE)


@dataclass(frozen=True)
class RankIdentity:
    """What is known of one rank.

    Attributes:
        rank: its number in the world; None if unknown. It is no device number.
        world_size: the number of ranks of the run; None if unknown.
        backend: "nccl", "gloo", ...; "" if unknown.
        groups: the ranks of each process group, by its name; those listed in full only.
        axes: the mesh axis of each process group that a DeviceMesh made, by the group's name.
        device: the name of its GPU; "" without one.
        source: the file's name.
    """

    rank: int | None
    world_size: int | None
    backend: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    device: str = ""
    source: str = ""

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks of the run, as far as they are known to exist."""
        return tuple(range(self.world_size or 0)) or (() if self.rank is None else (self.rank,))


def read_header(header: Mapping[str, Any], path: Path, device: int = 0) -> RankIdentity:
    """Read what the header of a file says.

    Args:
        header: what the file says beside its events.
        path: the file, whose name may tell the rank where the header does not.
        device: the number of the GPU that its kernels ran on.

    >>> one = read_header({"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}, Path("trace.json"))
    >>> one.rank, one.world_size
    (3, 8)
    >>> read_header({}, Path("rank12.json")).rank, read_header({}, Path("trace.json")).rank
    (12, None)
    """
    said = _read_mapping(header.get("distributedInfo"))
    rank, world = _number(said.get("rank")), _number(said.get("world_size"))
    if rank is None and not said and (found := _IN_NAME.search(path.name)):
        rank = int(found[1])
    groups: dict[str, tuple[int, ...]] = {}
    axes: dict[str, str] = {}
    listed = said.get("pg_config")
    for group in listed if isinstance(listed, list) else ():
        if not isinstance(group, Mapping):
            continue
        name, ranks = text_of(group.get("pg_name")), group.get("ranks", ())
        size = _number(group.get("pg_size"))
        if (
            isinstance(ranks, list)
            and all(type(each) is int and 0 <= each <= MOST_RANKS for each in ranks)
            and size in (None, len(ranks))
        ):
            groups[name] = tuple(sorted(ranks))
        words = text_of(group.get("pg_desc"))
        if words.startswith("mesh_"):
            axes[name] = words.removeprefix("mesh_")
    devices = header.get("deviceProperties")
    if isinstance(devices, str):
        devices = _parse_text(devices)
    listed = devices if isinstance(devices, list) else ()
    names = {
        text_of(each.get("id")): text_of(each.get("name")) for each in listed if isinstance(each, Mapping)
    }
    only = (
        next(iter(names.values())) if len(names) == 1 else ""
    )  # ranks that see one GPU may list it by another id
    gpu = names.get(str(device), only)
    return RankIdentity(rank, world, text_of(said.get("backend")), groups, axes, gpu, path.name)


def _read_mapping(value: Any) -> dict[str, Any]:
    """Return a mapping that the header has as one, or as the text of one."""
    value = _parse_text(value) if isinstance(value, str) else value
    return dict(value) if isinstance(value, Mapping) else {}


def _parse_text(text: str) -> Any:
    """Return what a text says as JSON or as Python writes it; None if it was cut short."""
    if len(text) > LONGEST:
        return None
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _number(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= MOST_RANKS else None
