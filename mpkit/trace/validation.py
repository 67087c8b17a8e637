"""Checks of a trace before it is put on a clock, since it may come from somebody else or from a damaged disk.

Reading a trace executes nothing in it, and takes time and memory in proportion to its size. But a record may say
anything: a lane that does not exist, step number 2,147,483,647, a wait for an op that never was. These checks reject
such records in a sentence.
"""

import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.errors import TraceError
from mpkit.trace.files import RankTrace
from mpkit.trace.proof import Proof
from mpkit.trace.records import CATEGORIES, SAMPLE, Kind, lane_of

MOST_RANKS = 65_536
"""The most ranks of one trace; the largest trainings so far had some ten thousand."""


_KINDS = np.zeros(256, bool)
_KINDS[[int(kind) for kind in Kind]] = True
_LANES = np.array([lane_of(kind) for kind in range(256)], np.uint8)
_META: dict[str, type] = {
    "device": str, "hardware": str, "dtype": str, "plan": str, "axes": dict, "imported": dict, "mesh": dict,
    "fake": dict, "waiting": list, "stages": list, "clocks": list, "gpus_not_sampled": str, "batch_size": int,
    "failed": str,
}  # fmt: skip
"""The facts of a run that are read, with their types in JSON."""

_LARGEST = 2**60  # 36 years in ns, a million TB in bytes: larger numbers overflow when they are added up


def check_meta(meta: Any, ranks: int | None = None) -> dict[str, Any]:
    """Return what a trace says about its run of so many ranks, if known; it must be a mapping with usable numbers."""
    if not isinstance(meta, Mapping):
        raise TraceError(
            f"what it says of its run is of type {type(meta).__name__}: names and values are wanted"
        )
    for name, most in (("world_size", MOST_RANKS), ("first_step", _LARGEST)):
        value = meta.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise TraceError(f"it says {name}={value!r:.60}: a whole number from 0 to {most:,} is wanted")
    for name, kind in _META.items():
        if not isinstance(meta.get(name, kind()), kind):
            raise TraceError(f"it says {name}={meta[name]!r:.60}: a {kind.__name__} is wanted")
    if not all(isinstance(word, str) for word in meta.get("axes", {}).values()):
        raise TraceError(f"it says axes={meta['axes']!r:.60}: a name for each group is wanted")
    if meta.get("proof") is not None and Proof.from_trace(meta["proof"]) is None:
        raise TraceError(
            f"it says proof={meta['proof']!r:.60}: steps, differences and words as mpkit writes them are wanted"
        )
    if ranks is not None and "replicas" in meta:
        try:
            right = sorted(rank for replica in meta["replicas"] for rank in replica) == list(range(ranks))
        except TypeError:
            right = False
        if not right:
            raise TraceError(
                f"it says replicas={meta['replicas']!r:.60}: each of {ranks} ranks in one is wanted"
            )
    return dict(meta)


def check_unpacked(archive: zipfile.ZipFile, packed: int) -> None:
    """Check the unpacked size of an archive of `packed` bytes: records shrink to a tenth, zeros to a thousandth."""
    size = sum(member.file_size for member in archive.infolist())
    if size > 64 * 2**20 and size > 100 * packed:
        raise TraceError(
            f"{archive.filename} has {packed:,} bytes and would be {size:,} unpacked: no trace shrinks as much, so "
            "somebody has made it up to fill the memory"
        )


def check_rank(rank: RankTrace, number: int, world_size: int) -> None:
    """Check the records of one rank."""
    ops, memory = rank.ops, rank.memory
    here = np.arange(len(ops))
    wrong = {
        "kind": ~_KINDS[ops["kind"]],
        "lane": ops["lane"] != _LANES[ops["kind"]],
        **{name: ops[name] < -1 for name in ("stage", "microbatch", "step")},
        "peer": (ops["peer"] < -1) | (ops["peer"] >= world_size),
        "ref": (ops["ref"] < -1) | (ops["ref"] >= here),
        **{name: _too_large(ops[name]) for name in ("start", "end", "cpu", "bytes")},
        "flops": ~((ops["flops"] >= 0) & (ops["flops"] <= 2.0**100)),
    }
    for name, which in wrong.items():
        _refuse(f"rank {number}'s op", name, ops[name], which)
    changes = {
        "category": memory["category"] >= len(CATEGORIES),
        **{name: _too_large(memory[name]) for name in ("time", "delta")},
    }
    for name, which in changes.items():
        _refuse(f"rank {number}'s change of memory", name, memory[name], which)
    values = rank.values
    said = {"kind": values["kind"] > 3, "step": values["step"] < 0, "time": _too_large(values["time"])}
    for name, which in said.items():
        _refuse(f"rank {number}'s value", name, values[name], which)
    _check_sent_parts(rank, number, world_size)
    samples = rank.samples
    _refuse(f"rank {number}'s sample of its GPU", "time", samples["time"], _too_large(samples["time"]))
    for name in (SAMPLE.names or ())[1:]:
        most = 100 if name == "utilisation" else _LARGEST
        wrong_values = (samples[name] < 0) | (samples[name] > most)
        _refuse(f"rank {number}'s sample of its GPU", name, samples[name], wrong_values)


def _check_sent_parts(rank: RankTrace, number: int, world_size: int) -> None:
    """Check the parts of all-to-alls: each op is one, and its parts are its payload."""
    parts, ops = rank.sent_parts, rank.ops
    last = int(parts["op"].max(initial=0))
    of = np.append(ops["kind"], [0])[np.minimum(parts["op"], len(ops))]
    sent = np.bincount(parts["op"], parts["bytes"], last + 1) if last < len(ops) else np.zeros(last + 1)
    wrong = {
        "op": of != Kind.ALL_TO_ALL,
        "member": parts["member"] >= world_size,
        "bytes": (parts["bytes"] < 1) | _too_large(parts["bytes"]),
    }
    for name, which in wrong.items():
        _refuse(f"rank {number}'s part of an all-to-all", name, parts[name], which)
    payload = ops["bytes"][parts["op"]]
    _refuse(f"rank {number}'s part of an all-to-all", "bytes", parts["bytes"], sent[parts["op"]] > payload)


def check_steps(last: int, first: int, records: int) -> None:
    """Check the number of the last step: steps are consecutive, each with a record."""
    if last - first > 1000 * (1 + records):  # some may be missing, since ranks were killed
        raise TraceError(
            f"it tells of step {last:,}, and has {records:,} records of steps from step {first:,} on: this trace is "
            "damaged, or somebody has made it up"
        )


def _too_large(values: Array) -> Array:
    wrong: Array = (values > _LARGEST) | (values < -_LARGEST)
    return wrong


def _refuse(what: str, name: str, values: Array, wrong: Array) -> None:
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise TraceError(
            f"{what} number {at} has {name}={values[at]}, which no run records: this trace is damaged, or somebody has "
            "made it up"
        )
