"""What ranks print: a rank's sys.stdout and sys.stderr.

All ranks append records to one file. The system appends each write as a whole, so lines of different ranks never
mix, and the file's order is the order in which they were printed. What bypasses Python (C++ code, child processes)
goes to a file per rank, since it comes without a label. `mpkit.launch.output_reader` is the other end.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable

from mpkit.launch.folder import MAGIC, OUTPUT, OUTPUT_LIMIT

__all__ = ["Labelled", "cut_note"]

UNFINISHED_LIMIT = 1_000_000
"""Characters of a line that are kept until it is finished."""


def cut_note() -> str:
    """Return what stands in place of the output beyond the limit."""
    return f"(more than {OUTPUT_LIMIT:,} bytes printed: the rest is left out)"


class Labelled(io.TextIOBase):
    """A rank's sys.stdout or sys.stderr: whole lines, each a record of output.log.

    Args:
        file: descriptor of output.log.
        rank: whose output it is.
        stream: 1 for stdout, 2 for stderr.
        on_failure: told why, if there is no space for output. Nothing is written then, and the rank goes on.
    """

    def __init__(
        self, file: int, rank: int, stream: int, on_failure: Callable[[OSError], None] = lambda error: None
    ) -> None:
        self._file = file
        self._rank = rank
        self._stream = stream
        self._on_failure = on_failure
        self._pieces: deque[str] = deque()  # of the unfinished line; appended to and drained by any thread
        self._size = 0
        self._written = 0
        self._unfinished = False  # what was sent last had no line end

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Always UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """No: progress bars should not draw over each other."""
        return False

    def write(self, text: str) -> int:
        """Keep `text` until its line is finished."""
        self._pieces.append(text)
        self._size += len(text)
        if "\n" in text:
            whole, _, rest = self._drain().rpartition("\n")
            self._pieces.appendleft(rest)
            self._size = len(rest)
            self._send(whole + "\n")
        elif self._size > UNFINISHED_LIMIT:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what there is, even of an unfinished line."""
        self._size = 0
        if text := self._drain():
            self._send(text)

    def _drain(self) -> str:
        taken = []
        while self._pieces:
            taken.append(self._pieces.popleft())
        return "".join(taken)

    def _send(self, text: str) -> None:
        room = OUTPUT_LIMIT - self._written
        if room < 0 or self._file < 0:
            return
        data = text.encode("utf-8", "replace")
        self._written += len(data)
        if len(data) > room:
            data = data[:room].decode("utf-8", "ignore").encode()
            data += b"\n" * bool(data[-1:] not in (b"", b"\n") or (not data and self._unfinished))
            data += f"{cut_note()}\n".encode()
        self._unfinished = not data.endswith(b"\n")
        record = OUTPUT.pack(MAGIC, self._rank, self._stream, len(data)) + data
        try:
            while record:
                record = record[os.write(self._file, record) :]
        except OSError as error:
            self._file = -1
            self._on_failure(error)
