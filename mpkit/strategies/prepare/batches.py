"""The part of the data that the steps use, and what cannot be such data: one rank's share of a dataset, say."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mpkit.plan.kinds import whole
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.data.datasets import WANTED, checked_batch
from mpkit.strategies.data.microbatch import Value, batch_size, part, split
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.models.nested_values import flatten

MOST_READ = 2**31
"""Bytes that are read of data without a length before the start; a batch counts at least 4 KiB."""

SHARES = ("num_replicas", "num_processes", "num_shards", "world_size")
"""Names of samplers' attributes for the number of ranks: in torch, Accelerate, datasets and other libraries."""

WITHIN = ("sampler", "batch_sampler", "dataset", "base_dataloader")


def is_stream(data: Any) -> bool:
    """Return whether the data yields batches one after the other, in unknown number.

    >>> is_stream(iter([])), is_stream([]), is_stream(DataLoader([1, 2]))
    (True, False, False)
    """
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset)
    if isinstance(data, (Tensor, str, bytes, Mapping)):
        return False
    return isinstance(data, IterableDataset) or (isinstance(data, Iterable) and not hasattr(data, "__len__"))


def take_batches(data: Any, steps: int) -> WholeBatches | Batches:
    """Return the batches that the steps use, on the CPU; of an iterable, the first ones."""
    if isinstance(data, Batches):
        data.key(0, slice(None))  # inspects the first sample now rather than on the ranks
        return data
    if isinstance(data, (Tensor, str, bytes, Mapping)) or (
        not isinstance(data, (Sequence, Iterable))
        and not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        hint = ". This is one tensor: with its targets, data=[(inputs, targets)] trains on it in every step"
        raise ValueError(f"data is {type(data).__name__}; {WANTED}{hint if isinstance(data, Tensor) else ''}")
    check_undivided(data)
    began = time.perf_counter()
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[i] for i in range(min(steps, len(data)))]
    else:
        items = _read(data, steps)
    if not items:
        raise ValueError(f"data is empty; {WANTED}")
    if len(items) == 2 and all(isinstance(item, Tensor) for item in items):
        raise ValueError(
            f"data is a pair of tensors, one batch; {WANTED}. For one batch again and again: data=[data]"
        )
    batches = WholeBatches(checked_batch(item, i) for i, item in enumerate(items))
    if isinstance(data, DataLoader):
        batches.read_in = time.perf_counter() - began
    return batches


def _read(data: Iterable[Any], steps: int) -> list[Any]:
    """Return this many items of an iterable, or all that it has."""
    items: list[Any] = []
    held = 0
    iterator = iter(data)
    for item in islice(iterator, steps):
        items.append(item)
        held += max(4096, sum(leaf.nbytes for leaf in flatten(item)[0] if isinstance(leaf, Tensor)))
        if held > MOST_READ:
            raise ValueError(
                f"{len(items)} of {steps:,} batches of the data were read, and hold more than {MOST_READ / 2**30:g} "
                "GiB: data without a length are read before the start. mk.Batches(dataset, batch_size) takes a dataset "
                "with a length and loads its samples on the ranks, as they are needed; or train with fewer steps"
            )
    if items and len(items) < steps and iterator is data:
        raise ValueError(
            f"the data ended after {len(items)} batches, and {steps} steps take {steps}: steps={len(items)} trains on "
            "all of them. A generator gives its batches once; a list is gone through again and again: list(data)"
        )
    return items


def of_every_size(batches: WholeBatches | Batches, steps: int) -> list[tuple[Value, Value]]:
    """Return a batch of every size that occurs; smaller ones are cut out of a dataset's first batch."""
    if isinstance(batches, WholeBatches):
        return batches
    inputs, targets = batches[0]
    sizes = sorted({batches.size(step) for step in range(min(steps, len(batches)))}, reverse=True)
    return [(part(inputs, slice(size)), part(targets, slice(size))) for size in sizes]


def check_split(batches: list[tuple[Value, Value]], asked: Callable[[], str], m: int, n: int = 1) -> None:
    """Check that every batch has a sample for each of m micro-batches, and equally many for each of DP's n ranks.

    `asked` returns the plan in words, for the error.
    """
    for i, (inputs, _) in enumerate(batches):
        size = batch_size(inputs)
        if size < m:
            best = max(n for n in range(1, size + 1) if size % n == 0)
            which = f"data[{i}], a batch" if isinstance(batches, WholeBatches) else "a batch"
            listed = isinstance(batches, WholeBatches) or not i
            instead = "" if listed else ", or drop_last=True in mk.Batches"
            raise ValueError(
                f"{asked()}: {m} micro-batches of {which} of {size}: each needs a sample at least. "
                f"microbatches={best} works, or a batch of {m} or more; {2 * m}, say{instead}."
            )
        if any((end - start) % n for start, end in split(size, m)):
            raise ValueError(
                f"{asked()}: nn.DataParallel's way is to scatter equal parts, and {n} ranks do not divide "
                f"{'a batch' if m == 1 else f'one of {m} micro-batches of a batch'} of {size}. Plan.ddp({n}) takes "
                f"batches of any size; DP takes one of {n * m * max(1, round(size / n / m))}."
            )


def check_undivided(data: Any) -> None:
    """Check that neither the data nor a sampler within it yields only a share of the samples.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    >>> check_undivided(DataLoader(range(8), batch_size=2, sampler=sampler))
    Traceback (most recent call last):
    ValueError: data is a DataLoader with a DistributedSampler of num_replicas=2, ...
    """
    within = [getattr(data, name, None) for name in WITHIN]
    for each in (data, *within, *(getattr(one, "sampler", None) for one in within)):
        for name in SHARES:
            shares = whole(getattr(each, name, None))
            if shares is not None and shares > 1:
                kind = type(data).__name__
                sampler = "" if each is data else f" with a {type(each).__name__}"
                raise ValueError(
                    f"data is a {kind}{sampler} of {name}={shares}, which gives one rank's share of the samples, 1 of "
                    f"{shares}: the other shares would never be trained on, since mpkit deals every batch out to its "
                    "ranks itself. Give the whole: mk.Batches(dataset, batch_size), where batch_size is that of all "
                    "ranks together, shuffles as the sampler does and loads on the ranks; or the loader without it."
                )
