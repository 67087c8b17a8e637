"""Turn what failed ranks left behind into an instructive error.

When one rank fails, others may fail too, because their connections to it close. The first cause is sought in this
order: the earliest exception that is not a mere consequence; a signal; a rank that exited by itself; any exception.

A rank that ran out of memory reports what it held (`mpkit.strategies.runtime.memory_picture`): the error has it by
category, with a change of the plan that would help.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from mpkit.common.disk import full_disk
from mpkit.common.launch_folder import UNREPORTED, part, read_difference, read_error
from mpkit.common.tracebacks import fold_stack, in_cells, internals_shown
from mpkit.common.units import memory_text
from mpkit.errors import CommMismatch, NotSerial, RankFailed
from mpkit.launch.hang.waits import first_mismatch
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.trace import CATEGORIES, Kind, RankTrace, Trace


class FailurePlace(TypedDict):
    """Where a rank was; None where that is not known."""

    step: int | None
    stage: int | None
    microbatch: int | None


def failure(folder: Path, statuses: dict[int, int], trace: Trace) -> RankFailed | NotSerial | None:
    """Return the error of a launch whose ranks have all exited, or None if all of them finished.

    Args:
        folder: the launch's folder.
        statuses: exit statuses by rank, in the order in which the ranks ended; a negative status is a signal.
        trace: the trace that the ranks recorded.
    """
    if statuses and all(status == 0 for status in statuses.values()) and _all_finished(trace):
        return None
    difference = read_difference(folder)
    if difference is not None:
        return difference
    errors = {rank: error for rank in statuses if (error := read_error(folder, rank)) is not None}
    causes = {rank: error for rank, error in errors.items() if not error["secondary"]}
    if causes:
        return _raised_error(min(causes, key=lambda rank: causes[rank]["time"]), causes, trace)
    unfit = first_mismatch(trace)
    if unfit is not None:  # it may cause closed connections and aborts in C++ code
        return unfit
    # The fork server kills the others with SIGKILL once one rank has ended, so the first to end is the cause.
    for rank, status in statuses.items():
        if rank not in errors:
            if status < 0:
                stack = crash_stack(part(folder, rank, "stack"))
                return _killed_error(rank, -status, trace, stack)
            if status == UNREPORTED:
                return RankFailed(
                    f"rank {rank} of {trace.world_size} failed, and its error could not be written: "
                    f"{full_disk(OSError(errno.ENOSPC, ''), folder).strerror}?",
                    rank=rank,
                )
            if trace.ranks[rank].state != "finished":
                return _ended_error(rank, status, trace)
    if errors:
        return _raised_error(min(errors, key=lambda rank: errors[rank]["time"]), errors, trace)
    return RankFailed("the ranks ended before they had finished, without a word")


def _all_finished(trace: Trace) -> bool:
    return all(rank.state == "finished" for rank in trace.ranks)


def _raised_error(rank: int, errors: dict[int, dict[str, Any]], trace: Trace) -> RankFailed:
    error = errors[rank]
    place = FailurePlace(step=error.get("step"), stage=error.get("stage"), microbatch=error.get("microbatch"))
    if error.get("other") is not None:
        return CommMismatch(
            in_cells(error["message"]), rank=rank, other=error["other"], traceback=error["traceback"], **place
        )
    picture = error.get("memory")
    memory = "" if picture is None else f"\n\n{out_of_memory_text(rank, picture, trace)}"
    who = f"rank {rank} of {trace.world_size}{_host_suffix(rank, trace)}"
    return RankFailed(
        f"{who} failed{_place(place)}: {error['type']}: {error['message']}\n\n"
        f"rank {rank}'s own traceback:\n{error['traceback' if internals_shown() else 'folded'].rstrip()}{memory}",
        rank=rank,
        **place,
        traceback=error["traceback"],
        memory=None if picture is None else picture["held"],
    )


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
        rank=rank,
        **place,
        traceback=stack,
        signal=name,
    )


def _ended_error(rank: int, status: int, trace: Trace) -> RankFailed:
    place, last = _last_seen(trace.ranks[rank])
    return RankFailed(
        f"rank {rank} of {trace.world_size} left with exit code {status} before it had finished{_place(place)}. "
        f"{last}. Something called os._exit, or exec, whose program took the rank's place: a function on a rank ends "
        "by returning, and subprocess.run([...]) starts a program beside it.",
        rank=rank,
        **place,
    )


def _last_seen(rank: RankTrace) -> tuple[FailurePlace, str]:
    """Return the step, stage and micro-batch of a rank's newest op, and that op in words."""
    if not len(rank.ops):
        return FailurePlace(step=None, stage=None, microbatch=None), "It had recorded nothing yet"
    last = rank.ops[-1]
    step, stage, m = (int(last[key]) if last[key] >= 0 else None for key in ("step", "stage", "microbatch"))
    where = rank.name(int(last["where"]))
    words = Kind(int(last["kind"])).word.replace("_", " ")
    return (
        FailurePlace(step=step, stage=stage, microbatch=m),
        f"Its last recorded op: {words}" + (f" at {where}" if where else ""),
    )


