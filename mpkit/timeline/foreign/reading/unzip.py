"""Bytes zipped by gzip, in pieces, and not more of them than their own size makes likely."""

from __future__ import annotations

import zlib
from typing import IO

__all__ = ["Unzip"]

_GZIP = 31  # zlib: the format of gzip, with the largest window
ALLOWED, TIMES = 64 << 20, 100
"""Unzipped bytes that any file may come to; and those of a larger one per byte. Zeros shrink to a thousandth."""


class Unzip:
    """Reads a zipped file, which may have several members.

    >>> import gzip, io
    >>> Unzip(io.BytesIO(gzip.compress(b"one ") + gzip.compress(b"two"))).read(100)
    b'one '

    Args:
        raw: the file.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._zipped, self._size = raw, b"", 0
        self._unzip = zlib.decompressobj(_GZIP)

    def read(self, most: int) -> bytes:
        """Return the next bytes, at most so many; none at the end.

        Raises:
            zlib.error: they are damaged.
            ValueError: they are far more than what they were made from is likely to have been.
        """
        text = b""
        while not text:
            if self._unzip.eof:
                self._zipped = self._unzip.unused_data
                self._unzip = zlib.decompressobj(_GZIP)
            self._zipped = self._zipped or self._raw.read(most)
            if not self._zipped:
                return b""
            text = self._unzip.decompress(self._zipped, most)
            self._zipped = self._unzip.unconsumed_tail
        self._size += len(text)
        if self._size > max(ALLOWED, TIMES * self._raw.tell()):
            raise ValueError(
                f"{self._raw.tell():,} bytes of it are more than {self._size:,} unzipped, and no text shrinks as much: "
                "somebody has made it up to fill the memory"
            )
        return text
