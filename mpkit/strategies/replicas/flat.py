"""Flat: parameters of one dtype side by side in one tensor, cut into equal shards, one per rank.

    [ weight 6 ][ bias 2 ][ weight 3 ][ padding 1 ]      12 elements, n = 4 ranks
    |  rank 0  |  rank 1  |  rank 2  |   rank 3   |      k = 3 elements each

Shapes do not matter: a shard may begin in the middle of a weight, and a parameter with fewer elements than there are
ranks has none on most of them. Padding to a multiple of n makes all shards equally large and contiguous.

Some optimizers, such as Muon (Jordan et al. 2024), update an element depending on the rest of its matrix. Their
parameters are divided by owner: each lies whole in one shard, and all shards are as large as the largest.

    [ weight 6 ][ weight 3 ][ bias 2 ][ padding 1 ]      n = 2 ranks, k = 6
    |        rank 0        |        rank 1        |

    Flat           stays whole: the shard is a view of it
    ShardedFlat    is whole only while it is used
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import PendingWork
from mpkit.trace.record.recorder import Recorder


def assign_owners(sizes: Sequence[int], n: int) -> list[int]:
    """Return which of n ranks owns each tensor: the largest first, each to the rank that owns least.

    >>> assign_owners([6, 2, 3], 2)
    [0, 1, 1]
    """
    owned, owner = [0] * n, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[i] = min(range(n), key=owned.__getitem__)
        owned[owner[i]] += sizes[i]
    return owner


class FlatLayout:
    """Where each parameter (of one dtype, on one device) lies in a flat tensor, and which part of it is this rank's.

    `starts` has each parameter's first element in the flat tensor; this rank's shard has k elements, `begin` to `end`.

    >>> layout = FlatLayout([nn.Parameter(torch.empty(2, 3)), nn.Parameter(torch.empty(5))], rank=1, n=4)
    >>> layout.k, layout.begin, layout.end
    (3, 3, 6)
    >>> layout.own(0), layout.own(1)  # the last three elements of the first, none of the second
    ((3, 6), (0, 0))
    >>> FlatLayout(layout.parameters, rank=1, n=4, by_owner=True).own(1)  # all five elements of the second
    (0, 5)
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, n: int, *, by_owner: bool = False) -> None:
        self.parameters = parameters
        self.n, self.by_owner = n, by_owner
        self.sizes = [parameter.numel() for parameter in parameters]
        if by_owner:
            owners, filled, within = assign_owners(self.sizes, n), [0] * n, []
            for owner, size in zip(owners, self.sizes, strict=True):
                within.append(filled[owner])
                filled[owner] += size
            self.k = max(filled)
            self.starts = [owner * self.k + start for owner, start in zip(owners, within, strict=True)]
        else:
            self.k = -(-sum(self.sizes) // n)
            self.starts = [0, *accumulate(self.sizes)][:-1]
        self.begin, self.end = rank * self.k, (rank + 1) * self.k

    def own(self, i: int) -> tuple[int, int]:
        """Return the range of parameter i's elements that this rank holds; (0, 0) if it holds none."""
        start, size = self.starts[i], self.sizes[i]
        first, last = max(self.begin - start, 0), min(self.end - start, size)
        return (first, last) if first < last else (0, 0)

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return each parameter's view of a flat tensor (n k,), in its shape."""
        parts = zip(self.parameters, self.starts, self.sizes, strict=True)
        return [whole[start : start + size].view(p.shape) for p, start, size in parts]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Return this rank's elements of each parameter, as views of its shard (k,).

        They have one dimension, or the parameter's shape if it is a scalar, or whole because of `by_owner`.
        """
        found = []
        for i, (parameter, parameter_start) in enumerate(zip(self.parameters, self.starts, strict=True)):
            start, end = self.own(i)
            at = parameter_start + start - self.begin
            part = shard[at : at + end - start] if start < end else shard[:0]
            is_whole = start < end and (self.by_owner or not parameter.dim())
            found.append(part.view(parameter.shape) if is_whole else part)
        return found


class Flat:
    """A flat tensor (n k,) that stays whole, and this rank's shard of it (k,), which is a view of it.

    `category` is the ledger's for the memory that stays.
    """

    def __init__(
        self, layout: FlatLayout, record: Recorder, category: str, shard_group: Communicator
    ) -> None:
        first = layout.parameters[0]
        self.layout, self.shard_group, self._record = layout, shard_group, record
        self.there = True  # whether the whole tensor has memory
        self.layer = self.names = ""  # of the layer, "" for several, and of its parameters
        # Its storage object never changes, so views that autograd has saved see the values that are gathered again.
        self.whole = torch.empty(layout.n * layout.k, dtype=first.dtype, device=first.device)
        self.views = layout.views(self.whole)
        self._nbytes = self.whole.nbytes
        self.shard = self._new_shard(category)
        self.parts = layout.parts(self.shard)
        record.ledger.track(self.whole, "buffers")  # unless it is the same memory

    def _new_shard(self, category: str) -> Tensor:
        """Return the shard, and let the ledger count its memory in this category."""
        self._record.ledger.track(self.mine, category)
        return self.mine

    @property
    def mine(self) -> Tensor:
        """This rank's part of the whole tensor, (k,)."""
        return self.whole[self.layout.begin : self.layout.end]

    def start_all_gather(self) -> PendingWork:
        """Start gathering all ranks' shards into the whole tensor, which has memory."""
        return self.shard_group.all_gather(self.shard, async_op=True, out=self.whole)

    def allocate(self) -> None:
        """Allocate the whole tensor, if it has no memory, with undefined contents."""
        if not self.there:
            self._resize(self.whole, self._nbytes)
            self.there = True

    def free(self) -> None:
        """Free the whole tensor after its use; this class keeps it."""

    def drop(self) -> None:
        """Free all memory, even that which normally stays."""
        self._resize(self.whole, 0)
        self.there = False

    def _resize(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
            self._record.ledger.track(tensor, "buffers")  # or its former category


class ShardedFlat(Flat):
    """A flat tensor that is whole only while it is used, as "buffers"; the shard has its own memory, and stays."""

    def _new_shard(self, category: str) -> Tensor:
        shard = torch.zeros_like(self.mine)
        self._record.ledger.track(shard, category)
        return shard

    def free(self) -> None:
        """Free the whole tensor after its use; the shard stays."""
        if self.there:
            self._resize(self.whole, 0)
            self.there = False

    def allocate_shard(self) -> None:
        """Allocate the shard, after a `drop`."""
        self._resize(self.shard, self._nbytes // self.layout.n)

    def drop(self) -> None:
        """Free all memory, even that which normally stays."""
        self.free()
        self._resize(self.shard, 0)
