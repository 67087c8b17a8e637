"""Flat: parameters of one dtype side by side in one tensor, cut into equal shards, one a rank.

    [ weight 6 ][ bias 2 ][ weight 3 ][ padding 1 ]      12 elements, n = 4 ranks
    |  rank 0  |  rank 1  |  rank 2  |   rank 3   |      k = 3 elements each

Shapes do not matter: a shard may begin in the middle of a weight, and a parameter of fewer elements than there are
ranks is nowhere on most of them. Padded to a multiple of n, the shards are of one size, and each is contiguous.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from mpkit.record.ledger import Ledger

__all__ = ["Flat", "Layout"]


class Layout:
    """Where each parameter lies in a flat tensor, and which part of that is this rank's.

    Args:
        parameters: of one dtype, on one device.
        rank, n: this rank, and how many share.

    Attributes:
        starts: of each parameter its first element.
        k: elements of a shard; the flat tensor has n k.
        begin, end: this rank's.

    >>> layout = Layout([nn.Parameter(torch.empty(2, 3)), nn.Parameter(torch.empty(5))], rank=1, n=4)
    >>> layout.k, layout.begin, layout.end
    (3, 3, 6)
    >>> layout.own(0), layout.own(1)  # the last three elements of the first, none of the second
    ((3, 6), (0, 0))
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, n: int) -> None:
        self.parameters = parameters
        self.n = n
        self.sizes = [parameter.numel() for parameter in parameters]
        self.starts = [0, *accumulate(self.sizes)][:-1]
        self.numel = sum(self.sizes)
        self.k = -(-self.numel // n)
        self.begin, self.end = rank * self.k, (rank + 1) * self.k

    def own(self, i: int) -> tuple[int, int]:
        """From which to which element parameter i is this rank's; (0, 0) if nowhere."""
        start, size = self.starts[i], self.sizes[i]
        first, last = max(self.begin - start, 0), min(self.end - start, size)
        return (first, last) if first < last else (0, 0)

    def views(self, whole: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor (n k,), in its shape."""
        parts = zip(self.parameters, self.starts, self.sizes, strict=True)
        return [whole[start : start + size].view(p.shape) for p, start, size in parts]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of a shard (k,): its elements that are this rank's, in one dimension."""
        found = []
        for i, parameter_start in enumerate(self.starts):
            start, end = self.own(i)
            at = parameter_start + start - self.begin
            found.append(shard[at : at + end - start] if start < end else shard[:0])
        return found


class Flat:
    """A flat tensor (n k,), whose memory may come and go, and this rank's shard of it (k,), which stays.

    Args:
        layout: what lies where.
        ledger: told of the memory.
        category: of what stays. A whole that comes and goes counts as "buffers".
        keeps_whole: the whole stays, and the shard is a part of it. Else the shard has memory of its own.
        on_host: the shard is in the host's memory, which the device's ledger does not count.

    Attributes:
        there: whether the whole has memory.
        whole: (n k,). Its storage is always the same one, so what autograd has saved of it sees the numbers that
            are gathered into it again.
        views: the whole's parts, in the parameters' shapes.
        shard: (k,).
        parts: the shard's, a parameter each.
    """

    def __init__(
        self, layout: Layout, ledger: Ledger, category: str, *, keeps_whole: bool, on_host: bool = False
    ) -> None:
        first = layout.parameters[0]
        self.layout = layout
        self._ledger, self._keeps_whole = ledger, keeps_whole
        self.there = True
        self.whole = torch.empty(layout.n * layout.k, dtype=first.dtype, device=first.device)
        self.views = layout.views(self.whole)
        self._nbytes = self.whole.nbytes
        if keeps_whole:
            self.shard = self.mine
        else:
            device = torch.device("cpu") if on_host else first.device
            pinned = on_host and first.is_cuda  # the device reads it without the processor's help
            self.shard = torch.zeros(layout.k, dtype=first.dtype, device=device, pin_memory=pinned)
        self.parts = layout.parts(self.shard)
        if not on_host:
            ledger.track(self.shard, category)
        ledger.track(self.whole, "buffers")  # unless it is the same memory

    @property
    def mine(self) -> Tensor:
        """(k,): this rank's part of the whole."""
        return self.whole[self.layout.begin : self.layout.end]

    def allocate(self) -> None:
        """Give the whole memory, if it has none; what is in it means nothing yet."""
        if not self.there:
            self._resize(self.whole, self._nbytes)
            self.there = True

    def free(self) -> None:
        """Take the whole's memory, unless it stays."""
        if self.there and not self._keeps_whole:
            self._resize(self.whole, 0)
            self.there = False

    def allocate_shard(self) -> None:
        """Give the shard memory, after a `drop`."""
        if self._keeps_whole:
            self.allocate()
        else:
            self._resize(self.shard, self._nbytes // self.layout.n)

    def drop(self) -> None:
        """Take all memory, also that which stays: nobody needs what is in it."""
        self.free()
        self._resize(self.shard, 0)
        self.there = False

    def _resize(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
            self._ledger.track(tensor, "buffers")  # or what it was
