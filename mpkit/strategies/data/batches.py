"""Batches: a map-style dataset in batches, shuffled and distributed to ranks as by torch's DistributedSampler.

Step i takes batch i % len of epoch i // len; each epoch has an order of its own. Any part of any batch can be loaded by
position, so a rank loads only its own samples, and a training resumes in the middle of an epoch from its step's number.

A dataset may change its samples at random (crops, flips, noise). Each sample draws from a seed made of the batches'
seed, the step, and the sample's index. So a step's batch is the same on any number of ranks and workers, on the first
and the last stage of a pipeline, and in the notebook; no two samples of a batch draw the same; and each epoch draws
anew. That holds for the generators of torch, NumPy and Python, and for those of the dataset and its transforms.
"""

import random
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from mpkit.common.calls import answers
from mpkit.common.tracebacks import public
from mpkit.plan.kinds import whole
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors, signature
from mpkit.strategies.models.randomness import preserve_random_state, seed_all, seed_of

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (str, bytes, int, float, type, Tensor, nn.Parameter, np.ndarray, *KINDS)
MOST = 10_000
"""Objects that are searched for generators; a longer list of samples holds none."""


class SampleDraws:
    """The random numbers of a dataset's samples."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._seed, self._own = seed, list(_generators(dataset))

    def begin(self, step: int, index: int) -> None:
        """Seed all generators for a sample that is read for a step."""
        seed = seed_of(self._seed, step, 0, index, layer="sample")
        seed_all(seed, torch.device("cpu"))
        for generator in self._own:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            else:
                generator.seed(seed % 2**32 if isinstance(generator, np.random.RandomState) else seed)


def _generators(root: Any) -> Iterator[Any]:
    """Yield the generators that an object holds, at any depth."""
    seen: set[int] = set()
    to_do = [root]
    while to_do and len(seen) < MOST:
        value = to_do.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            yield value
        to_do += [each for each in _parts(value) if isinstance(each, KINDS) or not isinstance(each, LEAVES)]


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value[:MOST]
    if callable(value) and hasattr(value, "__closure__"):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    return getattr(value, "__dict__", {}).values()


MEANT = {
    "collate_fn": "Samples are put together by torch's default_collate: pad or cut them in the dataset's __getitem__.",
    "persistent_workers": "Workers stay for the whole run as it is.",
    "prefetch_factor": "Each worker loads two batches ahead.",
    "pin_memory": "Samples are copied to a GPU from ordinary memory.",
    "sampler": "The order is that of shuffle and seed, distributed among the ranks without a sampler.",
    "workers": "It is called num_workers here.",
}
"""DataLoader's arguments that `Batches` names differently or does not have."""

WANTED = "mk.Batches(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)"


