"""Signatures (HMAC-SHA256) on the objects that ranks of one machine send each other over gloo's ports.

Every user of the machine can connect to these ports. torch.distributed pickles objects (`all_gather_object` and the
like), and nothing is unpickled before its signature, made with the launch's secret, has been checked.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import IO, Any

from torch.distributed import distributed_c10d as c10d

from mpkit.common.process_wide import Replacements
from mpkit.errors import MpkitError

__all__ = ["sign_objects"]

SIZE = hashlib.sha256().digest_size


def sign_objects(secret: bytes) -> Replacements:
    """Let torch.distributed sign the objects that it pickles and check those that it unpickles, until restored."""

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(hmac.digest(secret, content, "sha256") + content)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            signed = self._file.read()
            if not hmac.compare_digest(signed[:SIZE], hmac.digest(secret, signed[SIZE:], "sha256")):
                raise MpkitError(
                    "an object of torch.distributed: no process of this launch wrote this. Somebody else reaches the "
                    "ranks' connections (docs/security.md)"
                )
            return pickle.loads(signed[SIZE:])

    replaced = Replacements()
    replaced.put(c10d, "_pickler", Pickler)
    replaced.put(c10d, "_unpickler", Unpickler)
    return replaced
