"""A rank's half of a session: wait for a request, answer it, and wait again, for as long as the session lasts.

A rank that waits for a request sleeps in a read. In its trace it counts as finished: so it is no part of a hang, and
ranks that wait for it in a cell that it does not run are recognized as waiting in vain.
"""

from __future__ import annotations

import pickle
import signal
import sys
from types import ModuleType
from typing import Any

from mpkit.launch.notebook.cell import complete, run_cell
from mpkit.launch.notebook.exchange import Reply, Request, Requests, answer
from mpkit.launch.process.output import LabelledLines, end_lines
from mpkit.launch.process.program_exit import own_process
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.program_calls.comparison import compare_calls
from mpkit.strategies.rank_context import Context

__all__ = ["serve"]


def serve(context: Context) -> None:
    """Answer requests until the launch is ended."""
    folder, rank = context.record.folder, context.rank
    namespace = _namespace(context)
    requests = Requests(folder, rank)
    context.record.idle(True)
    answer(folder, rank, 0, Reply())
    with compare_calls(context.comm):
        _answer_all(context, requests, namespace)


def _answer_all(context: Context, requests: Requests, namespace: dict[str, Any]) -> None:
    folder, rank = context.record.folder, context.rank
    while True:
        number, request = requests.wait_for_request()
        ops = context.record.count
        try:
            given = _do(context, request, namespace)
        except KeyboardInterrupt:  # between the cell's end and the next line
            given = Reply("interrupted")
        given.calls, given.ops, given.recorded = context.comm.issued, ops, context.record.count - ops
        end_lines()
        answer(folder, rank, number, given)


def _namespace(context: Context) -> dict[str, Any]:
    """Return the variables that a session begins with, in a module `__main__` of its own."""
    import torch
    import torch.distributed as dist

    import mpkit as mk

    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    vars(main).update(
        ctx=context, comm=context.comm, rank=context.rank, world_size=context.world_size, device=context.device,
        torch=torch, dist=dist, mk=mk,
    )  # fmt: skip
    return vars(main)


def _do(context: Context, request: Request, namespace: dict[str, Any]) -> Reply:
    match request.do:
        case "cell":
            return _cell(context, request, namespace)
        case "put":
            namespace[request.text] = pickle.loads(request.value)
            return Reply()
        case "get":
            return _get(request.text, namespace)
        case _:  # complete
            return Reply(value=complete(request.text, namespace))


def _cell(context: Context, request: Request, namespace: dict[str, Any]) -> Reply:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(lines := getattr(stream, "buffer", None), LabelledLines):
            lines.begin_again()
    context.record.idle(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with own_process():
            return run_cell(request.text, request.name, namespace)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context.record.idle(True)


def _get(name: str, namespace: dict[str, Any]) -> Reply:
    """Return the value of an expression, usually a name; tensors on the CPU."""
    try:
        value = eval(name, namespace)
        return Reply(value=dumps(value.detach().cpu() if hasattr(value, "detach") else value))
    except Exception as error:
        return Reply("error", error={"type": type(error).__name__, "message": str(error)})
