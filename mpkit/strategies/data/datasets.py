"""Data that needs no download: real text, and small synthetic datasets.

Each function returns a list of whole batches (inputs, targets), the same for the same seed, and does not change the
program's random state. `checked_batch` checks a batch of any data.
"""

from collections.abc import Mapping
from functools import cache
from math import pi
from typing import Any

import torch
from torch import Tensor

from mpkit.common.tracebacks import public
from mpkit.strategies.data.batches import as_value
from mpkit.strategies.data.microbatch import Value, leaves

Batch = tuple[Tensor, Tensor]


@cache
@public
def text() -> bytes:
    """Return English prose about Python: the language reference included in every Python; at least 450 kB.

    >>> len(text()) > 400_000
    True
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@public
def text_batches(batch: int, length: int, steps: int, *, seed: int = 0) -> list[Batch]:
    """Return batches of `text`, byte by byte; the target of each byte is the next byte.

    >>> inputs, targets = text_batches(batch=8, length=32, steps=3)[0]
    >>> inputs.shape, inputs.dtype, bool((inputs[:, 1:] == targets[:, :-1]).all())
    (torch.Size([8, 32]), torch.int64, True)

    Args:
        batch: sequences per batch.
        length: bytes per sequence.
        steps: number of batches.
        seed: determines where in the text the sequences begin.

    Returns:
        `steps` pairs of (inputs, targets), both [batch, length], int64, 0 to 255.
    """
    _check(batch=batch, length=length, steps=steps)
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    if length >= len(data):
        raise ValueError(
            f"length={length}: the text has {len(data)} bytes, so at most length={len(data) - 1}."
        )
    starts = torch.randint(len(data) - length, (steps, batch), generator=_generator(seed))
    windows = data.unfold(0, length + 1, 1)
    return [(windows[row, :-1], windows[row, 1:]) for row in starts]


@public
def spirals(batch: int, steps: int, *, classes: int = 3, noise: float = 0.1, seed: int = 0) -> list[Batch]:
    """Return points in the plane on spiral arms, one arm per class; no straight line separates the classes.

    >>> points, arms = spirals(batch=12, steps=2)[0]
    >>> points.shape, arms.dtype
    (torch.Size([12, 2]), torch.int64)

    Returns:
        `steps` pairs of (inputs [batch, 2] float32, targets [batch] int64).
    """
    _check(batch=batch, steps=steps, classes=classes)
    generator = _generator(seed)
    batches = []
    for _ in range(steps):
        arms = torch.randint(classes, (batch,), generator=generator)
        radius = torch.rand(batch, generator=generator)
        angle = 2 * pi * (arms / classes + radius) + noise * torch.randn(batch, generator=generator)
        batches.append((torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms))
    return batches


@public
def images(batch: int, steps: int, *, size: int = 16, noise: float = 0.1, seed: int = 0) -> list[Batch]:
    """Return grey images of a disc, a square, a ring or a cross of random size and position; the target is the shape.

    >>> pictures, shapes = images(batch=6, steps=1)[0]
    >>> pictures.shape, int(shapes.max()) < 4, pictures.abs().max().item() < 1.5
    (torch.Size([6, 1, 16, 16]), True, True)

    Returns:
        `steps` pairs of (inputs [batch, 1, size, size] float32, targets [batch] int64 from 0 to 3).
    """
    _check(batch=batch, steps=steps, size=size)
    generator = _generator(seed)
    rows = torch.arange(size)[:, None]
    batches = []
    for _ in range(steps):
        shapes = torch.randint(4, (batch,), generator=generator)
        place = (0.35 + 0.3 * torch.rand(batch, 2, 1, 1, generator=generator)) * size
        radius = (0.15 + 0.15 * torch.rand(batch, 1, 1, generator=generator)) * size
        dy, dx = (rows - place[:, 0]).abs() / radius, (rows.T - place[:, 1]).abs() / radius
        far = (dy**2 + dx**2).sqrt()
        box = torch.maximum(dy, dx)
        drawn = torch.stack(
            [far < 1, box < 1, (far < 1) & (far > 0.6), (box < 1) & (torch.minimum(dy, dx) < 0.3)]
        )
        clean = drawn[shapes, torch.arange(batch)].float()
        pictures = clean + noise * torch.randn(batch, size, size, generator=generator)
        batches.append((pictures[:, None], shapes))
    return batches


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: {name} is 1 or more.")


WANTED = "data is a sequence of (inputs, targets), each a whole batch, such as [(torch.randn(8, 4), torch.randn(8, 2))]"


def checked_batch(item: Any, i: int) -> tuple[Value, Value]:
    """Check that batch number `i` of the data is a pair of inputs and targets, and return it on the CPU."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        of = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise ValueError(f"data[{i}] is {type(item).__name__}{of}, not a pair; {WANTED}")
    inputs = _value(item[0], f"the inputs of data[{i}]")
    targets = _value(item[1], f"the targets of data[{i}]")
    sizes = {int(tensor.shape[0]) for tensor in (*leaves(inputs), *leaves(targets))}
    if len(sizes) > 1:
        raise ValueError(
            f"data[{i}]: the tensors' first dimensions differ: inputs {_shapes(inputs)}, targets {_shapes(targets)}. "
            "The first dimension is the batch, which micro-batches are taken from: it has to be the same in all."
        )
    if sizes == {0}:
        raise ValueError(
            f"data[{i}] is a batch of 0 samples: inputs {_shapes(inputs)}. A batch has 1 or more."
        )
    return inputs, targets


def _value(value: Any, what: str) -> Value:
    items: Any = value.items() if isinstance(value, Mapping) else ()
    for key, each in enumerate(value) if isinstance(value, (tuple, list)) else items:
        if isinstance(each, (Mapping, list, tuple)) and each:
            raise ValueError(
                f"{what} are nested: [{key!r}] is itself a {type(each).__name__}, and micro-batches are taken from one "
                "tensor, or from one tuple or dict of tensors. Give them flat, such as (*batch[0], *batch[1]) or "
                '{"a_b": batch["a"]["b"]}, and let the model\'s forward (or the loss) put together what it needs'
            )
    checked = as_value(value, what)
    if any(tensor.dim() == 0 for tensor in leaves(checked)):
        raise ValueError(
            f"{what}: a tensor without dimensions has no batch; the first dimension is the batch"
        )
    return checked


def _shapes(value: Value) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in leaves(value))