@public
class Batches:
    """A dataset in batches, to be passed as the `data` of `Cluster.train`.

    >>> samples = [(torch.tensor([float(i)]), i % 2) for i in range(5)]
    >>> batches = Batches(samples, batch_size=2, shuffle=False)
    >>> len(batches), batches.indices(2), batches.indices(3)
    (3, [4], [0, 1])
    >>> batches[1]
    (tensor([[2.], [3.]]), tensor([0, 1]))

    The order of an epoch is `torch.randperm` seeded with seed + epoch, as in DistributedSampler, and its samples go to
    the ranks in turn. Unlike DistributedSampler it pads nothing: `train` weights a batch correctly that does not divide
    evenly among the ranks, or a smaller last batch, and no sample is lost or seen twice.

    Before each sample of each step, the generators of torch, NumPy, Python and the dataset are seeded. So random
    augmentation is the same on any number of ranks and workers, and another one in each epoch.

    Args:
        dataset: has len(dataset) samples; dataset[i] returns (inputs, targets) of one sample, each a tensor, a number
            or an array, or a tuple or dict of these, which torch's default_collate combines. Ranks receive it pickled.
        batch_size: samples per batch, over all ranks together.
        shuffle: shuffle anew in each epoch; otherwise keep the dataset's own order.
        seed: the seed of the order and of the samples' draws; it does not affect the ranks' random state.
        drop_last: leave out an epoch's last batch if it is smaller than the others.
        num_workers: processes on each rank that load its samples ahead of time, as in DataLoader; 0: the rank loads
            them itself, step by step. The time that a rank waits for its samples has its own lane on the timeline.

    Raises:
        ValueError: the dataset has no length or no samples, or yields no batch.
    """

    loads = True

    @answers("mk.Batches(dataset, batch_size=32)", MEANT)
    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.samples = _check_dataset(dataset)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.shuffle = bool(shuffle)
        self.seed = check_integer("seed", seed, 0)
        self.drop_last = bool(drop_last)
        self.num_workers = check_integer("num_workers", num_workers, 0)
        self._order: tuple[int, list[int]] = (-1, [])  # the last epoch used, and its order
        if not len(self):
            raise ValueError(
                f"Batches of {batch_size} of {self.samples} samples, the last one dropped: there is none left. "
                f"batch_size={self.samples} makes one, or drop_last=False"
            )

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def __getitem__(self, step: int) -> tuple[Value, Value]:
        """Return the whole batch of a step; steps may exceed an epoch without limit."""
        return self.part(step, slice(None))

    def __iter__(self) -> Iterator[tuple[Value, Value]]:
        """Iterate over the batches of the first epoch."""
        return (self[step] for step in range(len(self)))

    def __repr__(self) -> str:
        kind = type(self.dataset).__name__
        workers = f", num_workers={self.num_workers}" if self.num_workers else ""
        return (
            f"Batches({kind} of {self.samples}, batch_size={self.batch_size}, shuffle={self.shuffle}, "
            f"seed={self.seed}, drop_last={self.drop_last}{workers})"
        )

    def indices(self, step: int) -> list[int]:
        """Return the indices of the dataset's samples in the batch of a step, in order.

        Raises:
            ValueError: the step is negative.
        """
        step = check_integer("step", step, 0)
        epoch, number = divmod(step, len(self))
        if self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        return self._order[1][number * self.batch_size : (number + 1) * self.batch_size]

    def _order_of(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order

    def size(self, step: int) -> int:
        """Return the number of samples in the batch of a step."""
        return min(self.batch_size, self.samples - step % len(self) * self.batch_size)

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Load and return some samples of the batch of a step."""
        return self._load(self.indices(step)[which], step)

    def key(self, step: int, which: slice) -> Hashable:
        """Return the `signature` of a part without loading it; all samples should have the first one's shapes."""
        k = len(range(self.size(step))[which])
        return tuple((name, (k, *shape[1:]), dtype) for name, shape, dtype in self._one)

    @cached_property
    def _one(self) -> Any:
        """Return the signature of a batch of one sample."""
        return signature(*self._load([0], 0))

    @cached_property
    def _draws(self) -> SampleDraws:
        return SampleDraws(self.dataset, self.seed)

    def _load(self, indices: list[int], step: int) -> tuple[Value, Value]:
        samples = []
        with preserve_random_state(torch.device("cpu")):
            for i in indices:
                self._draws.begin(step, i)
                samples.append(self.dataset[i])
        first = samples[0]
        if not isinstance(first, (tuple, list)) or len(first) != 2:
            raise ValueError(
                f"dataset[{indices[0]}] is {type(first).__name__}, not a pair (inputs, targets) of one sample, as in "
                f"{WANTED}"
            )
        try:
            inputs, targets = default_collate(samples)
        except Exception as error:
            raise ValueError(
                f"The samples {_some(indices)} of the dataset do not go into one batch: "
                f"{str(error).strip().splitlines()[0][:200]}. All need the same shapes and kinds; pad or cut them in "
                "the dataset's __getitem__."
            ) from None
        return as_value(inputs, "the inputs of a sample"), as_value(targets, "the targets of a sample")


def check_tensor(tensor: Tensor, what: str) -> None:
    """Check that a tensor has rows of numbers, so that it can be cut into micro-batches and sent."""
    reason = ""
    if tensor.is_meta:
        reason = "are on the meta device and hold no numbers: make them on the CPU, as torch.randn(8, 4) does"
    elif tensor.is_nested:
        reason = "are a nested tensor: pad its rows to one length, tensor.to_padded_tensor(0.0)"
    elif tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        reason = (
            f"are {kind}, whose rows cannot be taken one by one: tensor.to_dense() makes a dense tensor of it"
        )
    elif tensor.is_quantized:
        reason = "are quantized, and nothing trains on that: tensor.dequantize() makes numbers of them"
    if reason:
        raise ValueError(f"{what} {reason}")


def as_value(value: Any, what: str) -> Value:
    """Return inputs or targets on the CPU, as a tensor, a tuple or a dict of tensors; `what` they are is for errors."""
    if isinstance(value, Mapping):
        value = dict(value)
    elif isinstance(value, (tuple, list)):
        value = tuple(value)
    inner = leaves(value) if isinstance(value, (Tensor, tuple, dict)) else []
    if not inner or not all(isinstance(tensor, Tensor) for tensor in inner):
        raise ValueError(
            f"{what} are {type(value).__name__}: a tensor, a tuple of tensors or a dict of tensors is wanted. "
            "torch.as_tensor(...) makes one of numbers or of a NumPy array"
        )
    for tensor in inner:
        check_tensor(tensor, what)
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _check_dataset(dataset: Any) -> int:
    """Check the dataset and return its number of samples."""
    kind = type(dataset).__name__
    if isinstance(dataset, (Tensor, DataLoader)):
        raise ValueError(
            f"Batches({kind}): a dataset gives single samples, dataset[i] -> (inputs, targets), as in {WANTED}"
            + (". A DataLoader makes batches already: data=loader" if isinstance(dataset, DataLoader) else "")
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"Batches({kind}): its samples have no numbers to shuffle and deal out; it takes a map-style dataset, "
            f"with __len__ and __getitem__, as in {WANTED}. What gives whole batches in turn is `data` itself."
        )
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        raise ValueError(
            f"Batches({kind}): the dataset has no len(); it takes one that has, as in {WANTED}"
        ) from None
    if samples < 1:
        raise ValueError(f"Batches({kind}): the dataset has no samples")
    return samples


def check_integer(name: str, value: Any, least: int, good: int | None = None, most: int = 2**62) -> int:
    """Return a whole number in these bounds as an int; `good` is one that works, for the error."""
    number, such = whole(value), "" if good is None else f", such as {name}={good}"
    if number is None or number < least:
        raise ValueError(f"{name}={value!r:.80}: {name} is a whole number, {least} or more{such}")
    if number > most:
        raise ValueError(f"{name}={value!r:.80}: {name} is at most {most:,}{such}")
    return number


def _some(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return shown + (", ..." if len(indices) > 8 else "")
