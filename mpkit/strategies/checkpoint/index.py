"""The index of a checkpoint, read without running anything that is in it.

The index of torch.distributed.checkpoint (DCP), `.metadata`, is a pickle, and a pickle can run any code when it is
read. `read_index` admits the few classes of which an index is made, and nothing else. It then accepts only an index
whose boxes cover every tensor and lie in files beside it.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as dcp

from mpkit.common.torch_private import _MEM_FORMAT_ENCODING, _StorageInfo
from mpkit.strategies.checkpoint.boxes import ParameterBox, tile
from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, DamagedCheckpoint, open_plain

__all__ = ["check_told", "read_index"]


def read_index(folder: Path) -> dcp.Metadata:
    """Read DCP's index of a checkpoint without running anything that is in it.

    Raises:
        DamagedCheckpoint: it is not an index, or not a complete one.
    """
    index: Any
    try:
        with open_plain(folder / ".metadata") as file:
            data = file.read()
        index = _Unpickler(io.BytesIO(data)).load()
    except DamagedCheckpoint:
        raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"its .metadata cannot be read ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    try:
        if isinstance(index, dcp.Metadata) and _is_sound(index, folder):
            return index
    except (AttributeError, TypeError):  # raised by an object whose fields its class does not make
        pass
    raise DamagedCheckpoint("its .metadata is not an index of tensors that mpkit wrote")


def check_told(head: CheckpointHead, index: dcp.Metadata) -> None:
    """Check that a checkpoint has the tensors that its head names: parameters, buffers and random states.

    Raises:
        DamagedCheckpoint: a tensor is missing, or has another size.
    """
    wanted = {
        f"{kind}/{name}": prod(map(int, form[1 : form.index("]")].split(", "))) if form[1] != "]" else 1
        for kind, facts in (("weight", head.facts["trained"]), ("model", head.facts["others"]))
        for name, form in facts.items()
    }
    tensors: Any = index.state_dict_metadata
    for name, numel in wanted.items():
        there = prod(tensors[name].size) if name in tensors else 0
        if there != numel:
            raise DamagedCheckpoint(f"its {HEAD} tells of {numel} elements of {name}, and {there} are there")
    for rank in range(head.world_size):
        if f"random/{rank}" not in tensors:
            raise DamagedCheckpoint(
                f"its {HEAD} tells of {head.world_size} ranks; rank {rank}'s random state is not there"
            )


class _Unpickler(pickle.Unpickler):
    ADMITTED: ClassVar[dict[tuple[str, str], type]] = {
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            dcp.Metadata,
            dcp.TensorStorageMetadata,
            dcp.TensorProperties,
            dcp.ChunkStorageMetadata,
            dcp.MetadataIndex,
            _MEM_FORMAT_ENCODING,
            _StorageInfo,
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that the pickle may name; refuse any other before it is looked up."""
        if (module, name) in self.ADMITTED:
            return self.ADMITTED[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise DamagedCheckpoint(
            f"its .metadata asks for {module}.{name}, which an index has no use for: reading it could run code that "
            "somebody put there. Nothing of it was run; throw the checkpoint away, unless you know who wrote it"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise DamagedCheckpoint(f"its .metadata has a tensor of layout {name!r}")
    return torch.strided


def _is_sound(index: dcp.Metadata, folder: Path) -> bool:
    """Return whether boxes cover each tensor, each element once, and each box lies in a file of this folder."""
    tensors: Any = index.state_dict_metadata  # whose types are not checked yet
    places: Any = index.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict) or index.planner_data is not None:
        return False
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return all(_is_place(place, sizes) for place in places.values()) and all(
        _is_tensor(name, tensor, places) for name, tensor in tensors.items()
    )


def _is_place(place: Any, sizes: dict[str, int]) -> bool:
    """Return whether a place is a part of a file."""
    return (
        isinstance(place, _StorageInfo)
        and not place.transform_descriptors
        and _is_count(place.offset)
        and _is_count(place.length)
        and place.offset + place.length <= sizes.get(place.relative_path, -1)
    )


def _is_tensor(name: Any, tensor: Any, places: dict[Any, _StorageInfo]) -> bool:
    """Return whether a tensor's boxes cover all of it, each in a place with room for its elements."""
    if not isinstance(tensor, dcp.TensorStorageMetadata) or not _is_pair(tensor.size):
        return False
    dtype: Any = tensor.properties.dtype
    chunks: Any = tensor.chunks
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        return False
    boxes = []
    for chunk in chunks:
        if not (
            isinstance(chunk, dcp.ChunkStorageMetadata) and _is_pair(chunk.offsets) and _is_pair(chunk.sizes)
        ):
            return False
        (top, left), (rows, columns) = chunk.offsets, chunk.sizes
        boxes.append(ParameterBox(top, left, top + rows, left + columns))
        place = places.get(dcp.MetadataIndex(name, chunk.offsets))
        if place is None or place.length < rows * columns * dtype.itemsize:
            return False
    return tile(boxes, *tensor.size)


def _is_pair(size: Any) -> bool:
    return isinstance(size, torch.Size) and len(size) == 2 and all(map(_is_count, size))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0
