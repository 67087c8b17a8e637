"""Detects loaders that already distribute a dataset to ranks: their share of the samples would be divided again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpkit.plan.checks import whole

__all__ = ["check_undivided"]

SHARES = ("num_replicas", "num_processes", "num_shards", "world_size")
"""Names of samplers' attributes for the number of ranks: in torch, Accelerate, datasets and other libraries."""

WITHIN = ("sampler", "batch_sampler", "base_sampler", "dataset", "loader", "dataloader", "base_dataloader")


def check_undivided(data: Any) -> None:
    """Check that neither the data nor a sampler within it yields only a share of the samples.

    Raises:
        ValueError: one does, such as a DataLoader with a DistributedSampler.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    >>> check_undivided(DataLoader(range(8), batch_size=2, sampler=sampler))
    Traceback (most recent call last):
    ValueError: data is a DataLoader with a DistributedSampler of num_replicas=2, ...
    """
    for part in _objects_within(data):
        for name in SHARES:
            shares = whole(getattr(part, name, None))
            if shares is not None and shares > 1:
                kind = type(data).__name__
                sampler = "" if part is data else f" with a {type(part).__name__}"
                raise ValueError(
                    f"data is a {kind}{sampler} of {name}={shares}, which gives one rank's share of the samples, 1 of "
                    f"{shares}: the other shares would never be trained on, since mpkit deals every batch out to its "
                    "ranks itself. Give the whole: mk.Batches(dataset, batch_size), where batch_size is that of all "
                    "ranks together, shuffles as the sampler does and loads on the ranks; or the loader without it."
                )


def _objects_within(data: Any) -> Iterator[Any]:
    """Yield the data, its samplers, and the objects that those wrap."""
    waiting, seen = [data], set()
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in seen or isinstance(part, (str, bytes, int, float)):
            continue
        seen.add(id(part))
        yield part
        waiting += [vars(part)[name] for name in WITHIN if name in getattr(part, "__dict__", {})]
