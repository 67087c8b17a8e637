"""Why ranks wait for each other: which rank has not reached an awaited call, and what it did instead."""

from __future__ import annotations

from collections.abc import Iterator

from mpkit.launch.hang.unmatched_calls import missing_ranks, unanswered_calls, waited_for
from mpkit.trace import Kind, Trace
from mpkit.trace.mismatch import IssuedCall

__all__ = ["reasons"]


def reasons(trace: Trace) -> Iterator[str]:
    """Yield, for each communication waited for, the ranks that have not reached it and where they are."""
    for rank, recorded in enumerate(trace.ranks):
        call = waited_for(rank, recorded)
        if call is None:
            continue
        for other in missing_ranks(call, trace):
            if call.is_message:
                done = "never sent it" if call.kind == Kind.RECV else "never received it"
                what = f"rank {rank} waits for message {call.group} number {call.number}; rank {other} {done}"
            else:
                what = f"rank {other} never came to {call}"
            yield f"{what}: {_describe_place(other, trace)}{_nearest(call, trace)}"


def _describe_place(rank: int, trace: Trace) -> str:
    recorded = trace.ranks[rank]
    waits = waited_for(rank, recorded)
    if recorded.state == "finished":
        return "it has finished"
    return f"it waits in {waits}{waits.place_text}" if waits is not None else "it is still busy elsewhere"


def _nearest(call: IssuedCall, trace: Trace) -> str:
    """Describe the other end's message that is most similar to the one waited for, if there is one."""
    if not call.is_message:
        return ""
    wanted = Kind.SEND if call.kind == Kind.RECV else Kind.RECV
    there = [other for other in unanswered_calls(call.peer, trace) if other.kind == wanted]
    same_ends = [other for other in there if other.peer == call.rank]
    same_tag = [other for other in there if other.tag == call.tag]
    for other in (same_ends or same_tag)[:1]:
        sends = other.kind == Kind.SEND
        verb, nobody = ("sent", "receives") if sends else ("receives", "sends")
        return (
            f". Instead it {verb} {other.tensor_text} {'to' if sends else 'from'} rank {other.peer} "
            f"with tag {other.tag}{other.place_text}, which rank {other.peer} never {nobody}"
        )
    return ""
