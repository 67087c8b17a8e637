"""What ranks print, brought to whoever launched them: labelled by rank, in order.

All ranks append records to one file. The system appends each write as a whole, so lines of different ranks never
mix, and the file's order is the order in which they were printed. What bypasses Python (C++ code, child processes)
goes to a file a rank, since it comes without a label.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mpkit.launch.folder import OUTPUT, OUTPUT_LIMIT, part

__all__ = ["Labelled", "OutputReader"]


class Labelled(io.TextIOBase):
    """A rank's sys.stdout or sys.stderr: whole lines, each a record of output.log."""

    def __init__(self, file: int, rank: int, stream: int) -> None:
        self._file = file
        self._rank = rank
        self._stream = stream
        self._pending = ""
        self._written = 0

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
        """Keep `text` until its line is complete."""
        self._pending += text
        if "\n" in self._pending:
            whole, self._pending = self._pending.rsplit("\n", 1)
            self._send(whole + "\n")
        return len(text)

    def flush(self) -> None:
        """Send what there is, even of an unfinished line."""
        if self._pending:
            pending, self._pending = self._pending, ""
            self._send(pending)

    def _send(self, text: str) -> None:
        if self._written > OUTPUT_LIMIT:
            return
        data = text.encode("utf-8", "replace")
        self._written += len(data)
        if self._written > OUTPUT_LIMIT:
            data = f"(more than {OUTPUT_LIMIT:,} bytes printed: the rest is left out)\n".encode()
        os.write(self._file, OUTPUT.pack(self._rank, self._stream, len(data)) + data)


class OutputReader:
    """The other end: yields what was printed since the last look, a labelled line at a time."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._places: dict[Path, int] = {}

    def _new_bytes(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                return file.read(OUTPUT_LIMIT)
        except FileNotFoundError:
            return b""

    def lines(self) -> Iterator[str]:
        """Lines such as "[rank 2] loss 3.1", without their line ends."""
        path = self._folder / "output.log"
        data = self._new_bytes(path)
        place = 0
        while place + OUTPUT.size <= len(data):
            rank, _, length = OUTPUT.unpack_from(data, place)
            if place + OUTPUT.size + length > len(data):
                break
            text = data[place + OUTPUT.size : place + OUTPUT.size + length].decode("utf-8", "replace")
            place += OUTPUT.size + length
            yield from (f"[rank {rank}] {line}" for line in text.splitlines())
        self._places[path] = self._places.get(path, 0) + place
        for rank in range(self._ranks):
            path = part(self._folder, rank, "std")
            whole = self._new_bytes(path)
            whole = whole[: whole.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            yield from (f"[rank {rank}] {line}" for line in whole.decode("utf-8", "replace").splitlines())

    def pump(self, sink: Callable[[str], None]) -> None:
        """All new lines into `sink`."""
        for line in self.lines():
            sink(line)
