"""Turn what failed ranks left behind into an instructive error.

When one rank fails, others may fail too, because their connections to it close. The first cause is sought in this
order: the earliest exception that is not a mere consequence; a signal; a rank that exited by itself; any exception.

A rank that ran out of memory reports what it held (`mpkit.strategies.runtime.memory_picture`): the error shows that by
category, with a change of the plan that would help.
"""

import errno
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpkit.common.disk import full_disk
from mpkit.common.launch_folder import UNREPORTED, part, read_difference, read_error
from mpkit.common.tracebacks import fold_stack, in_cells, internals_shown
from mpkit.common.units import memory_text
from mpkit.errors import CommMismatch, NotSerial, RankFailed
from mpkit.launch.hang.waits import first_mismatch, place_of_op
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.trace import CATEGORIES, Kind, RankTrace, Trace


def failure(folder: Path, statuses: dict[int, int], trace: Trace) -> RankFailed | NotSerial | None:
    """Return the error of a launch whose ranks have all exited, or None if all of them finished.

    `statuses` are by rank, in the order in which the ranks ended; a negative status is a signal.
    """
    finished = all(rank.state == "finished" for rank in trace.ranks)
    if finished and statuses and not any(statuses.values()):
        return None
    if (difference := read_difference(folder)) is not None:
        return difference
    errors = {rank: error for rank in statuses if (error := read_error(folder, rank)) is not None}
    if causes := {rank: error for rank, error in errors.items() if not error["secondary"]}:
        return _raised_error(causes, trace)
    if (unfit := first_mismatch(trace)) is not None:  # it may cause closed connections and aborts in C++ code
        return unfit
    # The fork server kills the others with SIGKILL once one rank has ended, so the first to end is the cause.
    for rank, status in statuses.items():
        if rank not in errors:
            if status < 0:
                return _killed_error(rank, -status, trace, crash_stack(part(folder, rank, "stack")))
            if status == UNREPORTED:
                full = full_disk(OSError(errno.ENOSPC, ""), folder).strerror
                who = f"rank {rank} of {trace.world_size}"
                return RankFailed(f"{who} failed, and its error could not be written: {full}?", rank=rank)
            if trace.ranks[rank].state != "finished":
                return _ended_error(rank, status, trace)
    if errors:
        return _raised_error(errors, trace)
    return RankFailed("the ranks ended before they had finished, without a word")


def _raised_error(errors: dict[int, dict[str, Any]], trace: Trace) -> RankFailed:
    """Return the earliest of the errors, which are by rank."""
    rank, error = min(errors.items(), key=lambda each: each[1]["time"])
    place: dict[str, Any] = {key: error.get(key) for key in ("step", "stage", "microbatch")}
    if error.get("other") is not None:
        return CommMismatch(
            in_cells(error["message"]), rank=rank, other=error["other"], traceback=error["traceback"], **place
        )
    picture = error.get("memory")
    memory = "" if picture is None else f"\n\n{out_of_memory_text(rank, picture, trace)}"
    hosts = trace.meta.get("hosts", [])  # under a launcher
    who = f"rank {rank} of {trace.world_size}{f' on {hosts[rank]}' if rank < len(hosts) else ''}"
    return RankFailed(
        f"{who} failed{_place(place)}: {error['type']}: {error['message']}\n\n"
        f"rank {rank}'s own traceback:\n{error['traceback' if internals_shown() else 'folded'].rstrip()}{memory}",
        rank=rank, **place, traceback=error["traceback"], memory=None if picture is None else picture["held"],
    )  # fmt: skip


def crash_stack(path: Path) -> str:
    """Return the main thread's stack that faulthandler wrote at a crash, without inner frames; "" if there is none."""
    try:
        crash = path.read_text(errors="replace").rpartition("Fatal Python error")[2]
    except FileNotFoundError:
        return ""
    main = crash.rpartition("(most recent call first):\n")[2].partition("\n\n")[0]
    return fold_stack(main) if main else ""


