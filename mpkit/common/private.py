"""Files that no other user has a hand in: never reached through a link, never there before."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["NO_LINK", "create"]

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def create(path: Path, flags: int = os.O_RDWR, mode: int = 0o600) -> int:
    """Create a file, and return its descriptor.

    Raises:
        FileExistsError: something has this name already, a link perhaps.
    """
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
