"""The files of a checkpoint's ranks: what each rank holds, as it holds it, and its place in the whole.

    write    each rank: name -> its elements, the shape of the whole parameter, the part of it that tensor parallelism
             leaves to the rank, and where in that flattened part its elements begin (ZeRO)
    read     a part that begins and ends where the reading rank's does, as it is; under any other division, put the
             whole parameter together from its parts, and take the rank's own

`torch.save` writes a file. `torch.load` maps it into memory, so that it reads only what is wanted, and runs no code of
the file (`weights_only`). One parameter at a time is whole on the host.
"""

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.disk import name_full_disk
from mpkit.common.exceptions import one_line
from mpkit.strategies.checkpoint.head import DamagedCheckpoint
from mpkit.strategies.stage.shard import HeldPart, Shard, put_together


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
    """Write a new file with `torch.save`, and raise a clear error for a full disk."""
    with name_full_disk(path.parent), path.open("xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # for a full disk torch.save reports an unexpected position of the file
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, with no other elements in its memory, which torch.save would write too."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class SavedParts:
    """The files of all ranks, read on demand.

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
            except Exception as error:  # a file that somebody has replaced can raise anything
                raise DamagedCheckpoint(
                    f"{file} could not be read without running code, or at all ({one_line(error):.150})"
                ) from None
            try:
                for name, part in content.items():
                    self._parts.setdefault(str(name), []).append(_held(part["tensor"], *part["place"]))
            except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
                raise DamagedCheckpoint(f"{file} is not what a rank writes ({one_line(error)})") from None

    def __contains__(self, name: str) -> bool:
        """Return whether there is such an entry."""
        return name in self._parts

    @property
    def names(self) -> list[str]:
        """The names of all entries."""
        return list(self._parts)

    def numel(self, name: str) -> int:
        """Return the number of elements of an entry; 0 for a missing one."""
        return sum(part.tensor.numel() for part in self._parts.get(name, ()))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of an entry."""
        return self._parts[name][0].tensor.dtype

    def read(self, name: str, into: HeldPart) -> None:
        """Fill a rank's part of an entry, however the writing ranks were divided; raise if elements are missing."""
        parts, numel = self._parts.get(name, []), into.tensor.numel()
        for part in parts:
            if part.place == into.place and part.tensor.numel() == numel:
                into.tensor.copy_(part.tensor)
                return
        into.tensor.copy_(into.take(_whole(name, tuple(into.whole), parts)))


def _held(tensor: Tensor, whole: tuple[int, ...], divided: tuple[Any, ...], start: int) -> HeldPart:
    """Return a part, after checking that its place is within its whole."""
    shard: Shard | None = None
    for dim, ranges in reversed(divided):
        shard = Shard(tuple(whole), dim, tuple(range(*each) for each in ranges), shard)
    local = torch.empty(whole, device="meta")
    local = local if shard is None else shard.take(local)
    if tensor.dim() != 1 or not 0 <= start <= local.numel() - tensor.numel():
        raise ValueError(f"a part of {tensor.numel()} elements from {start} on, of {local.numel()}")
    return HeldPart(tensor, tuple(whole), start, shard)


def _whole(name: str, shape: tuple[int, ...], parts: list[HeldPart]) -> Tensor:
    """Put a whole entry together, after checking that each element is there once."""
    count = sum(part.tensor.numel() for part in parts)
    if count != prod(shape) or any(part.whole != shape for part in parts):
        raise DamagedCheckpoint(f"of {name}, which has {prod(shape)} elements of shape {shape}, {count} fit")
    ones = [part._replace(tensor=torch.ones(part.tensor.numel(), dtype=torch.uint8)) for part in parts]
    if not bool(put_together(ones).all()):
        raise DamagedCheckpoint(f"parts of {name} lie over each other")
    return put_together(parts)