def _killed_error(rank: int, number: int, trace: Trace, stack: str) -> RankFailed:
    named = number in set(signal.Signals)  # a real-time signal has no name
    name = signal.Signals(number).name if named else f"signal {number}"
    place, last = _last_seen(trace.ranks[rank])
    why = {
        "SIGKILL": "Out of memory, or somebody killed it: `dmesg` tells; smaller micro-batches, more stages or "
        "recompute='full' need less memory.",
        "SIGBUS": "A mapped file that could not be written to: is the disk of the run's folder full?",
        "SIGSEGV": "A crash in C++ code.",
        "SIGABRT": "C++ code gave up; what it printed is in the output above.",
    }.get(name, "")
    if stack:
        why = f"{why}\n\nrank {rank} was here:\n{stack}".strip()
    return RankFailed(
        f"rank {rank} of {trace.world_size} was killed by {name}{_place(place)}. {last}. {why}".rstrip(),
        rank=rank, **place, traceback=stack, signal=name,
    )  # fmt: skip


def _ended_error(rank: int, status: int, trace: Trace) -> RankFailed:
    place, last = _last_seen(trace.ranks[rank])
    return RankFailed(
        f"rank {rank} of {trace.world_size} left with exit code {status} before it had finished{_place(place)}. "
        f"{last}. Something called os._exit, or exec, whose program took the rank's place: a function on a rank ends "
        "by returning, and subprocess.run([...]) starts a program beside it.",
        rank=rank, **place,
    )  # fmt: skip


def _last_seen(rank: RankTrace) -> tuple[dict[str, Any], str]:
    if not len(rank.ops):
        return {"step": None, "stage": None, "microbatch": None}, "It had recorded nothing yet"
    last = rank.ops[-1]
    where = rank.name(int(last["where"]))
    words = Kind(int(last["kind"])).word.replace("_", " ")
    return place_of_op(last), f"Its last recorded op: {words}" + (f" at {where}" if where else "")


def _place(place: Mapping[str, Any]) -> str:
    known = [f"{key} {value}" for key, value in place.items() if value is not None]
    return f" in {', '.join(known).replace('microbatch', 'micro-batch')}" if known else ""


BAR = 24
HOW_MUCH = "mk.fits(model, plan, ...) says how much a rank then needs, and what else would help."


def out_of_memory_text(rank: int, picture: Mapping[str, Mapping[str, int]], trace: Trace) -> str:
    """Return the picture (what `picture_of` returned on that rank) and the advice, for the plan in the trace's meta if
    any.
    """
    held = picture["held"]
    total = sum(held.values())
    lines = [f"What rank {rank} held then, by category (the recorder's ledger):"]
    for name, nbytes in [*((category, held.get(category, 0)) for category in CATEGORIES), ("in all", total)]:
        bar = "█" * round(BAR * nbytes / total) if total else ""
        lines.append(f"  {name:<12}{memory_text(nbytes, total):>9}  {bar}".rstrip())
    lines += _allocator(picture.get("device") or {}, total)
    help_without = "fewer samples at once, sharded states, recomputed activations; `mpkit doctor oom`."
    plan = trace.meta.get("plan")
    lines.append(_advice(Plan.from_json(plan), held) if plan else f"What would help: {help_without}")
    return "\n".join(lines)


def _allocator(device: Mapping[str, int], held: int) -> list[str]:
    if not device:
        return []
    others = device["total"] - device["free"] - device["reserved"]
    kept = device["reserved"] - device["allocated"]
    use = " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes use of what is kept." * (kept > held / 4)
    return [
        f"The GPU has {memory_text(device['total'])}: torch allocated {memory_text(device['allocated'])} "
        f"({memory_text(max(0, device['allocated'] - held))} of it in no category: workspaces, temporaries), keeps "
        f"{memory_text(kept)} unused, and {memory_text(others)} are CUDA's own and other programs'.{use}"
    ]


def _advice(plan: Plan, held: Mapping[str, int]) -> str:
    """Return the first change that the plan accepts, of those that save what the rank held most of."""
    activations = held.get("activations", 0)
    changes: tuple[dict[str, Any], ...]
    if activations > sum(held.values()) - activations:
        what, changes = "Activations take", ({"recompute": "full"}, {"microbatches": 2 * plan.microbatches})
    else:
        what = "Parameters, gradients and optimizer states take"
        sharded = {"zero": min(plan.zero + 1, 3), "data_parallel": "ddp"} if plan.shards > 1 else {}
        changes = {"dp": 2, "zero": 3} if plan.ranks == 1 else sharded, {"offload": "optimizer"}
    for fields in changes:
        with suppress(ValueError):  # a Plan that rejects the combination
            changed = change_plan(plan, **fields)
            if changed != plan:
                return f"{what} most of it. What would help: mk.{changed}. {HOW_MUCH}"
    return f"{what} most of it: more ranks, or a smaller model or batch. {HOW_MUCH}"
