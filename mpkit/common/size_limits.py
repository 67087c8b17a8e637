"""Files from strangers: the length of a text, and the number of its values, are checked before any value is made."""

import errno
import json
import os
from pathlib import Path
from typing import Any


def read_text(path: Path, most: int = 2**24) -> str:
    """Return the text of a file in UTF-8, without a byte order mark; at most so many bytes.

    >>> size = Path(__file__).stat().st_size
    >>> text = read_text(Path(__file__), size)
    >>> read_text(Path(__file__), size - 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ...size_limits.py has more than ... bytes
    """
    if not path.is_file():  # opening a pipe would block
        number = errno.EINVAL if path.exists() else errno.ENOENT
        raise OSError(number, "it is no file" if path.exists() else os.strerror(number), str(path))
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most:,} bytes")
    return data.decode("utf-8-sig")


def read_json(text: str, most: int = 1_000_000, *, unique: bool = False) -> Any:
    """Return the value of a JSON text of at most so many values; with `unique`, a repeated key is an error.

    An empty list takes 3 characters of text and 64 bytes of memory. So values are counted first, by commas and opening
    brackets; those within strings count too.

    >>> read_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> read_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: its brackets are nested too deeply
    >>> read_json("[0, 0, 0]", most=2)
    Traceback (most recent call last):
        ...
    ValueError: it holds more than 2 values
    """
    if text.count(",") + text.count("[") + text.count("{") > most:
        raise ValueError(f"it holds more than {most:,} values")
    try:
        return json.loads(text, object_pairs_hook=_object if unique else None)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"its key {twice[:60]!r} is there twice")
    return values
