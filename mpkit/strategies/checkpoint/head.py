"""The head of a checkpoint: `mpkit.json`, sealed by a digest of its own.

It holds the digests of the other files, so its own digest covers the whole checkpoint: a change of any byte shows.
A digest is not a signature: whoever forges a file can forge its digest. But nothing in the head is executed, or leads
out of the folder.
"""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.plan.plan import Plan

FORMAT = 7  # up to 5, tensors lay in files of torch.distributed.checkpoint; up to 6, checkpoints had numbers
HEAD = "mpkit.json"
# The largest head, in bytes and in values of JSON: a parameter takes about a hundred and three.
LARGEST, MOST_VALUES = 256 * 2**20, 10_000_000


class DamagedCheckpoint(Exception):
    """Raised for a checkpoint that is incomplete or changed; the message says why."""


@dataclass
class CheckpointHead:
    """A checkpoint's description of itself, in JSON."""

    step: int  # number of steps done, and so the number of the next one
    plan: dict[str, Any]
    world_size: int
    facts: dict[str, Any]  # about model and optimizer: `mpkit.strategies.prepare.resume.facts_of`
    scaler: dict[str, Any]  # the loss scale, and the number of steps since it changed
    skipped: int  # number of steps that all ranks skipped because of an overflow
    files: dict[str, tuple[int, str]] = field(default_factory=dict)  # size in bytes and SHA-256, by name
    training: str = ""  # a random name of the training that wrote it
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the head into a checkpoint's folder, and flush it to the disk."""
        with (folder / HEAD).open("x") as file:
            file.write(seal(asdict(self)))
            file.flush()
            os.fsync(file.fileno())


def seal(values: Mapping[str, Any]) -> str:
    """Return the values as JSON, together with the SHA-256 of that JSON."""
    return json.dumps({**values, "sha256": hashlib.sha256(json.dumps(values).encode()).hexdigest()})


def open_plain(path: Path) -> BufferedReader:
    """Open a file to read it; raise OSError for anything else, without following a link or waiting for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(handle, "rb")


def read_told(folder: Path) -> CheckpointHead:
    """Return a checkpoint's head without reading any other file; raise DamagedCheckpoint if it is not as written."""
    try:
        with open_plain(folder / HEAD) as file:
            if (size := os.fstat(file.fileno()).st_size) > LARGEST:
                raise DamagedCheckpoint(f"its {HEAD} has {size:,} bytes, which no training writes")
            data = file.read(LARGEST)
    except OSError as error:
        raise DamagedCheckpoint(f"it has no {HEAD} ({error.strerror})") from None
    try:
        text = data.decode()
        values = read_json(text, MOST_VALUES)
    except ValueError as error:
        raise DamagedCheckpoint(
            f"its {HEAD} cannot be read ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise DamagedCheckpoint(f"its {HEAD} is not one that mpkit wrote")
    if (number := values["format"]) != FORMAT:
        raise DamagedCheckpoint(
            f"{'an earlier' if number < FORMAT else 'a later'} mpkit wrote it (format {number}; this one reads format "
            f"{FORMAT}). That one can go on from it, and its run.state_dict() takes the weights here"
        )
    values.pop("sha256", None)
    if seal(values) != text:
        raise DamagedCheckpoint(
            f"its {HEAD} was changed or damaged after it was written: its SHA-256 differs"
        )
    damaged = DamagedCheckpoint(f"its {HEAD} holds what no training writes")
    try:
        head = CheckpointHead(**values)
        fits = Plan.from_json(head.plan).ranks == head.world_size and 0 < head.scaler["scale"] < math.inf
        fits = fits and 0 <= head.skipped <= head.step and head.scaler["good"] >= 0
        # No file leads out of the folder.
        fits = fits and all(
            Path(name).name == name and isinstance(sha, str) for name, (_, sha) in head.files.items()
        )
        forms = [*head.facts["trained"].values(), *head.facts["others"].values(), head.facts["optimizer"]]
        fits = fits and all(isinstance(text, str) for text in (*forms, *head.facts["states"], head.training))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged from None
    if not fits:
        raise damaged
    return head
