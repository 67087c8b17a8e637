"""How a piece of a flattened tensor is told to torch.distributed.checkpoint (DCP), and its index read safely.

DCP saves what each rank holds of a tensor as chunks with an offset, each distinct chunk once, and when it loads reads
the parts of chunks that overlap with what a rank wants. So a tensor is known here by its name and its number of
elements, and a rank by which elements it holds: whoever wrote them, in whatever pieces, any other division can read.

DCP's index, `.metadata`, is a pickle, and a pickle can run any code when it is read. `read_index` admits the few
classes of which an index is made, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpkit.parallel.checkpoint_files import Damaged

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Slice", "Writer", "read_index"]


class Slice:
    """Elements `start` and following of a flattened tensor, as DCP's protocol of checkpointable objects wants them.

    Args:
        held: those elements, one after the other.
        start: the first one's place.
        numel: how many elements the whole tensor has.
    """

    def __init__(self, held: Tensor, start: int, numel: int) -> None:
        assert held.dim() == 1 and start >= 0 and start + len(held) <= numel
        self.held, self.start, self.numel = held, start, numel

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(torch.Size([self.start]), self.held.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, dcp.TensorProperties(dtype=self.held.dtype), torch.Size([self.numel]))
        return [WriteItem(dcp.MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: dcp.MetadataIndex) -> Tensor:
        assert index.offset == torch.Size([self.start])
        return self.held


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of `Slice`s, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: dcp.MetadataIndex) -> Tensor:
        """What DCP is about to write."""
        found: Slice = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of `Slice`s, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """What is wanted, and the index; DCP's own would replace what is not a tensor."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        """What DCP is about to read into."""
        found: Slice = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index)


class Writer(FileSystemWriter):
    """DCP's own, whose index names no path of this machine."""

    def storage_meta(self) -> None:
        """Nothing about where the files are."""


class Reader(FileSystemReader):
    """DCP's own, with an index that is read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The index."""
        found = read_index(Path(self.path))
        found.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return found


# ---- the index ---------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> dcp.Metadata:
    """DCP's index of a checkpoint, read without running anything that is in it.

    Raises:
        Damaged: it holds something else than an index does, or not all of it.
    """
    data = (folder / ".metadata").read_bytes()
    try:
        index = _Unpickler(io.BytesIO(data)).load()
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(f"its .metadata cannot be read ({type(error).__name__}: {str(error)[:100]})") from None
    if not isinstance(index, dcp.Metadata) or not _is_sound(index, folder):
        raise Damaged("its .metadata is not an index of tensors that mpkit wrote")
    return index


class _Unpickler(pickle.Unpickler):
    ADMITTED: ClassVar[dict[tuple[str, str], type]] = {
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            dcp.Metadata,
            dcp.TensorStorageMetadata,
            dcp.TensorProperties,
            dcp.ChunkStorageMetadata,
            dcp.MetadataIndex,
            dcp._MEM_FORMAT_ENCODING,
            _StorageInfo,
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle may name; anything else is refused before it is looked up."""
        if (module, name) in self.ADMITTED:
            return self.ADMITTED[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise Damaged(
            f"its .metadata asks for {module}.{name}, which an index has no use for: reading it could run code that "
            "somebody put there. Nothing of it was run; throw the checkpoint away, unless you know who wrote it"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise Damaged(f"its .metadata has a tensor of layout {name!r}")
    return torch.strided


def _is_sound(index: dcp.Metadata, folder: Path) -> bool:
    """Whether the chunks of each tensor are all of it, each in a file of this folder."""
    tensors: Any = index.state_dict_metadata  # whose types nobody has checked yet
    places: Any = index.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict) or index.planner_data is not None:
        return False
    for name, tensor in tensors.items():
        if not isinstance(tensor, dcp.TensorStorageMetadata) or len(tensor.size) != 1:
            return False
        chunks = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in tensor.chunks)
        at = 0
        for start, length in chunks:
            if start != at or dcp.MetadataIndex(name, [start]) not in places:
                return False
            at += length
        if at != tensor.size[0]:
            return False
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return all(
        isinstance(place, _StorageInfo)
        and not place.transform_descriptors
        and 0 <= place.offset <= place.offset + place.length <= sizes.get(place.relative_path, -1)
        for place in places.values()
    )
