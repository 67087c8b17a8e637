"""What ranks print: each rank's half, and the launching process's.

A rank puts its label before each line and appends whole lines to one file of text, which the system keeps whole and in
the order in which they were printed. The launching process copies what is new. C++ code and child processes write to
the descriptors 1 and 2, which lead to a file for each rank; the reader labels those lines.
"""

import io
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpkit.common.disk import FULL, NO_LINK, full_disk
from mpkit.common.launch_folder import OUTPUT_LIMIT, part, read_note, write_note
from mpkit.common.safe_text import visible

LINE_ENDS = re.compile(rb"\r\n|\n|\r")

CHUNK = 4_000_000  # bytes of each file that are read at a time
CUT = f"(more than {OUTPUT_LIMIT:,} bytes printed: the rest is left out)"


class LabelledLines(io.RawIOBase):
    """The bytes below a rank's sys.stdout (`stream` 1) or sys.stderr (2): whole lines, each with the rank's label.

    Where there is no space for output, it ends, a note says so, and the rank continues.
    """

    def __init__(self, folder: Path, rank: int, stream: int) -> None:
        self._folder, self._rank, self._stream = folder, rank, stream
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK
        self._file, self._label = os.open(folder / "output.log", flags, 0o600), f"[rank {rank}] ".encode()
        self._pieces: deque[bytes] = deque()  # of the unfinished line; any thread may append or drain
        self._size = 0
        self.room = OUTPUT_LIMIT  # bytes that may still be written

    def writable(self) -> bool:
        """Return True: bytes can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor that C++ code and child processes write to, which goes to a file of its own."""
        return self._stream

    def write(self, data: Any) -> int:
        """Append the lines that are complete by now, and keep the rest."""
        new = bytes(data)
        if self._size <= OUTPUT_LIMIT:
            self._pieces.append(new)
            self._size += len(new)
        if b"\n" in new or b"\r" in new:
            whole = self._drain()
            end = max(whole.rfind(b"\n"), whole.rfind(b"\r", 0, -1)) + 1  # "\n" may follow a last "\r"
            self._pieces.appendleft(whole[end:])
            self._size = len(whole) - end
            self._send(whole[:end])
        return len(new)

    def end_line(self) -> None:
        """Append an unfinished line: the rank is done, or a cell."""
        self._size = 0
        self._send(self._drain())

    def close(self) -> None:
        """Stay open: a TextIOWrapper of the program's own that is dropped closes what it wraps."""

    def _drain(self) -> bytes:
        taken = []
        while self._pieces:
            taken.append(self._pieces.popleft())
        return b"".join(taken)

    def _send(self, text: bytes) -> None:
        if not text or self.room < 0:
            return
        room, self.room = self.room, self.room - len(text)
        lines = LINE_ENDS.split(text[:room].decode("utf-8", "ignore").encode() if self.room < 0 else text)
        lines = lines[:-1] if not lines[-1] else lines
        lines += [CUT.encode()] * (self.room < 0)
        data = b"".join(self._label + line + b"\n" for line in lines)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.room = -1
            why = (full_disk(error, self._folder) if error.errno in FULL else error).strerror
            note = f"mpkit: what rank {self._rank} printed after this is lost: {why}"
            write_note(self._folder, self._rank, note)


def labelled_output(folder: Path, rank: int, stream: int) -> io.TextIOWrapper:
    """Return a rank's sys.stdout or sys.stderr, as `LabelledLines` describes it; its encoding is UTF-8."""
    lines: Any = LabelledLines(folder, rank, stream)
    return io.TextIOWrapper(lines, "utf-8", "replace", newline="\n", write_through=True)


def end_lines() -> None:
    """Let what this rank has printed appear, unfinished lines too."""
    for stream in (sys.stdout, sys.stderr):  # they may be the program's own
        stream.flush()
    for stream in (sys.__stdout__, sys.__stderr__):
        lines = getattr(stream, "buffer", None)
        if isinstance(lines, LabelledLines):
            lines.end_line()


class OutputReader:
    """Yields the lines that have been printed since the last look, labelled."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._log = _GrowingFile(folder / "output.log", "")
        self._std = [_GrowingFile(part(folder, rank, "std"), f"[rank {rank}] ") for rank in range(ranks)]

    def lines(self, last: bool = False) -> Iterator[str]:
        """Yield new lines such as "[rank 2] loss 3.1"; `last`: nothing writes any more, so also lines without a line
        end.
        """
        yield from self._log.lines(last)
        for file in self._std:
            if file.place < OUTPUT_LIMIT:
                yield from file.lines(last, OUTPUT_LIMIT)
                if file.place >= OUTPUT_LIMIT:
                    yield f"{file.label}{CUT}"
            else:
                file.empty()  # C++ code and children may write forever, and must not fill the disk
        for rank in range(self._ranks if last else 0):
            for line in read_note(self._folder, rank).splitlines():
                yield f"[rank {rank}] {visible(line)}"


class _GrowingFile:
    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label, self.place = path, label, 0
        self._line = b""  # the beginning of a line

    def lines(self, last: bool, most: int | None = None) -> Iterator[str]:
        """Yield the lines that are complete; `last`, or once `most` bytes were read, the incomplete one too."""
        until = self.path.stat().st_size if self.path.exists() else 0  # more may be written all the time
        until = until if most is None else min(until, most)
        while self.place < until:
            with self.path.open("rb") as file:
                file.seek(self.place)
                new = file.read(min(CHUNK, until - self.place))
            if not new:
                break
            self.place += len(new)
            text, end, rest = new.rpartition(b"\n")
            if end:
                yield from self._label_lines(self._line + text)
                self._line = rest
            else:
                self._line += rest
        if (last or self.place == most) and self._line:
            line, self._line = self._line, b""
            yield from self._label_lines(line)

    def _label_lines(self, text: bytes) -> Iterator[str]:
        lines = LINE_ENDS.split(text)
        return (f"{self.label}{visible(line.decode('utf-8', 'replace'))}" for line in lines)

    def empty(self) -> None:
        """Truncate the file to free its disk space; appending starts again at the beginning."""
        if self.path.stat().st_size:
            os.truncate(self.path, 0)
