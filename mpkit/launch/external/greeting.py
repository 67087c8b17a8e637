"""The greeting: what each process tells the others of itself, and whether all of them have the same secret.

Each greeting has a number that is drawn anew. So signatures are made with a key that this launch alone has, and what
somebody has read in an earlier launch's store is worth nothing in this one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from mpkit.common.exceptions import report
from mpkit.errors import MpkitError
from mpkit.launch.external.environment import LauncherPlace
from mpkit.launch.external.secret import Secret
from mpkit.launch.external.signed_store import SignedStore
from mpkit.launch.process.seal import EXPORT, Seal

__all__ = ["greet"]

SIGNED, PLAIN = b"signed ", b"plain  "


def greet(
    store: SignedStore,
    place: LauncherPlace,
    secret: Secret,
    facts: dict[str, Any],
    wait: Callable[[], list[bytes]],
) -> tuple[list[dict[str, Any]], Seal]:
    """Return what every process told, by rank, and what signs the messages of this launch.

    Args:
        store: the store, in which nothing is signed yet.
        place: this process.
        secret: this process's secret.
        facts: what it tells the others, of JSON types.
        wait: waits for the greetings of all.

    Raises:
        ValueError: the processes have different secrets, or only some have one.
        MpkitError: somebody else has written in this process's place.
    """
    seal, here = Seal(secret.key), f"rank {place.rank} on {place.host}"
    own = json.dumps(facts | {"nonce": secrets.token_hex(16)}).encode()
    message = (SIGNED if seal else PLAIN) + seal.sign(f"hello{place.rank}", own)
    store.set(f"hello{place.rank}", message)
    greetings = wait()
    if greetings[place.rank] != message:
        raise MpkitError(
            f"somebody else has written the greeting of rank {place.rank}: two processes are told that they are this "
            "rank, or a stranger reaches the store (docs/security.md)"
        )
    told = []
    for rank, each in enumerate(greetings):
        if each.startswith(SIGNED) != bool(seal):
            raise ValueError(_some(rank, here, secret))
        try:
            greeting = seal.check(f"hello{rank}", each[len(SIGNED) :])
        except MpkitError:
            raise ValueError(
                f"rank {rank} has another secret than {here}, whose secret is from {secret.source}: nodes whose homes "
                f"differ take it from the environment, the same on each of them: {EXPORT}"
            ) from None
        try:
            told.append(dict(json.loads(greeting)))
        except (TypeError, ValueError, RecursionError) as error:
            raise MpkitError(
                f"the greeting of rank {rank} cannot be read ({type(error).__name__}): a stranger reaches the store "
                "(docs/security.md), or that process has another version of mpkit"
            ) from None
    if not seal and place.rank == 0:
        report(
            f"this launch has no secret ({secret.source}): whoever reaches the store at {place.address}:{place.port} "
            "can read and forge what ranks tell each other, verdicts and losses too. mpkit takes no paths and no "
            f"pickled objects from it. On each node the same, before the launcher's command: {EXPORT}"
        )
    return told, seal.derive(b"".join(greetings))


def _some(rank: int, here: str, secret: Secret) -> str:
    with_one, without = (here, f"rank {rank}") if secret.key else (f"rank {rank}", here)
    return (
        f"{with_one} has a secret, and {without} has none"
        + ("" if secret.key else f" ({secret.source})")
        + f": all processes of a launch need the same. On each node, before the launcher's command: {EXPORT}"
    )
