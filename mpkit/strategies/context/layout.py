"""Which tokens of each sequence a rank has, and where documents begin and end, for one micro-batch.

    documents    from position_ids: where they do not go on by 1, another document begins
    part         what a rank has of inputs and targets
    runs         the stretches of consecutive tokens of one document, in the order in which a ring's place has them

Under Ulysses times a ring, a row of ranks is one place of the ring: together they have its tokens, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.common.torch_private import FakeTensor
from mpkit.plan.chunks import deal_chunks, split_by_document
from mpkit.plan.plan import Plan
from mpkit.strategies.context.sequence import pieces, sequence_part
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors

__all__ = ["SequenceLayout", "TokenRun", "packed_lengths"]

Lengths = tuple[int, ...]
"""The lengths of the documents in a sequence."""


class TokenRun(NamedTuple):
    """Some consecutive tokens of a document, at a place of the ring.

    Attributes:
        samples: which samples of the micro-batch.
        tokens: where among the place's tokens.
        document: where in the sequence the document begins.
        start: where in the sequence the run begins.
    """

    samples: slice
    tokens: slice
    document: int
    start: int

    def take_from(self, tensor: Tensor) -> Tensor:
        """Return the run's part of [batch, heads, tokens, ...], as a view."""
        return tensor[self.samples, :, self.tokens]

    def extend_to(self, after: TokenRun) -> TokenRun:
        """Return this run and the one after it, of the same samples, as one."""
        return self._replace(tokens=slice(self.tokens.start, after.tokens.stop))


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of a micro-batch's sequences over n ranks.

    Attributes:
        n: the number of ranks that share each sequence.
        order: a Plan's cp_order.
        row: how many of them divide the heads (Ulysses).
        documents: by sample, the lengths of its documents; (): packed, but of unknown lengths, which count as one
            document; None: not packed.
    """

    n: int
    order: str = "contiguous"
    row: int = 1
    documents: tuple[Lengths, ...] | None = None

    @classmethod
    def from_inputs(cls, plan: Plan, inputs: Value, packed: bool) -> SequenceLayout:
        """Return the layout of some inputs under a plan, of which some in the training are packed, or none.

        Raises:
            ValueError: none should be, and these are.
        """
        documents = packed_lengths(inputs)
        if packed and documents is None:
            batch, s = leaves(inputs)[0].shape[:2]
            documents = ((s,),) * batch
        if documents is not None and not packed:
            raise ValueError(
                "position_ids of a later batch begin anew within a sequence, which is several documents packed, and "
                "those of the dataset's first samples do not, so that mpkit took each sequence for one text. Let a "
                "packed sequence come first, or give the batches as a list, which mpkit reads before."
            )
        return cls(plan.cp, plan.cp_order, plan.mesh.cp_ulysses, documents)

    @property
    def is_packed(self) -> bool:
        """Whether sequences consist of documents, which do not attend to each other."""
        return self.documents is not None

    def part(self, value: Value, index: int) -> Value:
        """Return what rank `index` has of inputs or targets [batch, s, ...]."""
        if not self.documents or self.order in ("contiguous", "zigzag"):
            return sequence_part(value, index, self.n, self.order, self.row)
        where = torch.tensor([self._tokens(documents, index) for documents in self.documents])

        def take(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2:
                return tensor
            return torch.stack([sample[at] for sample, at in zip(tensor, where, strict=True)])

        return map_tensors(take, value)

    def _tokens(self, documents: Lengths, index: int) -> list[int]:
        """Return the numbers of the tokens that a rank has of a sequence."""
        place, within = divmod(index, self.row)
        chunks = deal_chunks(documents, self.n // self.row, self.order)[place]
        tokens = [token for chunk in chunks for token in range(*chunk)]
        each = len(tokens) // self.row
        return tokens[within * each : (within + 1) * each]

    def runs(self, place: int, length: int) -> list[TokenRun]:
        """Return the runs of a place of the ring, which has `length` tokens of each sequence."""
        places = self.n // self.row
        if not self.documents:
            c = length // len(pieces(place, places, self.order))
            return [
                TokenRun(slice(None), slice(i * c, (i + 1) * c), 0, piece * c)
                for i, piece in enumerate(pieces(place, places, self.order))
            ]
        return [
            run
            for i, documents in enumerate(self.documents)
            for run in self._runs_of(i, documents, place, places)
        ]

    def _runs_of(self, sample: int, documents: Lengths, place: int, places: int) -> Iterator[TokenRun]:
        at = 0
        for chunk in deal_chunks(documents, places, self.order)[place]:
            for begin, (start, stop) in split_by_document(documents, chunk):
                yield TokenRun(slice(sample, sample + 1), slice(at, at + stop - start), begin, start)
                at += stop - start


def packed_lengths(inputs: Value) -> tuple[Lengths, ...] | None:
    """Return, by sample, the lengths of the documents of packed inputs; None if no position begins anew.

    >>> packed_lengths({"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    ((3, 2),)
    """
    positions = inputs.get("position_ids") if isinstance(inputs, dict) else None
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    if isinstance(positions, FakeTensor):  # of unknown content
        return None
    ends = positions.diff(dim=1) != 1
    if not bool(ends.any()):
        return None
    s = positions.shape[1]
    cuts = ([0, *(row.nonzero().flatten() + 1).tolist(), s] for row in ends)
    return tuple(tuple(b - a for a, b in pairwise(cut)) for cut in cuts)
