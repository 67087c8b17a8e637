"""Signatures (HMAC-SHA256) on what the processes of a launch tell each other, made with the launch's secret.

Objects that torch.distributed pickles (`all_gather_object` and the like, distributed checkpoints) come over sockets
that strangers may reach. `sign_objects` has them signed: nothing is unpickled before its signature has been checked.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import re
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

import torch
from torch.distributed import distributed_c10d as c10d

from mpkit.common.process_wide import Replacements
from mpkit.errors import MpkitError

__all__ = ["EXPORT", "Seal", "sign_objects"]

EXPORT = "export MPKIT_SECRET=$(python -c 'import secrets; print(secrets.token_hex())')"
"""A command that gives a launcher's processes a secret."""

SIZE = hashlib.sha256().digest_size
OBJECT = "an object of torch.distributed"


class Seal:
    """Signs what this launch's processes tell each other, and checks what they are told.

    Args:
        key: the secret; None: there is none, and nothing is signed.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def __bool__(self) -> bool:
        """Return whether signatures tell this launch's processes from strangers."""
        return self._key is not None

    def derive(self, context: bytes) -> Seal:
        """Return a seal whose signatures are worth nothing in any other context."""
        return Seal(None if self._key is None else self._mac(b"derive", context))

    def name(self, what: str) -> str:
        """Return a name that only this launch's processes can know; "" where there is no secret."""
        return "" if self._key is None else self._mac(b"name", what.encode()).hex()[:24]

    def sign(self, place: str, value: bytes) -> bytes:
        """Return a value with the signature that it has at a place, such as a key of the store."""
        return value if self._key is None else self._mac(place.encode(), value) + value

    def check(self, place: str, signed: bytes) -> bytes:
        """Return the value whose signature is right.

        Raises:
            MpkitError: no process of this launch wrote it there.
        """
        if self._key is None:
            return signed
        mac, value = signed[:SIZE], signed[SIZE:]
        if not hmac.compare_digest(mac, self._mac(place.encode(), value)):
            raise MpkitError(
                f"{place}: no process of this launch wrote this. Somebody else reaches the store or the ranks' "
                "connections, or a process has another secret (docs/security.md)"
            )
        return value

    def dumps(self, value: Any, pickled: Callable[[Any], bytes] = pickle.dumps) -> bytes:
        """Pickle a value for other processes of this launch."""
        if self:
            return pickled(value)
        file = io.BytesIO()
        torch.save(value, file)  # in the form that `loads` reads safely
        return file.getvalue()

    def loads(self, content: bytes) -> Any:
        """Unpickle what `dumps` made in another process, whose signature has been checked.

        Raises:
            MpkitError: there is no secret, and it is more than numbers, texts, tensors and lists or dicts of these.
        """
        if self:
            return pickle.loads(content)
        try:
            with torch.serialization.safe_globals(_own_records(content)):
                return torch.load(io.BytesIO(content), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            what = re.search(r"GLOBAL (\S+)", str(error))
            raise MpkitError(
                "this launch has no secret, so only numbers, texts, tensors and lists or dicts of these are read from "
                f"other ranks, and not {what[1] if what else 'this'}. Before the launcher's command, the same on each "
                f"node: {EXPORT}"
            ) from None

    def _mac(self, place: bytes, value: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, struct.pack("<q", len(place)) + place + value, "sha256")


def sign_objects(seal: Seal) -> Replacements:
    """Let torch.distributed sign the objects that it pickles and check those that it unpickles, until restored."""

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(seal.sign(OBJECT, seal.dumps(value)))

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            return seal.loads(seal.check(OBJECT, self._file.read()))

    replaced = Replacements()
    replaced.put(c10d, "_pickler", Pickler)
    replaced.put(c10d, "_unpickler", Unpickler)
    return replaced


def _own_records(content: bytes) -> list[Any]:
    """Return those of mpkit's named tuples that are named in pickled content: such as what a training returns."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    records = []
    for module, _, name in (each.rpartition(".") for each in names):
        record = getattr(sys.modules.get(module), name, None) if module.startswith("mpkit.") else None
        if isinstance(record, type) and issubclass(record, tuple) and hasattr(record, "_fields"):
            records.append(record)
    return records
