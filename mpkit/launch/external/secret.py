"""The secret of a launch: what tells its own processes from strangers who reach the same store.

Launchers give their processes none: torchrun's run id, ports and ranks are no secrets. So it is MPKIT_SECRET, or else
a file in this user's home, which the first process that needs it writes; nodes that share a home share the file.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpkit.common.private import NO_LINK, create
from mpkit.launch.process.seal import EXPORT

__all__ = ["Secret", "find_secret"]

FILE = "~/.config/mpkit/secret"
SHORTEST = 16


@dataclass(frozen=True)
class Secret:
    """A secret, or why there is none.

    Attributes:
        key: the secret; None where there is none.
        source: where it is from, or why there is none, in words.
    """

    key: bytes | None
    source: str


def find_secret(environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret that this process shares with the other processes of its launch, and with nobody else.

    >>> find_secret({"MPKIT_SECRET": "correct horse battery staple"}).source
    'MPKIT_SECRET'

    Raises:
        ValueError: MPKIT_SECRET is so short that it can be guessed.
    """
    text = environment.get("MPKIT_SECRET", "")
    if text:
        if len(text) < SHORTEST:
            raise ValueError(
                f"MPKIT_SECRET has {len(text)} characters, and a short one can be guessed: at least {SHORTEST}, such "
                f"as {EXPORT}"
            )
        return Secret(text.encode(), "MPKIT_SECRET")
    path = Path(FILE).expanduser()
    try:
        with suppress(FileExistsError):
            _write(path)
        return Secret(_read(path), FILE)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        return Secret(None, f"{FILE}: {getattr(error, 'strerror', None) or error}")


def _write(path: Path) -> None:
    """Write a new secret, whole or not at all, unless there is one."""
    if path.is_symlink() or path.exists():
        return
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"secret.{secrets.token_hex(8)}")
    with os.fdopen(create(partial), "w") as file:
        file.write(secrets.token_hex())
    try:
        os.link(partial, path)  # unlike a rename, this fails if another process was first
    finally:
        partial.unlink()


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | NO_LINK)
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(0, "it has to be a file of this user that nobody else may read (chmod 600)")
        text = stream.read(1000).strip()
    if len(text) < SHORTEST:
        raise PermissionError(0, f"it has {len(text)} characters, and can be guessed: remove it")
    return text
