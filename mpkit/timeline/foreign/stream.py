"""Chrome's trace format as a stream of events; and whether a file is one, from its first bytes.

    text       the file unzipped and decoded; events are read from it one by one, so that only columns are made of them
    repairs    what public tools fix as well: an empty value, a backslash that escapes nothing, an end that was cut off

Source: "Trace Event Format" (Google, 2016): an object with the list "traceEvents", or that list alone.
"""

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mpkit.errors import TraceError

PIECE = 4 << 20  # bytes read at a time
UNREADABLE = 20  # events that are left out at most; each takes a search through more text than any event has
UNZIPPED, TIMES = 64 << 20, 100  # bytes that any file may have unzipped; of a larger one, per byte of its own

_BETWEEN = re.compile(r"[\s,]*")
_EMPTY = re.compile(r'(?<!\\)("\s*:)\s*(?=[,}\]])')
_BACKSLASH = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
_LEFT_OUT = "event that cannot be read, left out"

MARKS = (b'"traceEvents"', b'"ph"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
"""Of these, the first 64 kB of a trace have one: devices and groups precede the events, and can be long."""


def looks_like_json(path: Path) -> bool:
    """Say whether a file holds JSON, zipped by gzip or not, from its first characters."""
    return first_bytes(path, 64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def looks_like_trace(path: Path) -> bool:
    """Say whether a file of JSON begins as a trace does; one that is damaged from the beginning counts as one."""
    return not looks_like_json(path) or any(word in first_bytes(path, 1 << 16) for word in MARKS)


def first_bytes(path: Path, length: int) -> bytes:
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
    """The events of one file of JSON, zipped by gzip or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}  # everything beside the events, once all of them have been read
        self.repairs: Counter[str] = Counter()  # how often each thing was fixed
        self._scan: Any = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        self._text, self._at, self._is_mended = "", 0, False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the events, in the order of the file."""
        self._text = self._read()
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
        self._text = ""  # columns are made of the events next

    def _read(self) -> str:
        """Return the text. It grows in place: joining a list of pieces would hold it twice."""
        text, size = "", 0
        decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        with self.path.open("rb") as raw:
            source = _unzipped(raw)
            while True:
                try:
                    piece = source.read1(PIECE)
                except EOFError:
                    piece = b""
                except (zlib.error, gzip.BadGzipFile):
                    self.repairs["zipped data that is damaged"] += 1
                    piece = b""
                if not piece:
                    return text
                size += len(piece)
                if size > max(UNZIPPED, TIMES * raw.tell()):
                    raise TraceError(
                        f"{self.path}: {raw.tell():,} bytes of it are more than {size:,} unzipped, and no text "
                        "shrinks as much: somebody has made it up to fill the memory"
                    )
                text += decode(piece)

    def _members(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the object whose "{" has been read, and fill the header with its other members."""
        while (following := self._peek()) not in ("}", ""):
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
                self.header[key] = self._value()
        return self._cut() if following == "" else None

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the list whose "[" has been read."""
        while (following := self._peek()) not in ("]", ""):
            event = self._value()
            if isinstance(event, dict):
                yield event
            elif event is not None or self._at < len(self._text):
                self.repairs["event that is no object, left out"] += 1
        self._at += 1
        return self._cut() if following == "" else None

    def _value(self) -> Any:
        """Return the next value, after fixing as much as that takes; None at an end that was cut off."""
        while True:
            try:
                value, self._at = self._scan(self._text, self._at)
                return value
            except RecursionError:
                raise TraceError(f"{self.path}: brackets are nested too deeply: {self._quote()}") from None
            except (StopIteration, ValueError):
                if not self._is_mended:
                    self._mend()
                    continue
            if (following := _NEXT_EVENT.search(self._text, self._at)) is None:
                self._at = len(self._text)
                return None
            self.repairs[_LEFT_OUT] += 1
            if self.repairs[_LEFT_OUT] > UNREADABLE:
                raise TraceError(
                    f"{self.path}: more than {UNREADABLE} events are no JSON, as {self._quote()}"
                )
            self._at = following.end()

    def _peek(self) -> str:
        """Return the next character that is no space and no comma; "" at the end."""
        self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
        return self._text[self._at : self._at + 1]

    def _quote(self) -> str:
        return f"{self._text[self._at : self._at + 60]!r} at character {self._at:,}"

    def _mend(self) -> None:
        """Fix what is wrong in the rest of the text."""
        rest, empty = _EMPTY.subn(r'\1""', self._text[self._at :])
        mended = _BACKSLASH.sub(lambda each: each[0] if each[1] else "\\\\", rest)
        lone = len(mended) - len(rest)
        self.repairs.update({"empty value": empty, "backslash that escapes nothing": lone})
        self._text, self._at, self._is_mended = mended, 0, True

    def _cut(self) -> None:
        self._at = len(self._text)
        self.repairs["end that was cut off"] = 1
