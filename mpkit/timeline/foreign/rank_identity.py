"""What a file says of its rank: which it is, of how many, in which process groups, on which device."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.timeline.foreign.kineto import text_of
from mpkit.trace.validation import MOST_RANKS

__all__ = ["RankIdentity", "read_header"]

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


def read_header(header: Mapping[str, Any], path: Path, device: str = "0") -> RankIdentity:
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
    said = _parsed(header.get("distributedInfo"), dict)
    rank, world = _rank_number(said.get("rank")), _rank_number(said.get("world_size"))
    if rank is None and not said and (found := _IN_NAME.search(path.name)):
        rank = int(found[1])
    groups: dict[str, tuple[int, ...]] = {}
    axes: dict[str, str] = {}
    for group in _parsed(said.get("pg_config"), list):
        if not isinstance(group, dict):
            continue
        name, ranks, words = text_of(group.get("pg_name")), group.get("ranks"), text_of(group.get("pg_desc"))
        numbers = [_rank_number(each) for each in ranks] if isinstance(ranks, list) else [None]
        if None not in numbers and _rank_number(group.get("pg_size")) in (None, len(numbers)):
            groups[name] = tuple(sorted(number for number in numbers if number is not None))
        if words.startswith("mesh_"):
            axes[name] = words.removeprefix("mesh_")
    devices = [each for each in _parsed(header.get("deviceProperties"), list) if isinstance(each, dict)]
    names = {text_of(each.get("id")): text_of(each.get("name")) for each in devices}
    only = (
        next(iter(names.values())) if len(names) == 1 else ""
    )  # ranks that see one GPU may list it by another id
    return RankIdentity(
        rank, world, text_of(said.get("backend")), groups, axes, names.get(device, only), path.name
    )


def _parsed(value: Any, kind: type[Any]) -> Any:
    """Return a mapping or a list that the header has as one, or as the text of one (JSON or Python's); else empty."""
    if isinstance(value, str) and len(value) < 1_000_000:
        for read in (read_json, ast.literal_eval):
            try:
                value = read(value)
                break
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # it was cut short
                continue
    return value if isinstance(value, kind) else kind()


def _rank_number(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= MOST_RANKS else None
