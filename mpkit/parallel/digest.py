"""Digests of data: what proves, afterwards, which rank took which samples.

A sample's digest is the SHA-256 of its bytes, shapes and dtypes; a share's digest is the SHA-256 of its samples'
digests, one after the other (a hash list: Merkle's tree with one level). So both come from one pass over the data,
and two shares have the same digest only if they have the same samples in the same order.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.disk import FULL, full_disk
from mpkit.parallel.microbatch import Value, leaves

__all__ = ["Taken", "data_digest", "read_taken", "sample_digests"]

SHORT = 32
"""Hexadecimal digits that are kept of a sample's digest: 128 bits, which no two samples share by chance."""


def data_digest(inputs: Any, targets: Any) -> str:
    """The digest of some samples, as `Run.data_digest` has it for what a rank took in a step.

    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    >>> data_digest(x[::2], y[::2]) == data_digest(x[[0, 2]], y[[0, 2]])
    True
    >>> data_digest(x, y) == data_digest(x[[1, 0, 2]], y[[1, 0, 2]])
    False

    Args:
        inputs: a tensor, or a tuple or dict of tensors, [samples, ...] each.
        targets: likewise.

    Returns:
        64 hexadecimal digits; of no samples at all, those of SHA-256 of nothing.
    """
    return digest_of(_raw_digests([(_tensors(inputs), _tensors(targets))]))


def sample_digests(inputs: Any, targets: Any) -> list[str]:
    """One digest a sample, as `Run.samples_seen` has them.

    >>> sample_digests(torch.zeros(2, 3), torch.tensor([1, 1]))
    ['...', '...']

    Args:
        inputs: a tensor, or a tuple or dict of tensors, [samples, ...] each.
        targets: likewise.

    Returns:
        32 hexadecimal digits each: the first half of a SHA-256.
    """
    return [raw.hex()[:SHORT] for raw in _raw_digests([(_tensors(inputs), _tensors(targets))])]


def digest_of(samples: list[bytes]) -> str:
    """The digest of samples with these digests."""
    return hashlib.sha256(b"".join(samples)).hexdigest()


def _tensors(value: Any) -> Value:
    if isinstance(value, dict):
        return {name: torch.as_tensor(tensor) for name, tensor in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(torch.as_tensor(tensor) for tensor in value)
    return torch.as_tensor(value)


def _raw_digests(parts: list[tuple[Value, Value]]) -> list[bytes]:
    """The digest of each sample of some parts of a batch, in order."""
    found = []
    for inputs, targets in parts:
        tensors = [*leaves(inputs), *leaves(targets)]
        head = repr([_form(inputs), _form(targets)]).encode()
        for rows in zip(*map(_rows, tensors), strict=True):
            digest = hashlib.sha256(head)
            for row in rows:
                digest.update(row)
            found.append(digest.digest())
    return found


def _form(value: Value) -> list[tuple[str, list[int], str]]:
    """Names, shapes and dtypes of a sample."""
    names = list(value) if isinstance(value, dict) else [""] * len(leaves(value))
    return [(name, list(t.shape[1:]), str(t.dtype)) for name, t in zip(names, leaves(value), strict=True)]


def _rows(tensor: Tensor) -> list[memoryview]:
    """The bytes of each sample."""
    k, nbytes = tensor.shape[0], tensor[:1].nbytes
    if not k or not nbytes:
        return [memoryview(b"")] * k
    # Not .contiguous(): one sample of several passes for contiguous whatever its stride, and is no view of bytes.
    flat_copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    data: Any = flat_copy.view(torch.uint8).numpy()
    flat = memoryview(data)
    return [flat[i * nbytes : (i + 1) * nbytes] for i in range(k)]


# ---- a rank's file: a line a step, "step digest sample,sample,..." -------------------------------------------


class Taken:
    """Writes what one rank took in each step. A line is one write: a rank that is killed loses none."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._fd = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, step: int, parts: list[tuple[Value, Value]]) -> None:
        """Step number `step` took these parts of its batch."""
        raw = _raw_digests(parts)
        samples = ",".join(one.hex()[:SHORT] for one in raw)
        line = f"{step} {digest_of(raw)} {samples}\n".encode()
        try:
            while line and self._fd >= 0:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.close(self._fd)
            self._fd = -1
            warnings.warn(
                f"digests of data stop before step {step}, the run goes on: {full_disk(error, self._folder).strerror}",
                RuntimeWarning,
                stacklevel=2,
            )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.taken"


def read_taken(folder: Path, ranks: int) -> tuple[list[list[str]], list[list[list[str]]]]:
    """By step by rank: the digest of what was taken, and the samples'. Of steps that all ranks have begun."""
    digests: list[list[str]] = []
    samples: list[list[list[str]]] = []
    for lines in zip(*(_lines(_path(folder, rank)) for rank in range(ranks)), strict=False):
        parts = [line.split(" ") for line in lines]
        digests.append([part[1] for part in parts])
        samples.append([part[2].split(",") if part[2] else [] for part in parts])
    return digests, samples


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]  # a line without its end is not whole
    except FileNotFoundError:
        return []
