"""The Trace of a run: a single file, or the folder into which its ranks write."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.disk import write_whole
from mpkit.common.size_limits import read_json
from mpkit.errors import TraceError
from mpkit.trace.expert_load import ExpertLoad, expert_load_of
from mpkit.trace.files import RankTrace, read_rank
from mpkit.trace.metrics import Metrics, Stop, metrics_of, stop_of
from mpkit.trace.proof import PROOF
from mpkit.trace.records import MEMORY, OP, SAMPLE, SENT_PART, VALUE, Kind
from mpkit.trace.validation import MOST_RANKS, check_meta, check_rank, check_steps, check_unpacked

VERSION = 2  # 2: loading data is an op of its own kind and lane


@dataclass
class Trace:
    """What each rank of a run did, in program order. See `Trace.save`, `Trace.load`, `mpkit.Timeline`.

    Attributes:
        ranks: one `RankTrace` per rank.
        meta: facts about the run, of JSON types: "world_size", "device" ("cpu" or "cuda"), "plan", "hardware", ...
    """

    ranks: list[RankTrace]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, beginning with step meta["first_step"]; nan for a step of unknown loss.

        It is the loss of the first rank that knows it. If replicas share a batch (meta["replicas"], the ranks of each),
        each one knows its share, and all shares are summed. A step in progress counts once its loss is known, be it nan
        or infinite; it is left out only while some replica has not got there.
        """
        replicas = self.meta.get("replicas", [range(len(self.ranks))])
        replica_of = {rank: i for i, ranks in enumerate(replicas) for rank in ranks}
        known: dict[int, dict[int, float]] = {}  # by step, by replica
        ended: Counter[tuple[int, int]] = Counter()  # ranks, by step and replica
        first = int(self.meta.get("first_step", 0))
        for number, rank in enumerate(self.ranks):
            replica, steps = replica_of[number], rank.ops[rank.ops["kind"] == Kind.STEP]
            for step in steps[(steps["end"] > 0) | ~np.isnan(steps["value"])]:
                losses = known.setdefault(int(step["step"]), {})
                if not np.isnan(step["value"]):
                    losses.setdefault(replica, float(step["value"]))
                ended[int(step["step"]), replica] += step["end"] > 0
        check_steps(max(known, default=-1), first, ended.total() + len(known))
        complete = [
            sum(losses[i] for i in sorted(losses)) if len(losses) == len(replicas) else np.nan
            for losses in (known.get(step, {}) for step in range(first, 1 + max(known, default=-1)))
        ]

        def is_over(step: int, replica: int) -> bool:
            return replica in known.get(step, {}) or ended[step, replica] == len(replicas[replica])

        if len(replicas) > 1:  # some replicas are ahead of others
            while complete and not all(is_over(first + len(complete) - 1, i) for i in range(len(replicas))):
                complete.pop()
        return complete

    @property
    def metrics(self) -> Metrics:
        """The values that `ctx.log` wrote, by name and step; see `Metrics`."""
        return metrics_of(self.ranks)

    @property
    def expert_load(self) -> ExpertLoad:
        """The rows that each expert computed, by layer and step.

        Raises:
            ValueError: the model has no experts, or no step is done.
        """
        return expert_load_of(self.ranks)

    @property
    def stop(self) -> Stop | None:
        """The reason for an early end of a training, from the first rank that asked for it; None if none did."""
        return stop_of(self.ranks)

    def check(self) -> Trace:
        """Check that the trace's records can be put on a clock, and return the trace; all readers do so.

        Raises:
            TraceError: a record says what no run records: the trace is damaged, or somebody has made it up.
        """
        check_meta(self.meta, self.world_size)
        for number, rank in enumerate(self.ranks):
            check_rank(rank, number, self.world_size)
        return self

    def __len__(self) -> int:
        return sum(len(rank.ops) for rank in self.ranks)

    def __repr__(self) -> str:
        steps = 1 + max((int(r.ops["step"].max()) for r in self.ranks if len(r.ops)), default=-1)
        return f"<Trace of {self.world_size} ranks, {len(self):,} ops, {steps} steps>"

    def save(self, path: str | Path) -> Path:
        """Write everything into one file (a zip of .npy arrays and JSON, no pickle), and return its path."""
        path = Path(path)
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            head = {"version": VERSION, "ranks": self.world_size, "meta": self.meta}
            archive.writestr("mpkit.json", json.dumps(head))
            for number, rank in enumerate(self.ranks):
                others = [("log", rank.values), ("gpu", rank.samples), ("sent", rank.sent_parts)]
                for part, array in [
                    ("ops", rank.ops),
                    ("mem", rank.memory),
                    *(o for o in others if len(o[1])),
                ]:
                    with archive.open(f"rank{number}.{part}.npy", "w") as file:
                        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
                archive.writestr(f"rank{number}.json", json.dumps({"names": rank.names, "state": rank.state}))
        write_whole(path, data.getvalue())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote, or the folder of a run, complete or not.

        This executes nothing in it, and takes time and memory in proportion to its size on disk.

        Raises:
            TraceError: the file is not a trace, is of a later version, or is broken.
        """
        path = Path(path)
        if path.is_dir():
            return cls.read(path)
        if not path.exists():
            raise TraceError(f"{path}: no such file; run.trace.save({str(path)!r}) writes one")
        if not path.is_file():
            raise TraceError(f"{path} is neither a file nor a folder: a trace is what run.trace.save writes")
        try:
            with zipfile.ZipFile(path) as archive:
                check_unpacked(archive, path.stat().st_size)
                head = read_json(archive.read("mpkit.json").decode())
                if head["version"] > VERSION:
                    raise TraceError(
                        f"{path} was written by a later mpkit (format {head['version']}, this one reads up "
                        f"to {VERSION}): pip install --upgrade mpkit"
                    )
                if not isinstance(head["ranks"], int) or not 0 <= head["ranks"] <= MOST_RANKS:
                    wanted = f"a number up to {MOST_RANKS:,} is wanted"
                    raise TraceError(f"{path} says ranks={head['ranks']!r:.60}: {wanted}")
                ranks = [_rank_of(archive, number) for number in range(head["ranks"])]
                return cls(ranks, check_meta(head["meta"], len(ranks)))
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{path} cannot be read as a trace ({type(error).__name__}: {str(error)[:200]}). It is not a file that "
                "Trace.save wrote, or it was cut short or damaged. "
                "(A run's own folder loads as far as it is whole.)"
            ) from error

    @classmethod
    def read(cls, folder: str | Path) -> Trace:
        """Read the folder of a run, as far as it is written, and the complete records of truncated files."""
        folder = Path(folder)
        try:
            meta = check_meta(_read_json(folder / "meta.json"))
            axes = [_read_json(path) for path in sorted(folder.glob("rank*.axes"))]
            if axes:  # of a watched program: the names of its groups, by their ranks
                meta["axes"] = {group: name for each in axes for group, name in each.items()}
            if proof := _read_json(folder / PROOF):
                meta["proof"] = proof
            names = (path.name[4:-4] for path in folder.glob("rank*.ops"))
            numbers = {int(name) for name in names if re.fullmatch(r"\d{1,9}", name)}
            size = max([meta.get("world_size", 0), *(n + 1 for n in numbers)], default=0)
            if not size:
                raise TraceError("it holds no meta.json and no rank0.ops")
            if size > max(MOST_RANKS, meta.get("world_size", 0)):
                most = f"{MOST_RANKS:,} ranks is the most there are"
                raise TraceError(f"it has a file of rank {size - 1:,}, and {most}")
            check_meta(meta, size)
        except TraceError as error:
            raise TraceError(f"{folder} is not the folder of a run: {error}") from None
        return cls([read_rank(folder, number) for number in range(size)], meta)


def _read_json(path: Path) -> Any:
    """Read a JSON file; return {} if it does not exist or is truncated."""
    try:
        return read_json(path.read_text()) if path.is_file() else {}
    except (FileNotFoundError, ValueError):
        return {}


def _rank_of(archive: zipfile.ZipFile, number: int) -> RankTrace:
    head = read_json(archive.read(f"rank{number}.json").decode())
    arrays = []
    columns = {"ops": OP, "mem": MEMORY, "log": VALUE, "gpu": SAMPLE, "sent": SENT_PART}
    for part, dtype in columns.items():
        if part not in ("ops", "mem") and f"rank{number}.{part}.npy" not in archive.NameToInfo:
            arrays.append(np.empty(0, dtype))  # nothing was logged, no GPU was sampled, no parts were uneven
            continue
        with archive.open(f"rank{number}.{part}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype != dtype or array.ndim != 1:
            raise TraceError(f"rank {number}'s {part} have other columns than this version of mpkit knows")
        arrays.append(array)
    ops, memory, *others = arrays
    return RankTrace(ops, memory, [str(name) for name in head["names"]], head["state"], *others)
