"""The folders of a launch on several nodes: one per node, into which its ranks write; that of rank 0 gets the rest.

No process takes a path from another. The first rank of a node makes its folder under a name that only this launch's
processes can work out (`Seal.name`). Another rank of the node writes there if it finds that folder, private to this
user, and otherwise (in a container of its own, or where the launch has no secret) into one of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.common.launch_folder import reserve
from mpkit.common.private import create, is_private, make_private
from mpkit.launch.external.clock_offset import Offset, answer_pings, measure_offset
from mpkit.launch.external.rendezvous import wait_for
from mpkit.launch.external.session import Session
from mpkit.launch.external.signed_store import SignedStore
from mpkit.launch.external.sweeper import KEPT, Sweeper, hold

__all__ = ["Folders", "open_folders"]

PREFIX = "mpkit-run-"


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
        first: rank 0's folder in words, in which all traces come together, on rank 0's node.
        held: a descriptor of the folder, which keeps it from being swept.
        sweeper: removes the folder if this process is killed; None if others do not sweep it, or are to read it.
        kept: set once the folder is to outlive the launch, because rank 0 can no longer be asked for the trace.
    """

    folder: Path
    made: bool
    local: tuple[int, ...]
    remote: frozenset[int]
    leaders: tuple[int, ...]
    offsets: dict[int, Offset]
    first: str
    held: int
    sweeper: Sweeper | None
    kept: threading.Event = field(default_factory=threading.Event)

    def keep(self) -> None:
        """Let the folder outlive the launch."""
        self.kept.set()
        with suppress(OSError):  # another rank of the node was first, or the disk is full
            os.close(create(self.folder / KEPT))

    def remove(self) -> None:
        """Remove the folder, if this process made it and nobody wants it kept."""
        if self.made and not self.kept.is_set():
            shutil.rmtree(self.folder, ignore_errors=True)  # which follows no links
        if self.sweeper is not None:
            self.sweeper.dismiss()
        os.close(self.held)


def open_folders(session: Session, store: SignedStore) -> Folders:
    """Agree on folders, and measure the clocks of the nodes; every process calls this at the same time."""
    rank, ranks, node = session.rank, session.ranks, session.place.node
    folder, made = _folder_of_node(session, store)
    # Where others write is told in words: it says who shares a folder, and nobody opens it.
    store.set(f"where{rank}", json.dumps([node, rank if made and not session.leads else -1, str(folder)]))
    told = [json.loads(text) for text in session.wait(store, "where")]
    places = [each[:2] for each in told]
    remote = frozenset(r for r in range(ranks) if places[r] != places[0])
    leaders = tuple(sorted({session.nodes.index(node) for node in session.nodes} - {0}))
    offsets = measure(session, store, leaders, "start")
    by_rank = {r: offsets.get(session.nodes.index(session.nodes[r]), Offset()) for r in sorted(remote)}
    local = tuple(r for r in range(ranks) if places[r] == places[rank]) if made else ()
    first = str(told[0][2]) if store.seal else f"{PREFIX}... in the temporary folder"
    # What came together on rank 0 is to be read from other nodes, should rank 0 be killed.
    sweeper = Sweeper(str(folder)) if made and not (rank == 0 and leaders) else None
    return Folders(
        folder, made, local, remote, leaders, by_rank if rank == 0 else {}, first, hold(str(folder)), sweeper
    )


def _folder_of_node(session: Session, store: SignedStore) -> tuple[Path, bool]:
    """Return the folder that this rank writes into, and whether this process made it."""
    node = session.place.node
    name = store.secret_name(f"folder of {node}")
    shared = Path(tempfile.gettempdir(), f"{PREFIX}{name}") if name else None
    if session.leads:
        folder = _new(shared, session.ranks)
        store.set(f"folder{node}", "")
        return folder, True
    wait_for(store, [f"folder{node}"], ["the first rank of this node"])
    if shared is not None and is_private(shared):
        return shared, False
    return _new(None, session.ranks), True


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


def _new(folder: Path | None, ranks: int) -> Path:
    made = Path(tempfile.mkdtemp(prefix=PREFIX)) if folder is None else make_private(folder)
    reserve(made, ranks)
    return made
