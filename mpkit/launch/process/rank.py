"""A rank's process, from the fork to the user's function and back; and the process group of a launch's ranks.

main       all of it, for a rank that was forked; one that a launcher started shares what follows
detach     end with the fork server, redirect output into the launch's folder, be ready to write stacks
meet       find the other ranks and form the process group
work       call the user's function
report     write what the launching process needs to explain a failure

The group: where ranks find each other, whom they trust, and how a program joins.

store_of        a file in the launch's folder, which no other user can read or write
sign_objects    signatures on the objects that ranks send each other over gloo's ports
as_torchrun     the variables by which a program under torchrun knows its rank
join            `init_process_group` in the program joins the group that this rank is in already
"""

import atexit
import ctypes
import faulthandler
import hashlib
import hmac
import importlib
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from mpkit.common.disk import create, write_whole
from mpkit.common.exceptions import message_of, one_line
from mpkit.common.launch_folder import OWN, UNREPORTED, Settings, part, write_error
from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _world
from mpkit.common.tracebacks import fold_chain
from mpkit.errors import CommMismatch, MpkitError
from mpkit.launch.process.output import end_lines, labelled_output
from mpkit.launch.process.payload import set_logging, unpack
from mpkit.launch.process.processes import answer_requests
from mpkit.strategies.comm.call_checks import CallChecks
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.own_process import note_group
from mpkit.strategies.comm.release import keep
from mpkit.strategies.comm.wire import Wire
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.rank_context import Context
from mpkit.strategies.runtime.memory_picture import is_out_of_memory, picture_of
from mpkit.trace.record.recorder import Recorder

FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.01  # seconds between two polls for a key of the store


def main(rank: int, group: int, folder: str, fds: dict[str, int], parent: int) -> None:
    """Run one rank. This never returns: a rank exits with os._exit, whatever its threads do.

    The first rank makes the process group (`group` is 0). Of the pipes, "done" takes a byte when the function has
    returned, and "release" is closed when all have. `parent` is the fork server's process id.
    """
    place = Path(folder)
    recorder: Recorder | None = None
    try:
        settings = detach(rank, group, place, parent)
        device = device_of(rank, settings)
        store = meet(rank, settings, place)
        recorder = Recorder(place, rank, device, layers=settings.layers)  # says that the rank has started
        with (place / "payload.pkl").open("rb") as file:
            result = work(rank, settings, device, recorder, file, enter=True)
        end_lines()
        write_whole(part(place, rank, "result"), result)
        recorder.close("finished")
        os.write(fds["done"], b".")
        # Returns, empty, once all ranks are done, so that no peer's connection closes.
        os.read(fds["release"], 1)
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
    for name in settings.environment:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in settings.environment.items() if value is not None})
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
    if settings.device in ("cpu", "mps"):
        return torch.device(settings.device)
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

    `payload` has what `pack` wrote; `enter`: change this process as the launching one was changed.
    """
    checks = CallChecks(recorder.folder, rank) if settings.compares else None
    comm = Communicator(Wire(rank, settings.ranks, recorder, device, settings.backend, checks))
    context = Context(rank, settings.ranks, device, comm, recorder)
    note_group(comm)
    if device.type == "cuda":  # let autograd's thread enter the context, else cuBLAS warns
        x = torch.ones((), device=device, requires_grad=True)
        (x * x).backward()
        del x  # the function finds the GPU's memory empty
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


def report(error: BaseException, rank: int, folder: Path, recorder: Recorder | None) -> None:
    """Write what the parent needs to report the failure and where it happened."""
    now, message = time.monotonic_ns(), message_of(error)
    # A peer's death closes connections: such an error is usually an effect, seldom the cause.
    closed = any(f"Connection {how} by peer" in message for how in ("closed", "reset"))
    details = describe(error) | {
        "time": now, "secondary": isinstance(error, dist.DistError) or closed,
        "other": error.other if isinstance(error, CommMismatch) else None,
    }  # fmt: skip
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
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next  # the frames of this file are the same for every error
    whole = "".join(traceback.format_exception(type(error), error, trace))
    fold_chain(error)
    folded = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": message_of(error), "traceback": whole, "folded": folded}


def store_of(folder: Path, ranks: int, backend: str) -> Any:
    """Open the store of a run; nccl's threads query it without Python's lock and so need torch's own."""
    store = FileStore(str(folder / "store"), ranks)
    return store if backend == "nccl" else _RunStore(store)


