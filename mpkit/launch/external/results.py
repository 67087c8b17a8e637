"""What the function returned on each rank, in a file without a name, which is gone when this process is."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import IO, Any

from mpkit.launch.process.seal import Seal

__all__ = ["Results"]


class Results:
    """The results of all ranks, in each process.

    Args:
        seal: says whether whoever sent them is known.
    """

    def __init__(self, seal: Seal) -> None:
        self._seal, self._file = seal, tempfile.TemporaryFile(prefix="mpkit-results-")  # noqa: SIM115
        self._ends: list[int] = [0]

    def append(self, packed: bytes) -> None:
        """Write the next rank's result.

        Raises:
            OSError: the disk is full.
        """
        self._file.seek(self._ends[-1])
        self._file.write(packed)
        self._file.flush()
        self._ends.append(self._ends[-1] + len(packed))

    def read(self, rank: int, load: Callable[[IO[bytes]], Any] | None = None) -> Any:
        """Return the result of a rank, read by `load` or else as far as its sender is known."""
        start, end = self._ends[rank : rank + 2]
        self._file.seek(start)
        packed = self._file.read(end - start)
        return self._seal.loads(packed) if load is None else load(io.BytesIO(packed))

    def close(self) -> None:
        """Free the space."""
        self._file.close()