def _host_suffix(rank: int, trace: Trace) -> str:
    """Return " on HOST" for a run on several nodes, "" otherwise."""
    hosts = trace.meta.get("hosts", [])
    return f" on {hosts[rank]}" if rank < len(hosts) else ""


def _place(place: FailurePlace) -> str:
    words = {"step": place["step"], "stage": place["stage"], "micro-batch": place["microbatch"]}
    known = [f"{word} {value}" for word, value in words.items() if value is not None]
    return " in " + ", ".join(known) if known else ""


# ---- out of memory ------------------------------------------------------------------------------------------------

BAR = 24


def out_of_memory_text(rank: int, picture: Mapping[str, Mapping[str, int]], trace: Trace) -> str:
    """Return the picture and the advice as text.

    Args:
        rank: the rank that ran out of memory.
        picture: what `picture_of` returned there.
        trace: the trace, whose meta has the plan if there was one.
    """
    held = picture["held"]
    lines = [f"What rank {rank} held then, by category (the recorder's ledger):", *_bars(held)]
    lines += _allocator(picture.get("device") or {}, sum(held.values()))
    if "plan" not in trace.meta:
        lines.append(
            "What would help: fewer samples at once, sharded states, recomputed activations; `mpkit doctor oom`."
        )
    else:
        lines.append(_advice(Plan.from_json(trace.meta["plan"]), held))
    return "\n".join(lines)


def _bars(held: Mapping[str, int]) -> list[str]:
    total = sum(held.values())
    rows = [*((category, held.get(category, 0)) for category in CATEGORIES), ("in all", total)]
    return [
        f"  {name:<12}{memory_text(nbytes, total):>9}  {'█' * round(BAR * nbytes / total) if total else ''}".rstrip()
        for name, nbytes in rows
    ]


def _allocator(device: Mapping[str, int], held: int) -> list[str]:
    if not device:
        return []
    others = device["total"] - device["free"] - device["reserved"]
    kept = device["reserved"] - device["allocated"]
    return [
        f"The GPU has {memory_text(device['total'])}: torch allocated {memory_text(device['allocated'])} "
        f"({memory_text(max(0, device['allocated'] - held))} of it in no category: workspaces, temporaries), keeps "
        f"{memory_text(kept)} unused, and {memory_text(others)} are CUDA's own and other programs'."
        + (
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes use of what is kept."
            if kept > held / 4
            else ""
        )
    ]


def _advice(plan: Plan, held: Mapping[str, int]) -> str:
    """Return the first change that the plan accepts, of those that save what the rank held most of.

    >>> print(_advice(Plan(dp=2), {"params": 2, "activations": 1}))
    Parameters, gradients and optimizer states take most of it. What would help: mk.Plan(dp=2, zero=1). mk.fits(model, \
plan, ...) says how much a rank then needs, and what else would help.
    """
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


HOW_MUCH = "mk.fits(model, plan, ...) says how much a rank then needs, and what else would help."
