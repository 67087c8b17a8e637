"""The files of a checkpoint's ranks: what each rank holds, as it holds it, and where that lies in the whole.

    write    each rank: name -> its elements, the shape of the whole parameter, the part of it that tensor parallelism
             leaves to the rank, and where in that flattened part its elements begin (ZeRO)
    read     a part that begins and ends where the reading rank's does is taken as it is; under any other division
             the parts of one parameter make the whole, of which the rank takes its own

`torch.save` writes a file. `torch.load` maps it into memory, so that only what is wanted is read, and runs no code of
the file (`weights_only`). One parameter at a time is whole on the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.disk import name_full_disk
from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, DamagedCheckpoint
from mpkit.strategies.stage.shard import HeldPart, Shard, put_together

__all__ = ["SavedParts", "check_told", "name_of", "save_new", "write_rank"]


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.pt"


def write_rank(path: Path, parts: Mapping[str, HeldPart]) -> None:
    """Write a rank's file, and flush it to the disk."""
    content = {name: {"tensor": _compact(part.tensor), "place": part.place} for name, part in parts.items()}
    save_new(path, content)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_new(path: Path, content: Any) -> None:
    """Write a new file with `torch.save`; a full disk is named."""
    with name_full_disk(path.parent), path.open("xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # of a full disk torch.save says that the file's position is unexpected
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, with no other elements in its memory, which would be written too."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class SavedParts:
    """The files of all ranks, of which nothing is read before it is asked for.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> for rank in (0, 1):  # ZeRO divides six elements
    ...     write_rank(folder / name_of(rank), {"weight/w": HeldPart(torch.ones(3) * rank, (2, 3), 3 * rank)})
    >>> columns = HeldPart(torch.empty(4), (2, 3), 0, Shard((2, 3), 1, (range(1, 3),)))
    >>> SavedParts(folder, ["rank-0.pt", "rank-1.pt"]).read("weight/w", columns)
    >>> columns.tensor
    tensor([0., 0., 1., 1.])

    Raises:
        DamagedCheckpoint: a file holds something else.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._parts: dict[str, list[HeldPart]] = {}
        for file in names:
            try:
                content = torch.load(folder / file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # of what somebody put in a file's place, reading can raise anything
                raise DamagedCheckpoint(
                    f"{file} could not be read without running code, or at all ({type(error).__name__}: "
                    f"{str(error).splitlines()[0][:100] if str(error) else ''})"
                ) from None
            if not isinstance(content, dict) or not all(map(_is_part, content.items())):
                raise DamagedCheckpoint(f"{file} is not what a rank writes")
            for name, part in content.items():
                whole, divided, start = part["place"]
                held = HeldPart(part["tensor"], whole, start, _shard(whole, divided))
                self._parts.setdefault(name, []).append(held)

    def __contains__(self, name: str) -> bool:
        """Return whether there is such an entry."""
        return name in self._parts

    @property
    def names(self) -> list[str]:
        """The names of all entries."""
        return list(self._parts)

    def numel(self, name: str) -> int:
        """Return how many elements of an entry there are; 0 of one that is not there."""
        return sum(part.tensor.numel() for part in self._parts.get(name, ()))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of an entry."""
        return self._parts[name][0].tensor.dtype

    def read(self, name: str, into: HeldPart) -> None:
        """Fill a rank's part of an entry, however the ranks were divided that wrote it.

        Raises:
            DamagedCheckpoint: it is not there, or not each of its elements once.
        """
        parts, numel = self._parts.get(name, []), into.tensor.numel()
        for part in parts:
            if part.place == into.place and part.tensor.numel() == numel:
                into.tensor.copy_(part.tensor)
                return
        whole = _whole(name, tuple(into.whole), parts)
        local = whole if into.shard is None else into.shard.take(whole)
        into.tensor.copy_(local.reshape(-1)[into.start : into.start + numel])


def _is_part(entry: Any) -> bool:
    """Return whether an entry of a file is a part, whose place is within its whole."""
    name, part = entry
    if not isinstance(name, str) or not isinstance(part, dict) or set(part) != {"tensor", "place"}:
        return False
    tensor, place = part["tensor"], part["place"]
    if not (type(tensor) is Tensor and tensor.dim() == 1 and isinstance(place, tuple) and len(place) == 3):
        return False
    whole, divided, start = place
    if not (_are_counts(whole) and isinstance(divided, tuple) and _are_counts((start,))):
        return False
    for each in divided:
        if not (isinstance(each, tuple) and len(each) == 2 and each[0] in range(len(whole))):
            return False
        dim, ranges = each
        if not (isinstance(ranges, tuple) and all(_are_counts(r) and len(r) == 2 for r in ranges)):
            return False
        if not all(first <= last <= whole[dim] for first, last in ranges):
            return False
    shard = _shard(whole, divided)
    return bool(start + tensor.numel() <= prod(shard.shape if shard else whole))


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _shard(whole: tuple[int, ...], divided: tuple[Any, ...]) -> Shard | None:
    shard: Shard | None = None
    for dim, ranges in reversed(divided):
        shard = Shard(whole, dim, tuple(range(*each) for each in ranges), shard)
    return shard


def _whole(name: str, shape: tuple[int, ...], parts: list[HeldPart]) -> Tensor:
    """Return the whole of an entry, of which each element has to be there once."""
    count = sum(part.tensor.numel() for part in parts)
    if count != prod(shape) or any(part.whole != shape for part in parts):
        raise DamagedCheckpoint(f"of {name}, which has {prod(shape)} elements of shape {shape}, {count} fit")
    ones = [part._replace(tensor=torch.ones(part.tensor.numel(), dtype=torch.uint8)) for part in parts]
    if not bool(put_together(ones).all()):
        raise DamagedCheckpoint(f"parts of {name} lie over each other")
    return put_together(parts)


def check_told(head: CheckpointHead, saved: SavedParts) -> None:
    """Check that a checkpoint has the tensors that its head names: parameters, buffers and random states.

    Raises:
        DamagedCheckpoint: a tensor is missing, or has another size.
    """
    wanted = {
        f"{kind}/{name}": prod(map(int, form[1 : form.index("]")].split(", "))) if form[1] != "]" else 1
        for kind, facts in (("weight", head.facts["trained"]), ("model", head.facts["others"]))
        for name, form in facts.items()
    }
    for name, numel in wanted.items():
        if (there := saved.numel(name)) != numel:
            raise DamagedCheckpoint(f"its {HEAD} tells of {numel} elements of {name}, and {there} are there")
    for rank in range(head.world_size):
        if f"random/{rank}" not in saved:
            raise DamagedCheckpoint(
                f"its {HEAD} tells of {head.world_size} ranks; rank {rank}'s random state is not there"
            )
