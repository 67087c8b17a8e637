"""Chrome's trace format as a stream of events, however large the file is; and what a file is, from its first bytes.

    text       the file unzipped and decoded, in pieces
    values     one JSON value at a time, from wherever the text has got to
    repairs    what public tools fix as well: an empty value, a backslash that escapes nothing, an end that was cut off

Source: "Trace Event Format" (Google, 2016): an object with the list "traceEvents", or that list alone.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mpkit.errors import TraceError

__all__ = ["EventStream", "looks_like_json", "looks_like_trace", "other_kind"]

PIECE = 4 << 20
"""Bytes that are read at a time."""

_LONGEST = 8 << 20  # characters of one value
_HEADER = 32 << 20  # characters of all values beside the events
_UNREADABLE = 20  # events that are left out; each takes a search through what is longer than any event
_UNZIPPED, _TIMES = (
    64 << 20,
    100,
)  # bytes that any file may come to unzipped; a larger one per byte of its own
_BETWEEN = re.compile(r"[\s,]*")
_EMPTY = re.compile(r'(?<!\\)("\s*:)\s*(?=[,}\]])')
_BACKSLASH = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")

MARKS = (b'"traceEvents"', b'"ph"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
"""What one of the first 64 kB of a trace has: in front of the events lie devices and groups, which can be long."""


def looks_like_json(path: Path) -> bool:
    """Say whether a file holds JSON, zipped by gzip or not, from its first characters."""
    return _head(path, 64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def looks_like_trace(path: Path) -> bool:
    """Say whether a file of JSON begins as a trace does; one that is damaged from the beginning counts as one."""
    return not looks_like_json(path) or any(word in _head(path, 1 << 16) for word in MARKS)


def other_kind(path: Path) -> str:
    """Say what a file is that is neither JSON nor a zip archive, as far as its first bytes tell; "" if they do not.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     other_kind(Path(file.name))
    'empty'
    """
    with path.open("rb") as file:
        raw = file.read(64)
    text = _head(path, 512)
    if text[257:262] == b"ustar":
        return "a tar archive: unpack it, and open its folder"
    if not raw or raw.startswith((b"PK", b"\x1f\x8b")):
        return "" if raw else "empty"
    if raw.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS to a file that is not here: `git lfs pull` fetches it"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16, and a trace is UTF-8"
    if text.lstrip()[:1] == b"<":
        return "a page of HTML, not the file that it shows"
    return (
        "text, and not JSON" if text.isascii() and b"\0" not in text else "neither JSON nor a trace of mpkit"
    )


def _head(path: Path, length: int) -> bytes:
    """Return the first bytes of a file, unzipped; as many as can be read."""
    with path.open("rb") as raw:
        try:
            return bytes(_unzipped(raw).read(length))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b""


def _unzipped(raw: IO[bytes]) -> Any:
    """Return a file, or what is in it if it is zipped by gzip."""
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if zipped else raw


class EventStream:
    """The events of one file.

    Args:
        path: the file, JSON or JSON zipped by gzip.
        progress: is called with the bytes of the file that have been read so far.

    Attributes:
        header: everything beside the events, complete once all events have been read.
        repairs: how often each thing was fixed.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda done: None) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.repairs: Counter[str] = Counter()
        self._progress = progress
        self._scan: Any = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        self._text, self._at, self._ended = "", 0, False
        self._before = 0  # characters before the text at hand
        self._read = 0  # bytes, unzipped

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the events, in the order of the file.

        Raises:
            TraceError: the file holds no object and no list of JSON, is far larger than its bytes make likely, or is
                damaged all over.
        """
        with self.path.open("rb") as self._raw:
            self._bytes = _unzipped(self._raw)
            self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
            first = self._peek()
            if first not in ("{", "["):
                raise TraceError(
                    f"{self.path} begins with {first!r}, so it is no JSON. mk.open reads what torch.profiler's "
                    "export_chrome_trace writes (.json or .json.gz), and what trace.save writes"
                )
            self._at += 1
            yield from self._events() if first == "[" else self._members()
            self._at += first == "{"
            if self._peek() in ("{", "["):
                raise TraceError(
                    f"{self.path}: behind its end another trace begins, {self._quote()}. A file is of one rank: write "
                    "each rank's trace to a file of its own, and give mk.open their folder"
                )

    # ---- values

    def _members(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the object whose "{" has been read, and fill the header with its other members."""
        kept = 0
        while self._peek() not in ("}", ""):
            key = self._value()
            if self._peek() != ":" or not isinstance(key, str):
                return self._cut()
            self._at += 1
            if self._peek() == "[" and key == "traceEvents":
                self._at += 1
                yield from self._events()
            elif self._text[self._at : self._at + 1] in (",", "}"):
                self.repairs["empty value"] += 1
            else:
                before = self._before + self._at
                self.header[key] = self._value()
                kept += self._before + self._at - before
                if kept > _HEADER:
                    raise TraceError(
                        f"{self.path}: it says more than {_HEADER:,} characters beside its events"
                    )
        if self._peek() == "":
            self._cut()
        return None

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the list whose "[" has been read."""
        while True:
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
            try:
                event, self._at = self._scan_value()
            except (StopIteration, ValueError):
                if (following := self._peek()) == "]":
                    self._at += 1
                    return
                if following == "":
                    return self._cut()
                event = self._value()
            if isinstance(event, dict):
                yield event
            elif event is not None or not self._ended:
                self.repairs["event that is no object, left out"] += 1

    def _value(self) -> Any:
        """Return the next value, after reading on and fixing as far as that takes; None at an end that was cut off."""
        while True:
            try:
                value, end = self._scan_value()
            except (StopIteration, ValueError):
                held = len(self._text) - self._at
                if (held < PIECE and self._more()) or self._mend() or (held < _LONGEST and self._more()):
                    continue
                following = _NEXT_EVENT.search(self._text, self._at)
                if following is None:
                    self._at, self._ended = len(self._text), True
                    return None
                self.repairs["event that cannot be read, left out"] += 1
                if self.repairs["event that cannot be read, left out"] > _UNREADABLE:
                    raise TraceError(
                        f"{self.path}: more than {_UNREADABLE} events are no JSON, as {self._quote()}"
                    ) from None
                self._at = following.end()
                continue
            if end == len(self._text) and not isinstance(value, dict | list | str) and self._more():
                continue  # a number may go on
            self._at = end
            return value

    def _scan_value(self) -> tuple[Any, int]:
        """Return the value at hand and where it ends."""
        try:
            value: tuple[Any, int] = self._scan(self._text, self._at)
            return value
        except RecursionError:
            raise TraceError(f"{self.path}: brackets are nested too deeply: {self._quote()}") from None

    def _quote(self) -> str:
        return f"{self._text[self._at : self._at + 60]!r} at character {self._before + self._at:,}"

    def _peek(self) -> str:
        """Return the next character that is no space and no comma; "" at the end."""
        while True:
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _mend(self) -> bool:
        """Fix what is wrong in the text at hand; return whether there was anything."""
        rest, empty = _EMPTY.subn(r'\1""', self._text[self._at :])
        whole = len(rest) if self._ended else len(rest) - 6  # an escape may go on in the next piece
        mended = _BACKSLASH.sub(lambda each: each[0] if each[1] or each.start() >= whole else "\\\\", rest)
        lone = len(mended) - len(rest)
        self.repairs.update({"empty value": empty, "backslash that escapes nothing": lone})
        self._before += self._at
        self._text, self._at = mended, 0
        return bool(empty or lone)

    def _cut(self) -> None:
        self._ended, self._at = True, len(self._text)
        self.repairs["end that was cut off"] = 1

    # ---- text

    def _more(self) -> bool:
        """Read another piece; return whether there was any."""
        piece = ""
        while not piece and not self._ended:
            try:
                raw = self._bytes.read1(PIECE)
            except EOFError:
                raw = b""
            except (zlib.error, gzip.BadGzipFile):
                self.repairs["zipped data that is damaged"] += 1
                raw = b""
            self._read += len(raw)
            if self._read > max(_UNZIPPED, _TIMES * self._raw.tell()):
                raise TraceError(
                    f"{self.path}: {self._raw.tell():,} bytes of it are more than {self._read:,} unzipped, and no text "
                    "shrinks as much: somebody has made it up to fill the memory"
                )
            piece, self._ended = self._decoder.decode(raw), not raw
        self._before += self._at
        self._text, self._at = self._text[self._at :] + piece, 0
        self._progress(self._raw.tell())
        return bool(piece)
