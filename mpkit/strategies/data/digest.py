"""Digests of data, which prove afterwards which rank took which samples.

A sample's digest is the SHA-256 of its bytes, shapes and dtypes; a share's digest is the SHA-256 of its samples'
concatenated digests (a hash list: a Merkle tree with one level). Both take one pass over the data, and two shares have
the same digest only if they have the same samples in the same order.
"""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.disk import FULL, create, full_disk
from mpkit.strategies.data.microbatch import Value, leaves

SHORT = 32
"""Hexadecimal digits of a sample's digest: 128 bits, with which two samples never collide by chance."""


def data_digest(inputs: Any, targets: Any) -> str:
    """Return the digest of some samples, as `Run.data_digest` reports it for a rank's samples of a step.

    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    >>> data_digest(x[::2], y[::2]) == data_digest(x[[0, 2]], y[[0, 2]])
    True
    >>> data_digest(x, y) == data_digest(x[[1, 0, 2]], y[[1, 0, 2]])
    False

    Args:
        inputs: a tensor, or a tuple or dict of tensors, [samples, ...] each.
        targets: likewise.

    Returns:
        64 hexadecimal digits; for no samples, the SHA-256 of the empty string.
    """
    return digest_of(_raw_digests([(_tensors(inputs), _tensors(targets))]))


def sample_digests(inputs: Any, targets: Any) -> list[str]:
    """Return one digest per sample, as in `Run.samples_seen`.

    >>> sample_digests(torch.zeros(2, 3), torch.tensor([1, 1]))
    ['...', '...']

    Args:
        inputs: a tensor, or a tuple or dict of tensors, [samples, ...] each.
        targets: likewise.

    Returns:
        32 hexadecimal digits per sample: the first half of a SHA-256.
    """
    return [raw.hex()[:SHORT] for raw in _raw_digests([(_tensors(inputs), _tensors(targets))])]


def digest_of(samples: list[bytes]) -> str:
    """Return the digest of a share from the digests of its samples."""
    return hashlib.sha256(b"".join(samples)).hexdigest()


def _tensors(value: Any) -> Value:
    if isinstance(value, dict):
        return {name: torch.as_tensor(tensor) for name, tensor in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(torch.as_tensor(tensor) for tensor in value)
    return torch.as_tensor(value)


def _raw_digests(parts: list[tuple[Value, Value]]) -> list[bytes]:
    """Return the digest of each sample in parts of a batch, in order."""
    digests = []
    for inputs, targets in parts:
        tensors = [*leaves(inputs), *leaves(targets)]
        head = repr([_form(inputs), _form(targets)]).encode()
        for rows in zip(*map(_rows, tensors), strict=True):
            digest = hashlib.sha256(head)
            for row in rows:
                digest.update(row)
            digests.append(digest.digest())
    return digests


def _form(value: Value) -> list[tuple[str, list[int], str]]:
    """Return the names, shapes and dtypes of a sample's tensors."""
    names = list(value) if isinstance(value, dict) else [""] * len(leaves(value))
    return [(name, list(t.shape[1:]), str(t.dtype)) for name, t in zip(names, leaves(value), strict=True)]


def _rows(tensor: Tensor) -> list[memoryview]:
    """Return the bytes of each sample."""
    k, nbytes = tensor.shape[0], tensor[:1].nbytes
    if not k or not nbytes:
        return [memoryview(b"")] * k
    # Not .contiguous(): torch considers a single sample contiguous whatever its stride, and cannot view it as bytes.
    flat_copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    data: Any = flat_copy.view(torch.uint8).numpy()
    flat = memoryview(data)
    return [flat[i * nbytes : (i + 1) * nbytes] for i in range(k)]


class SampleLog:
    """A rank's file of the samples that it took: one line per step, "step digest sample,sample,...".

    Each line is one write, so a rank that is killed loses no line.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._fd = create(_path(folder, rank), os.O_WRONLY | os.O_APPEND)

    def write(self, step: int, parts: list[tuple[Value, Value]]) -> None:
        """Record that a step took these parts of its batch."""
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
    """Return the digests of shares, and of their samples, by step and rank, for steps that all ranks have begun."""
    digests: list[list[str]] = []
    samples: list[list[list[str]]] = []
    for lines in zip(*(_lines(_path(folder, rank)) for rank in range(ranks)), strict=False):
        parts = [line.split(" ") for line in lines]
        digests.append([part[1] for part in parts])
        samples.append([part[2].split(",") if part[2] else [] for part in parts])
    return digests, samples


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]  # a line without an end is incomplete
    except FileNotFoundError:
        return []
