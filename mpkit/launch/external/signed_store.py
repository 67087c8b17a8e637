"""A launcher's store, in which every value carries a signature of the launch.

Whoever reaches the port of a store can read, write and delete what is in it. So a process believes only values whose
signature shows that a process of this launch wrote them, under this key. Secrecy is not promised, nor that a stranger
cannot disturb: who deletes keys can end a launch, with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from mpkit.launch.process.seal import Seal

__all__ = ["SignedStore"]


class SignedStore(Store):
    """A part of a store; gloo meets through it too, by way of this class's methods.

    Args:
        store: torch's store.
        seal: signs and checks.
        path: put before each key.
    """

    def __init__(self, store: Store, seal: Seal, path: str = "mpkit") -> None:
        super().__init__()
        self.seal, self._store, self._path = seal, store, path
        self._parts: list[Store] = []

    def part(self, name: str) -> SignedStore:
        """Return a part of this part."""
        return SignedStore(self._store, self.seal, self._key(name))

    def signed_by(self, seal: Seal) -> SignedStore:
        """Return the same part, in which values are signed."""
        return SignedStore(self._store, seal, self._path)

    def clone(self) -> SignedStore:
        """Return the same part with a connection of its own: a thread that waits would block the others on one."""
        return SignedStore(self._store.clone(), self.seal, self._path)  # type: ignore[attr-defined]

    def for_group(self, name: str, backend: str) -> Store:
        """Return the part in which a process group meets.

        For nccl, whose threads ask without Python's lock, it is torch's own, without signatures. It lives as long as
        this object, since a group holds only the half of a store that is C++.
        """
        part = PrefixStore(self._key(name), self._store) if "nccl" in backend else self.part(name)
        self._parts.append(part)
        return part

    def secret_name(self, what: str) -> str:
        """Return a name for this part that only this launch's processes can know; "" where there is no secret."""
        return self.seal.name(self._key(what))

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        """Write `value` under `key`."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._key(key), self.seal.sign(self._key(key), data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait until `key` has a value and return it."""
        return self.seal.check(self._key(key), bytes(self._store.get(self._key(key))))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys have values and return them."""
        paths = [self._key(key) for key in keys]
        values = self._store.multi_get(paths)
        return [self.seal.check(path, bytes(value)) for path, value in zip(paths, values, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Add to the integer under `key`, which the store itself does: it cannot be signed."""
        return int(self._store.add(self._key(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._store.check([self._key(key) for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Delete `key` and return whether it had a value."""
        return bool(self._store.delete_key(self._key(key)))

    def num_keys(self) -> int:
        """Return the number of keys of the whole store."""
        return int(self._store.num_keys())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        paths = [self._key(key) for key in keys]
        self._store.wait(paths) if timeout is None else self._store.wait(paths, timeout)
