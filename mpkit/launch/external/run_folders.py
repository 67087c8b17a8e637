"""The folders of a launch on several nodes: one per node, into which its ranks write; that of rank 0 gets the rest.

A rank that cannot see its node's folder (a container of its own, say) writes into one of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.launch.external.clock_offset import Offset, answer_pings, measure_offset
from mpkit.launch.external.rendezvous import wait_for
from mpkit.launch.external.session import Session
from mpkit.launch.process.folder import reserve

__all__ = ["Folders", "open_folders"]


@dataclass(frozen=True)
class Folders:
    """Where the ranks of a launch write, as one of them sees it.

    Attributes:
        folder: where this rank writes.
        made: whether this process made that folder, and removes it.
        local: the ranks that write into this folder, if this process made it.
        remote: the ranks that do not write into rank 0's folder.
        leaders: the first rank of each node but rank 0's.
        offsets: on rank 0, what to add to the times of remote ranks.
        first: rank 0's folder, in which all traces come together, on rank 0's node.
        kept: set once the folder is to outlive the launch, because rank 0 can no longer be asked for the trace.
    """

    folder: Path
    made: bool
    local: tuple[int, ...]
    remote: frozenset[int]
    leaders: tuple[int, ...]
    offsets: dict[int, Offset]
    first: Path
    kept: threading.Event = field(default_factory=threading.Event)

    def keep(self) -> None:
        """Let the folder outlive the launch."""
        self.kept.set()

    def remove(self) -> None:
        """Remove the folder, if this process made it and nobody wants it kept."""
        if self.made and not self.kept.is_set():
            shutil.rmtree(self.folder, ignore_errors=True)


def open_folders(session: Session, store: Store) -> Folders:
    """Agree on folders, and measure the clocks of the nodes; every process calls this at the same time."""
    rank, ranks = session.rank, session.ranks
    mine: Path | None = None
    if session.leads:
        mine = _new(ranks)
        store.set(f"folder{session.place.node}", str(mine))
    told = wait_for(store, [f"folder{session.place.node}"], ["the first rank of this node"])[0].decode()
    folder = Path(told) if Path(told).is_dir() else None
    made = mine is not None or folder is None
    folder = folder or _new(ranks)
    store.set(f"where{rank}", json.dumps([session.place.node, str(folder)]))
    places = [json.loads(text) for text in session.wait(store, "where")]
    remote = frozenset(r for r in range(ranks) if places[r] != places[0])
    leaders = tuple(sorted({session.nodes.index(node) for node in session.nodes} - {0}))
    offsets = measure(session, store, leaders, "start")
    by_rank = {r: offsets.get(session.nodes.index(session.nodes[r]), Offset()) for r in sorted(remote)}
    local = tuple(r for r in range(ranks) if places[r] == places[rank]) if made else ()
    return Folders(folder, made, local, remote, leaders, by_rank if rank == 0 else {}, Path(places[0][1]))


def measure(session: Session, store: Store, leaders: tuple[int, ...], round: str) -> dict[int, Offset]:
    """Measure the offset of each node's clock, on its first rank; rank 0 gets them all. Every process calls this."""
    if session.rank == 0:
        return answer_pings(store, leaders, round)
    if session.rank in leaders:
        return {session.rank: measure_offset(store, session.rank, round)}
    return {}


def clocks_in_words(
    session: Session, offsets: dict[int, Offset], drifts: dict[int, int]
) -> list[dict[str, Any]]:
    """Return, for the trace's meta, how each other node's clock was put on rank 0's: all in seconds."""
    first = {session.nodes[rank]: rank for rank in sorted(offsets, reverse=True)}
    return [
        {
            "node": node,
            "host": session.hosts[rank],
            "offset": offsets[rank].ns / 1e9,
            "residual": offsets[rank].residual / 1e9,
            "drift": drifts.get(rank, 0) / 1e9,
        }
        for node, rank in first.items()
        if node != session.nodes[0]
    ]


def _new(ranks: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mpkit-run-"))
    reserve(folder, ranks)
    return folder
