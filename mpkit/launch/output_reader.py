"""Reads what ranks print for the launching process: labelled by rank, in order, and complete up to the limit.

A `Sink` is where it goes, line by line; ranks go on where that fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mpkit.common.launch_folder import MAGIC, OUTPUT, OUTPUT_LIMIT, part, read_note
from mpkit.common.safe_text import visible
from mpkit.launch.process.output import cut_note

__all__ = ["OutputReader", "Sink", "flush_stdout"]


CHUNK = 4_000_000
"""Bytes of each file that are read at a time."""

LINE_ENDS = re.compile(r"\r\n|\n|\r")


class OutputReader:
    """Yields what was printed since the last read, one labelled line at a time."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._log = _GrowingFile(folder / "output.log")
        self._torn = b""  # the beginning of an incomplete record
        self._std = [_GrowingFile(part(folder, rank, "std")) for rank in range(ranks)]
        self._lines = [b""] * ranks  # the beginning of a line of C++ code or of a child process

    def lines(self, last: bool = False) -> Iterator[str]:
        """Yield lines such as "[rank 2] loss 3.1", without line ends.

        Args:
            last: nothing writes any more: yield everything, including lines without a line end.
        """
        yield from self._read_printed(last)
        for rank in range(self._ranks):
            yield from self._read_std(rank, last)
        if last:
            for rank in range(self._ranks):
                yield from _label_lines(rank, read_note(self._folder, rank))

    def _read_printed(self, last: bool) -> Iterator[str]:
        """Yield what was printed through Python, joining pieces of a line printed since the last read."""
        unfinished: dict[tuple[int, int], list[str]] = {}
        until = self._log.size  # of what is there by now, all is shown; more may be written all the time
        while (last or self._log.place < until) and (new := self._log.read()):
            records, self._torn = _records(self._torn + new, whole=False)
            yield from _join_pieces(records, unfinished)
        if last:
            yield from _join_pieces(_records(self._torn, whole=True)[0], unfinished)
        for (rank, _), pieces in unfinished.items():
            yield from _label_lines(rank, "".join(pieces))

    def _read_std(self, rank: int, last: bool) -> Iterator[str]:
        """Yield what C++ code and child processes wrote."""
        file = self._std[rank]
        if file.place >= OUTPUT_LIMIT:
            file.empty()  # they may write forever, and must not fill the disk
            return
        until = file.size
        while (last or file.place < until) and (new := file.read(OUTPUT_LIMIT - file.place)):
            whole, end, rest = new.rpartition(b"\n")
            if end:
                text, self._lines[rank] = self._lines[rank] + whole, rest
                yield from _label_lines(rank, text.decode("utf-8", "replace"))
            else:
                self._lines[rank] += rest
        if last or file.place >= OUTPUT_LIMIT:
            text, self._lines[rank] = self._lines[rank], b""
            yield from _label_lines(rank, text.decode("utf-8", "replace"))
        if file.place >= OUTPUT_LIMIT:
            yield from _label_lines(rank, cut_note())


class _GrowingFile:
    """A file that others append to."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0

    @property
    def size(self) -> int:
        """The number of bytes that are there."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self, most: int = CHUNK) -> bytes:
        """Return up to `most` bytes of what was appended since the last read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place)
                new = file.read(min(most, CHUNK))
        except FileNotFoundError:
            return b""
        self.place += len(new)
        return new

    def empty(self) -> None:
        """Truncate the file to free its disk space; appending starts again at the beginning."""
        if self.path.stat().st_size:
            os.truncate(self.path, 0)


def _records(data: bytes, whole: bool) -> tuple[list[tuple[int, int, str]], bytes]:
    """Return (rank, stream, text) of each record, and the beginning of an incomplete last one.

    A rank that is killed or runs out of space while writing leaves a torn record. Its text counts once another record
    follows it, or if nothing will follow (`whole`).
    """
    records: list[tuple[int, int, str]] = []
    place = 0
    while True:
        begin = data.find(MAGIC, place)
        if begin < 0:  # but the first bytes of a mark may be there
            return records, data[max(place, len(data) - len(MAGIC) + 1) :]
        place = begin
        if place + OUTPUT.size > len(data):
            return records, data[place:]
        _, rank, stream, length = OUTPUT.unpack_from(data, place)
        start = place + OUTPUT.size
        end = data.find(MAGIC, start, start + length)
        if end < 0:
            end = start + length
            if end > len(data) and not whole:
                return records, data[place:]
        records.append((rank, stream, data[start:end].decode("utf-8", "replace")))
        place = end


def _join_pieces(
    records: list[tuple[int, int, str]], unfinished: dict[tuple[int, int], list[str]]
) -> Iterator[str]:
    for rank, stream, text in records:
        whole, end, rest = text.rpartition("\n")
        pieces = unfinished.setdefault((rank, stream), [])
        if end:
            yield from _label_lines(rank, "".join([*pieces, whole, end]))
            pieces.clear()
        pieces.append(rest)


def _label_lines(rank: int, text: str) -> Iterator[str]:
    lines = LINE_ENDS.split(text)
    if not lines[-1]:
        lines.pop()
    return (f"[rank {rank}] {visible(line)}" for line in lines)


def flush_stdout() -> None:
    """Flush stdout, so that the reader of a pipe receives what was printed."""
    if sys.stdout is not None:
        sys.stdout.flush()


class Sink:
    """Passes lines on until that fails.

    Args:
        line: receives a line.
        flush: called after lines have been passed on.

    Attributes:
        broken: the error if nothing reads this program's output any more.
    """

    def __init__(self, line: Callable[[str], None], flush: Callable[[], None]) -> None:
        self._line, self._flush = line, flush
        self._fails = False
        self.broken: BrokenPipeError | None = None

    def show(self, lines: Iterable[str]) -> None:
        """Pass lines on, and flush if any was passed on."""
        shown = False
        for line in lines:
            shown = self._try(self._line, line) or shown
        if shown:
            self._try(self._flush)

    def _try(self, tell: Callable[..., None], *what: str) -> bool:
        """Return whether this succeeded; after a failure nothing is passed on any more."""
        if self._fails:
            return False
        try:
            tell(*what)
        except Exception as error:
            self._fails = True
            if isinstance(error, BrokenPipeError):
                self.broken = error
            else:
                with contextlib.suppress(
                    OSError, ValueError, AttributeError
                ):  # standard error may be closed as well
                    print(
                        "mpkit: what the ranks print cannot be shown any more "
                        f"({type(error).__name__}: {error}); they go on",
                        file=sys.stderr,
                    )
            return False
        return True
