"""How a piece of a parameter is told to torch.distributed.checkpoint (DCP).

DCP saves what each rank holds of a tensor as chunks with an offset, each distinct chunk once, and when it loads reads
the parts of chunks that overlap with what a rank wants. So a parameter is known here by its name, its rows and its
columns, and a rank by the boxes of it that it holds (`checkpoint_boxes`): whoever wrote them, in whatever pieces, any
other division can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpkit.parallel.checkpoint_boxes import boxes_of, rows_and_columns
from mpkit.parallel.checkpoint_index import read_index
from mpkit.parallel.shard import Shard

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Slice", "Writer"]


class Slice:
    """Elements `start` and following of a flattened local parameter, as DCP's protocol of checkpointable objects wants.

    Args:
        held: those elements, one after the other.
        whole: the shape of the whole parameter.
        start: the first one's place.
        shard: what of the whole parameter is local; None: all of it.
    """

    def __init__(
        self, held: Tensor, whole: Sequence[int], start: int = 0, shard: Shard | None = None
    ) -> None:
        assert held.is_contiguous() and held.dim() == 1 and len(held) > 0 and start >= 0
        assert shard is None or shard.whole == tuple(whole), f"{shard} of a parameter of {list(whole)}"
        local = shard.shape if shard else whole
        assert start + len(held) <= torch.Size(local).numel()
        self.held, self.whole = held, torch.Size(rows_and_columns(whole))
        _, self._width = rows_and_columns(local)
        found = boxes_of(whole, shard, start, start + len(held))
        self._at = {box: first - start for box, first in found}  # of each box its first element in `held`

    def size(self) -> torch.Size:
        """Of the whole parameter, as a matrix; DCP compares it with what was saved."""
        return self.whole

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box.sizes)) for box in self._at]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = dcp.TensorProperties(dtype=self.held.dtype)
        return [
            WriteItem(
                dcp.MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: dcp.MetadataIndex) -> Tensor:
        """(rows, columns) of the box that begins there: the elements themselves, no copy."""
        box, first = next((box, first) for box, first in self._at.items() if box[:2] == index.offset)
        return self.held.as_strided(box.sizes, (self._width, 1), self.held.storage_offset() + first)


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
