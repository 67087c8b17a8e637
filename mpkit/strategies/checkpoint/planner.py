"""The description of parameter pieces for torch.distributed.checkpoint (DCP).

DCP saves what each rank holds of a tensor as chunks with an offset, each distinct chunk once. When it loads, it reads
the parts of chunks that overlap with what a rank wants. So a parameter is identified here by its name, rows and
columns, and a rank's part by its boxes (`boxes`). Whatever pieces were written, any other division can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mpkit.common.disk import name_full_disk
from mpkit.strategies.checkpoint.boxes import boxes_of, end_of_rows, rows_and_columns
from mpkit.strategies.checkpoint.index import read_index
from mpkit.strategies.stage.shard import Shard

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Slice", "Writer"]


class Slice:
    """Elements of a flattened local parameter, from `start` on, as a checkpointable object in DCP's protocol.

    Args:
        held: those elements, in one dimension.
        whole: the shape of the whole parameter.
        start: index of the first one in the local parameter.
        shard: the part of the whole parameter that is local; None if all of it is.
    """

    def __init__(
        self, held: Tensor, whole: Sequence[int], start: int = 0, shard: Shard | None = None
    ) -> None:
        assert held.is_contiguous() and held.dim() == 1 and len(held) > 0 and start >= 0
        assert shard is None or shard.whole == tuple(whole), f"{shard} of a parameter of {list(whole)}"
        local = shard.shape if shard else whole
        assert start + len(held) <= torch.Size(local).numel()
        self.held, self._part = held, (tuple(whole), shard, start, start + len(held))
        self.take_rows()

    def take_rows(self, rows: int = 0) -> None:
        """Describe the whole parameter as a matrix of so many rows, if its first dimensions can have them."""
        whole, shard, start, _ = self._part
        self.whole = torch.Size(rows_and_columns(whole, rows))
        self._width = prod((shard.shape if shard else whole)[end_of_rows(whole, rows) :])
        boxes = boxes_of(*self._part, rows)
        self._at = {box: first - start for box, first in boxes}  # by box, its first element in `held`

    def size(self) -> torch.Size:
        """Return the size of the whole parameter as a matrix, which DCP compares with the saved one."""
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
        """Return the elements of the box that begins at the index, (rows, columns), without a copy."""
        box, first = next((box, first) for box, first in self._at.items() if box[:2] == index.offset)
        return self.held.as_strided(box.sizes, (self._width, 1), self.held.storage_offset() + first)


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of `Slice`s, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: dcp.MetadataIndex) -> Tensor:
        """Return the tensor that DCP is about to write."""
        held: Slice = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of `Slice`s, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set what to load, and the index; DCP's own method would replace what is not a tensor.

        Before format 5 the first dimension alone counted the rows of a parameter.
        """
        tensors: Any = metadata.state_dict_metadata if metadata is not None else {}
        for name in state_dict.keys() & tensors.keys():
            state_dict[name].take_rows(tensors[name].size[0])
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        """Return the tensor that DCP is about to read into."""
        held: Slice = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


class Writer(FileSystemWriter):
    """DCP's writer, into a folder that is there, with an index that names no path of this machine."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; DCP's own method would take any folder of that name, also a link."""
        return plan

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Raises:
            OSError: it cannot be written; torch.save says something else then (its file's position is unexpected).
        """
        with name_full_disk(self.path):
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None

    def storage_meta(self) -> None:
        """Return nothing, so that the index does not say where the files are."""


class Reader(FileSystemReader):
    """DCP's reader, with an index that is read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Read the index."""
        index = read_index(Path(self.path))
        index.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return index
