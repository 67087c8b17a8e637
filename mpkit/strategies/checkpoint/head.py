"""The head of a checkpoint: `mpkit.json`, sealed by a digest of its own and checked field by field.

It holds the digests of the other files, so its own digest covers the whole checkpoint: any byte that changes shows.
But a digest is no signature: whoever forges a file can forge its digest. So nothing in the head is trusted, and each
field must be something that a training could have written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from io import BufferedReader
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.plan.plan import Plan

__all__ = ["FORMAT", "HEAD", "CheckpointHead", "DamagedCheckpoint", "open_plain", "read_told"]

FORMAT = 6
"""Up to 5, tensors lay in files of torch.distributed.checkpoint."""
HEAD = "mpkit.json"
LARGEST, MOST_VALUES = 256 * 2**20, 10_000_000
"""Largest mpkit.json, in bytes and in values of JSON: a parameter takes about a hundred and three."""


class DamagedCheckpoint(Exception):
    """Raised for a checkpoint that is not complete and unchanged; the message says why."""


@dataclass
class CheckpointHead:
    """A checkpoint's description of itself, in JSON.

    Attributes:
        step: number of steps done, and so the number of the next one.
        number: the checkpoint's number in its folder; the newest has the highest.
        plan: plan of the training that wrote it.
        world_size: number of ranks of that training.
        facts: facts about model and optimizer: `mpkit.strategies.prepare.resume.facts_of`.
        scaler: the loss scale, and the number of steps since it changed.
        skipped: number of steps that all ranks skipped because of an overflow.
        files: size in bytes and SHA-256 of each file, by name.
        training: the training that wrote it, by a name drawn at random.
        format: version of this format.
    """

    step: int
    number: int
    plan: dict[str, Any]
    world_size: int
    facts: dict[str, Any]
    scaler: dict[str, Any]
    skipped: int
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    training: str = ""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the head into a checkpoint's folder, and flush it to the disk."""
        with (folder / HEAD).open("x") as file:
            file.write(seal(asdict(self)))
            file.flush()
            os.fsync(file.fileno())


def seal(values: Mapping[str, Any]) -> str:
    """Return the values as JSON, together with the SHA-256 of that JSON.

    >>> seal({"step": 2})
    '{"step": 2, "sha256": "cf5954a197a5343c1abbb381be623183dce46a7f9281dcde7d045f894e63555b"}'
    """
    return json.dumps({**values, "sha256": hashlib.sha256(json.dumps(values).encode()).hexdigest()})


def open_plain(path: Path) -> BufferedReader:
    """Open a file to be read, if it is one: no link is followed, and no pipe waited for.

    Raises:
        OSError: it is not there, or something else than a file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(handle, "rb")


def read_told(folder: Path) -> CheckpointHead:
    """Return a checkpoint's head without reading any other file.

    Raises:
        DamagedCheckpoint: there is no head, it was changed since it was written, or no training could have written it.
    """
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
    if not isinstance(values, dict) or not _is_count(values.get("format")):
        raise DamagedCheckpoint(f"its {HEAD} is not one that mpkit wrote")
    _check_format(values["format"])
    values.pop("sha256", None)
    if seal(values) != text:
        raise DamagedCheckpoint(
            f"its {HEAD} was changed or damaged after it was written: its SHA-256 differs"
        )
    _check_fields(values)
    return CheckpointHead(**values)


def _check_format(number: int) -> None:
    if number > FORMAT:
        raise DamagedCheckpoint(f"a later mpkit wrote it (format {number}; this one reads format {FORMAT})")
    if number < FORMAT:
        raise DamagedCheckpoint(
            f"an earlier mpkit wrote it (format {number}; this one reads format {FORMAT}). That one can go on from it, "
            "and its run.state_dict() takes the weights here"
        )


# ---- field by field ------------------------------------------------------------------------------------------


def _check_fields(values: dict[str, Any]) -> None:
    if set(values) != {each.name for each in fields(CheckpointHead)}:
        odd = sorted(set(values) ^ {each.name for each in fields(CheckpointHead)})
        raise DamagedCheckpoint(
            f"its {HEAD} is not one that mpkit wrote: of its fields {', '.join(odd)[:200]} are odd"
        )
    for name, (is_right, wanted) in _FIELDS.items():
        if not is_right(values[name]):
            raise DamagedCheckpoint(f"its {HEAD} says {name}={values[name]!r:.100}: {wanted} is wanted there")
    try:
        ranks = Plan.from_json(values["plan"]).ranks
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"its {HEAD} has a plan that is none ({str(error)[:200]})") from None
    if ranks != values["world_size"]:
        raise DamagedCheckpoint(
            f"its {HEAD} says world_size={values['world_size']}, and its plan has {ranks} ranks"
        )
    if values["skipped"] > values["step"]:
        raise DamagedCheckpoint(
            f"its {HEAD} says that {values['skipped']} of {values['step']} steps were skipped"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_form(value: Any) -> bool:
    """Return whether the value is a shape and a dtype, such as "[7, 5] float32"."""
    return isinstance(value, str) and bool(re.fullmatch(r"\[(\d+(, \d+)*)?\] \w+", value))


def _are_facts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"trained", "others", "optimizer", "states"}
        and all(isinstance(value[kind], dict) for kind in ("trained", "others"))
        and all(map(_is_form, (*value["trained"].values(), *value["others"].values())))
        and isinstance(value["optimizer"], str)
        and _are_names(value["states"])
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_scaler(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"scale", "good"} or not _is_count(value["good"]):
        return False
    return isinstance(value["scale"], float) and math.isfinite(value["scale"]) and value["scale"] > 0


def _are_files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(Path(name).name == name for name in value)
        and all(isinstance(one, list) and len(one) == 2 and _is_count(one[0]) for one in value.values())
        and all(isinstance(sha, str) and re.fullmatch("[0-9a-f]{64}", sha) for _, sha in value.values())
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, "a whole number, 0 or more,"),
    "number": (_is_count, "a whole number, 0 or more,"),
    "plan": (lambda value: isinstance(value, dict), "what plan.to_json() writes"),
    "world_size": (lambda value: _is_count(value) and value > 0, "a whole number, 1 or more,"),
    "facts": (_are_facts, "the parameters' names with their shapes and dtypes, and the optimizer's states,"),
    "scaler": (_is_scaler, "a scale above 0 and a number of steps"),
    "skipped": (_is_count, "a whole number, 0 or more,"),
    "training": (lambda value: isinstance(value, str) and len(value) <= 64, "a name"),
    "files": (_are_files, "a size and a SHA-256 for each file beside it"),
}
