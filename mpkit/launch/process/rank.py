"""A rank's half of a launch: from the fork to the user's function and back.

main       all of it, for a rank that was forked; one that a launcher started shares what follows
detach     end with the fork server, redirect output into the launch's folder, be ready to write stacks
meet       find the other ranks and form the process group
work       call the user's function
report     write what the launching process needs to explain a failure
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import linecache
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from mpkit.common.disk import create, write_whole
from mpkit.common.exceptions import message_of, one_line
from mpkit.common.launch_folder import UNREPORTED, Settings, part, write_error
from mpkit.common.tracebacks import fold_chain
from mpkit.errors import CommMismatch
from mpkit.launch.process.group import as_torchrun, join, sign_objects, store_of
from mpkit.launch.process.output import end_lines, labelled_output
from mpkit.launch.process.payload import set_logging, unpack
from mpkit.launch.process.processes import answer_requests
from mpkit.strategies.comm.call_checks import CallChecks
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.own_process import note_group
from mpkit.strategies.comm.wire import Wire
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.rank_context import Context
from mpkit.strategies.runtime.memory_picture import is_out_of_memory, picture_of
from mpkit.trace.record.recorder import Recorder


def main(rank: int, group: int, folder: str, fds: dict[str, int], parent: int) -> None:
    """Run one rank. This never returns: a rank exits with os._exit, whatever its threads do.

    Args:
        rank: this rank.
        group: its process group; 0 for the first rank, which makes one.
        folder: the launch's folder.
        fds: two pipes: "done" takes a byte when the function has returned, and "release" is closed when all have.
        parent: the process id of the fork server.
    """
    place = Path(folder)
    recorder: Recorder | None = None
    try:
        settings = detach(rank, group, place, parent)
        device = device_of(rank, settings)
        store = meet(rank, settings, place)
        recorder = Recorder(
            place, rank, device, layers=settings.layers
        )  # its files say that the rank has started
        with (place / "payload.pkl").open("rb") as file:
            result = work(rank, settings, device, recorder, file, enter=True)
        end_lines()
        write_whole(part(place, rank, "result"), result)
        recorder.close("finished")
        os.write(fds["done"], b".")
        os.read(
            fds["release"], 1
        )  # returns, empty, once all ranks are done, so that no peer's connection closes
        del store
        os._exit(0)
    except BaseException as error:  # SystemExit too: a rank that exits early leaves its peers waiting
        try:
            report(error, rank, place, recorder)
        except BaseException as worse:  # the disk is full, perhaps; the rank's output may be writable
            text = f"rank {rank} raised {type(error).__name__}, and could not report it: {type(worse).__name__}\n"
            with suppress(OSError):
                os.write(2, text.encode())
            os._exit(UNREPORTED)
        os._exit(1)


def detach(rank: int, group: int, folder: Path, parent: int) -> Settings:
    """End with the fork server, redirect output into the launch's folder, be ready to write stacks."""
    with suppress(OSError):
        os.setpgid(0, group)  # 0 for the first rank: a group of its own, which the others join
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = Settings.read(folder)

    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    std = create(part(folder, rank, "std"), os.O_WRONLY | os.O_APPEND)
    os.dup2(std, 1)
    os.dup2(std, 2)
    sys.stdout, sys.stderr = (labelled_output(folder, rank, stream) for stream in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    faulthandler.enable(file=answer_requests(folder, rank))  # where Python was when C++ code aborted

    atexit._clear()  # the fork server's; a program's own are called at its end (`mpkit.cli.watch`)
    for name, value in settings.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if settings.device == "cpu":  # a program that takes whatever GPU it sees, as FSDP2 does, finds none
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Forked ranks begin with the same states; Python seeds its own random numbers anew. Without a number, numpy takes
    # .7 ms of CPU time to make one.
    np.random.seed(int.from_bytes(os.urandom(4)))
    torch.default_generator.seed()
    if settings.device != "cpu":
        torch.seed()  # all devices' generators, which costs some milliseconds
    set_logging(settings.logging)
    sys.path[:] = settings.path
    sys.argv[:] = settings.argv
    os.chdir(settings.cwd)
    for name, text in settings.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return settings


def device_of(rank: int, settings: Settings) -> torch.device:
    """Return this rank's device; several ranks may share a GPU. On shared CPUs each rank uses one thread."""
    torch.set_num_threads(settings.threads)
    if settings.device == "cpu":
        return torch.device("cpu")
    if settings.device == "mps":
        return torch.device("mps")
    if settings.device == "hpu":
        importlib.import_module("habana_frameworks.torch")  # makes torch.hpu
    device = torch.device(settings.device, settings.numbers[rank % len(settings.numbers)])
    getattr(torch, settings.device).set_device(device)
    return device


def meet(rank: int, settings: Settings, folder: Path) -> Any:
    """Find the other ranks in the launch's folder and form the process group, over the loopback interface.

    A program that the rank runs finds itself as under torchrun: its own init_process_group joins this group.
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME keep the user's values if they are set. Collectives get a timeout of a
    day, since the launcher distinguishes a hang from slow work far sooner.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # the only way to configure gloo
        os.environ.setdefault(name, loopback)
    os.environ.update(as_torchrun(rank, settings.ranks, settings.port))
    store = store_of(folder, settings.ranks, settings.backend)
    dist.init_process_group(
        settings.backend, store=store, rank=rank, world_size=settings.ranks, timeout=timedelta(days=1)
    )
    join(rank, settings.ranks, settings.backend, store)
    sign_objects(settings.secret.encode())  # every user of the machine can connect to gloo's ports
    return store


def work(
    rank: int,
    settings: Settings,
    device: torch.device,
    recorder: Recorder,
    payload: IO[bytes],
    *,
    enter: bool,
) -> bytes:
    """Call the function on this rank, whose process group exists by now, and return its pickled result.

    Args:
        rank, settings, device, recorder: of this rank.
        payload: what `mpkit.launch.process.payload.pack` wrote.
        enter: change this process as the launching one was changed.
    """
    checks = CallChecks(recorder.folder, rank) if settings.compares else None
    comm = Communicator(Wire(rank, settings.ranks, recorder, device, settings.backend, checks))
    context = Context(rank, settings.ranks, device, comm, recorder)
    note_group(comm)
    if device.type == "cuda":
        _enter_context(device)
    function, args = unpack(payload, enter=enter)
    own = os.getpid()
    try:
        return dumps(function(context, *args))
    finally:
        if os.getpid() != own:  # a child that the function has forked and not ended: it is no rank
            error = sys.exc_info()[1]
            code = (error.code or 0) if isinstance(error, SystemExit) else int(error is not None)
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exc()
            os._exit(code if isinstance(code, int) else 1)


def _enter_context(device: torch.device) -> None:
    """Let autograd's thread for this GPU enter its context: cuBLAS warns if it has to do that itself."""
    x = torch.ones((), device=device, requires_grad=True)
    (x * x).backward()


def report(error: BaseException, rank: int, folder: Path, recorder: Recorder | None) -> None:
    """Write what the parent needs to report the failure and where it happened."""
    now, message = time.monotonic_ns(), message_of(error)
    details = describe(error) | {
        "time": now,
        # A peer's death closes connections: such an error is usually an effect, seldom the cause.
        "secondary": isinstance(error, dist.DistError)
        or "Connection closed by peer" in message
        or "Connection reset by peer" in message,
        "other": error.other if isinstance(error, CommMismatch) else None,
    }
    if recorder is not None:
        current = recorder.current
        details |= {"step": current.step, "stage": current.stage, "microbatch": current.microbatch}
        if is_out_of_memory(error):
            details["memory"] = picture_of(recorder)
    try:
        end_lines()
    except Exception as unwritten:  # they may be the user's own; the error that ended the rank has priority
        details["message"] += f"\n(Its last output is lost: {one_line(unwritten)})"
    write_error(folder, rank, details)
    if recorder is not None:
        recorder.close("failed")


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception's type, message and traceback; and the traceback "folded", without frames of libraries."""
    whole = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
    fold_chain(error)
    folded = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": message_of(error), "traceback": whole, "folded": folded}


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of this file, which are the same for every error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next
    return trace