class _RunStore(Store):
    """A `FileStore` that polls for a missing key often at first; torch's own polls every 10 ms, at each rank's start.

    It waits without limit: the launcher reports hangs.
    """

    def __init__(self, file: FileStore) -> None:
        super().__init__()
        self._file = file

    def set(self, key: str, value: str) -> None:
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._file.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._file.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._file.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        return int(self._file.num_keys())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pause = FIRST_PAUSE
        while not self._file.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def sign_objects(secret: bytes) -> None:
    """Let torch.distributed sign the objects that it pickles (HMAC-SHA256), and check those that it unpickles.

    Every user of the machine can connect to gloo's ports, and nothing is unpickled that no rank of this launch wrote.
    """
    size = hashlib.sha256().digest_size

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(hmac.digest(secret, content, "sha256") + content)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            signed = self._file.read()
            if not hmac.compare_digest(signed[:size], hmac.digest(secret, signed[size:], "sha256")):
                raise MpkitError(
                    "an object of torch.distributed: no process of this launch wrote this. Somebody else reaches the "
                    "ranks' connections (docs/security.md)"
                )
            return pickle.loads(signed[size:])

    replaced = Replacements()  # for as long as the rank lives
    replaced.put(c10d, "_pickler", Pickler)
    replaced.put(c10d, "_unpickler", Unpickler)


def as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for this rank of a run on one machine.

    `port` is free: nothing listens there unless the program opens a store of its own.
    """
    return {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "ROLE_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "ROLE_WORLD_SIZE": f"{ranks}",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "NODE_RANK": "0", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": f"{OWN}{os.getppid()}", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def join(rank: int, ranks: int, backend: str, store: Any) -> Replacements:
    """Let `init_process_group` join the group that exists, or make it anew once the program has destroyed it.

    A destroyed group is kept, so that no DistributedDataParallel holds it last (`mpkit.strategies.comm.release`). The
    returned replacements are restored if the process outlives the rank.
    """
    make, destroy = dist.init_process_group, dist.destroy_process_group
    times = 0

    def init_process_group(backend_asked: str | None = None, *args: Any, **kwargs: Any) -> None:
        nonlocal times
        asked = kwargs.pop("backend", backend_asked)
        if asked == "fake":  # ranks that are played on tensors without content: `mpkit.prediction.dry_run`
            return make(asked, *args, **kwargs)
        _check_group(asked, kwargs.get("rank", -1), kwargs.get("world_size", -1), rank, ranks, backend)
        if not dist.is_initialized():
            times += 1
            said = {name: kwargs[name] for name in ("timeout", "pg_options", "device_id") if name in kwargs}
            make(backend, store=PrefixStore(f"again{times}", store), rank=rank, world_size=ranks, **said)

    def destroy_process_group(group: Any = None) -> None:
        keep(_world.pg_map if group in (None, dist.group.WORLD) else [group])
        destroy(group)

    init_process_group.__doc__, destroy_process_group.__doc__ = make.__doc__, destroy.__doc__
    replaced = Replacements()
    for module in (dist, c10d):
        replaced.put(module, "init_process_group", init_process_group)
        replaced.put(module, "destroy_process_group", destroy_process_group)
    return replaced


def _check_group(asked: str | None, as_rank: int, of: int, rank: int, ranks: int, backend: str) -> None:
    """Reject a backend, rank or world size that a program asks for and this run does not have."""
    if asked is not None and backend not in str(asked).lower():
        here = "are CPU processes, or share GPUs" if backend == "gloo" else "have a GPU each"
        raise ValueError(
            f'init_process_group(backend="{asked}"): the ranks of this run {here}, and {backend} joins them; leave the '
            f'backend out, or write init_process_group("{backend}")'
        )
    if as_rank not in (-1, rank) or of not in (-1, ranks):
        raise ValueError(
            f"init_process_group(rank={as_rank}, world_size={of}): this is rank {rank} of {ranks}; leave both out, or "
            'write rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])'
        )
