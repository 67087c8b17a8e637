"""Output of ranks: a rank's sys.stdout and sys.stderr.

All ranks append records to one file. The system appends each write as a whole, so lines of different ranks never
mix, and the file's order is the order in which they were printed. Output that bypasses Python (C++ code, child
processes) goes to one file per rank, since it carries no label. `mpkit.launch.output_reader` is the other end.
"""

from __future__ import annotations

import codecs
import io
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from mpkit.common.launch_folder import MAGIC, OUTPUT, OUTPUT_LIMIT

__all__ = ["LabelledOutput", "cut_note"]

UNFINISHED_LIMIT = 1_000_000
"""Characters of an unfinished line that are kept before it is sent."""


def cut_note() -> str:
    """Return the text that replaces output beyond the limit."""
    return f"(more than {OUTPUT_LIMIT:,} bytes printed: the rest is left out)"


class _Bytes(io.BufferedIOBase):
    """A rank's sys.stdout.buffer: bytes are shown as the UTF-8 text that they are, or nearly are."""

    def __init__(self, text: LabelledOutput) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        """Return True: bytes can be written."""
        return True

    def fileno(self) -> int:
        """Return the text's descriptor."""
        return self._text.fileno()

    def write(self, data: Any) -> int:
        """Write what is a complete character by now."""
        self._text.write(self._decoder.decode(memoryview(data)))
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Send all text."""
        self._text.flush()

    def close(self) -> None:
        """Send all text, and stay open: a TextIOWrapper that is dropped closes what it wraps."""
        self.flush()


class LabelledOutput(io.TextIOBase):
    """A rank's sys.stdout or sys.stderr: whole lines, each a record of output.log.

    Args:
        file: descriptor of output.log.
        rank: whose output it is.
        stream: 1 for stdout, 2 for stderr.
        on_failure: called with the error if there is no space for output. Output then stops and the rank continues.
    """

    def __init__(
        self, file: int, rank: int, stream: int, on_failure: Callable[[OSError], None] = lambda error: None
    ) -> None:
        self._file = file
        self._rank = rank
        self._stream = stream
        self._on_failure = on_failure
        self._pieces: deque[str] = deque()  # pieces of the unfinished line; any thread may append or drain
        self._size = 0
        self._written = 0
        self._unfinished = False  # the text sent last had no line end
        self._bytes = _Bytes(self)

    @property
    def buffer(self) -> _Bytes:
        """The same output for bytes."""
        return self._bytes

    def fileno(self) -> int:
        """Return the descriptor that child processes and C++ code write to, which goes to a file of its own."""
        return self._stream

    def reconfigure(self, **settings: object) -> None:
        """Send what there is; a program's settings of lines and encodings change nothing."""
        self.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding, always UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True: text can be written."""
        return True

    def isatty(self) -> bool:
        """Return False, so that progress bars do not draw over each other."""
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

    def begin_again(self) -> None:
        """Forget how much was written: the limit counts from here."""
        self._written = 0

    def flush(self) -> None:
        """Send all text, including an unfinished line."""
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
