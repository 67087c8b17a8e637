"""This process's own rank: the code that forked ranks run, in the process that the launcher started.

meet      form the process group through the store, unless the user has made it
call      call the function, with what a forked rank's context has
share     give every process all results, through a file without a name, which is gone when the process is
leave     free the process group and whatever the rank changed in this process
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.common.launch_folder import Settings
from mpkit.common.torch_private import _world
from mpkit.launch.external.environment import LauncherPlace
from mpkit.launch.external.signed_store import SignedStore
from mpkit.launch.process.launcher_environment import join
from mpkit.launch.process.payload import unpack
from mpkit.launch.process.program_exit import own_process, refuse_exec
from mpkit.launch.process.rank import context_of, device_of, report
from mpkit.launch.process.seal import Seal, sign_objects
from mpkit.strategies.comm.own_process import forget_group
from mpkit.strategies.comm.release import free_kept
from mpkit.strategies.packing.packing import dumps
from mpkit.trace.record.recorder import Recorder

__all__ = ["Results", "note_termination", "run_rank"]


class Results:
    """The results of all ranks, in each process.

    Args:
        seal: says whether whoever sent them is known.
    """

    def __init__(self, seal: Seal) -> None:
        self._seal, self._file = seal, tempfile.TemporaryFile(prefix="mpkit-results-")  # noqa: SIM115
        self._ends: list[int] = [0]

    def append(self, packed: bytes) -> None:
        """Write the next rank's result.

        Raises:
            OSError: the disk is full.
        """
        self._file.seek(self._ends[-1])
        self._file.write(packed)
        self._file.flush()
        self._ends.append(self._ends[-1] + len(packed))

    def read(self, rank: int, load: Callable[[IO[bytes]], Any] | None = None) -> Any:
        """Return the result of a rank, read by `load` or else as far as its sender is known."""
        start, end = self._ends[rank : rank + 2]
        self._file.seek(start)
        packed = self._file.read(end - start)
        return self._seal.loads(packed) if load is None else load(io.BytesIO(packed))

    def close(self) -> None:
        """Free the space."""
        self._file.close()


def run_rank(
    place: LauncherPlace,
    settings: Settings,
    folder: Path,
    store: SignedStore,
    payload: bytes,
    results: Results,
) -> None:
    """Run this process's rank, and write what every rank returned into `results`.

    Raises:
        BaseException: whatever the function raised; it has been reported into the folder.
    """
    recorder: Recorder | None = None
    with _unchanged_process():
        no_exec = refuse_exec()
        try:
            device = device_of(place.local_rank, settings)
            recorder = Recorder(folder, place.rank, device, layers=settings.layers)
            with _group(place, settings, store):
                context = context_of(place.rank, settings, device, recorder, settings.compares)
                function, args = unpack(io.BytesIO(payload), enter=False)
                with own_process():
                    returned = function(context, *args)
                result = store.seal.dumps(returned, dumps)
                recorder.close("finished")
                _share(place, settings, results, store, result)
        except BaseException as error:
            with suppress(OSError):  # the disk may be full; the error goes on here anyway
                report(error, place.rank, folder, recorder)
            raise
        finally:
            no_exec.restore()


@contextmanager
def _group(place: LauncherPlace, settings: Settings, store: SignedStore) -> Iterator[None]:
    """Form the process group; afterwards free it and the groups of the mesh. After an error, everything stays."""
    own, hook = not dist.is_initialized(), sys.excepthook  # each init_process_group wraps the hook once more
    if own:
        _form(place, settings, store.for_group("group", settings.backend))
    before = set(_world.pg_map)
    again = store.for_group("program", settings.backend)
    joined = join(place.rank, place.world_size, settings.backend, again)
    signed = sign_objects(store.seal)
    try:
        yield
    finally:
        signed.restore()
        joined.restore()
        if dist.is_initialized():
            forget_group()
    free_kept()
    if own:
        dist.destroy_process_group()  # and all groups within it
        sys.excepthook = hook
        return
    for group in [each for each in _world.pg_map if each not in before]:
        dist.destroy_process_group(group)


def _form(place: LauncherPlace, settings: Settings, store: Store) -> None:
    dist.init_process_group(
        settings.backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(days=1),  # a hang is reported far sooner
    )


def _share(
    place: LauncherPlace, settings: Settings, results: Results, store: SignedStore, result: bytes
) -> None:
    """Write every rank's result."""
    if not dist.is_initialized():  # a program frees its groups at its end
        _form(place, settings, store.for_group("share", settings.backend))
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, result)
    for each in everyone:
        results.append(each)


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restore afterwards what a rank changes in its process: random numbers and threads."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        with suppress(OSError, ValueError):
            sys.stdout.flush()


@contextmanager
def note_termination(wake: int) -> Iterator[None]:
    """Let a launcher's SIGTERM be a byte in a pipe, even while this process is stuck in C code.

    A launcher ends the other processes of a node as soon as one has died. So this process survives for the seconds
    that it takes to learn, and to say, which rank died and where.

    Args:
        wake: the pipe's end for writing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ignore_signal(number: int, frame: Any) -> None:
        """Do nothing: the pipe has told the monitor."""

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, ignore_signal)
    pipe = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe)
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def ended_by_launcher() -> None:
    """End as a process does that the launcher's SIGTERM ends."""
    sys.stdout.flush()
    os._exit(128 + signal.SIGTERM)
