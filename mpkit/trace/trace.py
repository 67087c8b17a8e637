"""The Trace of a run: one file of it, or the folder into which its ranks write."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.errors import TraceError
from mpkit.trace.files import RankTrace, read_rank
from mpkit.trace.records import MEMORY, OP, Kind

__all__ = ["Trace"]

VERSION = 1


@dataclass
class Trace:
    """What each rank of a run did, in program order. See `Trace.save`, `Trace.load`, `mpkit.Timeline`.

    Attributes:
        ranks: one `RankTrace` a rank.
        meta: about the run, of JSON types: "world_size", "device" ("cpu" or "cuda"), "plan", "hardware", ...
    """

    ranks: list[RankTrace]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, the first one being meta["first_step"]; nan for a step of unknown loss.

        The first rank's that knows it. Where replicas share a batch (meta["replicas"], the ranks of each), each knows
        its share, and all are summed. A step under way counts once its loss is known.
        """
        replicas = self.meta.get("replicas", [range(len(self.ranks))])
        replica_of = {rank: i for i, ranks in enumerate(replicas) for rank in ranks}
        found: dict[int, dict[int, float]] = {}  # by step, by replica
        first = int(self.meta.get("first_step", 0))
        for number, rank in enumerate(self.ranks):
            steps = rank.ops[rank.ops["kind"] == Kind.STEP]
            for step in steps[(steps["end"] > 0) | ~np.isnan(steps["value"])]:
                known = found.setdefault(int(step["step"]), {})
                if not np.isnan(step["value"]):
                    known.setdefault(replica_of[number], float(step["value"]))
        losses = [
            sum(known[i] for i in sorted(known)) if len(known) == len(replicas) else np.nan
            for known in (found.get(step, {}) for step in range(first, 1 + max(found, default=-1)))
        ]
        while len(replicas) > 1 and losses and np.isnan(losses[-1]):  # some replicas are ahead of others
            losses.pop()
        return losses

    def __len__(self) -> int:
        return sum(len(rank.ops) for rank in self.ranks)

    def __repr__(self) -> str:
        steps = 1 + max((int(r.ops["step"].max()) for r in self.ranks if len(r.ops)), default=-1)
        return f"<Trace of {self.world_size} ranks, {len(self):,} ops, {steps} steps>"

    def save(self, path: str | Path) -> Path:
        """Write everything into one file (a zip of .npy arrays and JSON, no pickle); returns its path."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            head = {"version": VERSION, "ranks": self.world_size, "meta": self.meta}
            archive.writestr("mpkit.json", json.dumps(head))
            for number, rank in enumerate(self.ranks):
                for part, array in (("ops", rank.ops), ("mem", rank.memory)):
                    with archive.open(f"rank{number}.{part}.npy", "w") as file:
                        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
                archive.writestr(f"rank{number}.json", json.dumps({"names": rank.names, "state": rank.state}))
        partial.replace(path)  # a reader finds the old file or the whole new one
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote, or the folder of a run, whole or not.

        Raises:
            TraceError: the file is none of ours, of a later version, or broken.
        """
        path = Path(path)
        if path.is_dir():
            return cls.read(path)
        try:
            with zipfile.ZipFile(path) as archive:
                head = json.loads(archive.read("mpkit.json"))
                if head["version"] > VERSION:
                    raise TraceError(
                        f"{path} was written by a later mpkit (format {head['version']}, this one reads up "
                        f"to {VERSION}): pip install --upgrade mpkit"
                    )
                ranks = [_rank_of(archive, number) for number in range(head["ranks"])]
        except FileNotFoundError:
            raise TraceError(f"{path}: no such file; run.trace.save({str(path)!r}) writes one") from None
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{path} cannot be read as a trace ({type(error).__name__}: {error}). It is not a file that "
                "Trace.save wrote, or it was cut short or damaged. "
                "(A run's own folder loads as far as it is whole.)"
            ) from error
        return cls(ranks, head["meta"])

    @classmethod
    def read(cls, folder: str | Path) -> Trace:
        """The folder of a run, as far as it is written: of a cut file, the records that are whole."""
        folder = Path(folder)
        meta = _read_json(folder / "meta.json")
        numbers = sorted(int(p.name[4:-4]) for p in folder.glob("rank*.ops") if p.name[4:-4].isdigit())
        size = max([int(meta.get("world_size", 0)), *(n + 1 for n in numbers)], default=0)
        if not size:
            raise TraceError(f"{folder} is not the folder of a run: it holds no meta.json and no rank0.ops")
        return cls([read_rank(folder, number) for number in range(size)], meta)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _rank_of(archive: zipfile.ZipFile, number: int) -> RankTrace:
    head = json.loads(archive.read(f"rank{number}.json"))
    arrays = []
    for part, dtype in (("ops", OP), ("mem", MEMORY)):
        with archive.open(f"rank{number}.{part}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype != dtype or array.ndim != 1:
            raise TraceError(f"rank {number}'s {part} have other columns than this version of mpkit knows")
        arrays.append(array)
    return RankTrace(arrays[0], arrays[1], [str(name) for name in head["names"]], head["state"])
