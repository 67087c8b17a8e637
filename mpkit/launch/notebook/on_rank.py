"""A rank's half of a session: wait for a request, answer it, and wait again, for as long as the session lasts.

Requests and answers are files in the launch's folder, and a pipe per rank wakes it:

    request7.pkl       what is asked; all ranks that are asked read the same file
    rank3.requests     a pipe: a line with the number of a request wakes the rank, which otherwise sleeps in a read
    rank3.answer7      its answer, which appears whole

A rank that waits for a request counts as finished in its trace: so it is no part of a hang, and ranks that wait for it
in a cell that it does not run are recognized as waiting in vain.
"""

from __future__ import annotations

import ast
import linecache
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import part
from mpkit.launch.process.output import LabelledLines, end_lines
from mpkit.launch.process.rank import describe
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.program_calls.communication import compare_calls
from mpkit.strategies.rank_context import Context

__all__ = ["Reply", "Request", "run_cell", "serve"]


# ---- requests and answers ----------------------------------------------------------------------------------------


@dataclass
class Request:
    """What the ranks are asked to do.

    Attributes:
        do: "begin", "cell" or "get".
        text: the cell's code, or the name of a variable.
        name: what tracebacks call the cell.
    """

    do: str
    text: str = ""
    name: str = ""


@dataclass
class Reply:
    """What a rank answers.

    Attributes:
        state: "ok", "error" or "interrupted".
        shown: the value of the cell's last expression as text; "" if it has none.
        value: for "get": the pickled value.
        error: for an error: its type, message and traceback, and the traceback without the frames of libraries.
        ops, recorded: how many operations its trace had when the cell began, and how many the cell added.
    """

    state: str = "ok"
    shown: str = ""
    value: Any = None
    error: dict[str, str] = field(default_factory=dict)
    ops: int = 0
    recorded: int = 0


def requests(folder: Path, rank: int) -> Iterator[tuple[int, Request]]:
    """Yield the numbers of requests and the requests, and sleep until there is one."""
    path = part(folder, rank, "requests")
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR)  # with a writer of its own, so that it never ends
    read = b""
    yield 0, Request("begin")
    while True:
        while b"\n" not in read:
            read += os.read(pipe, 4096)
        line, _, read = read.partition(b"\n")
        with (folder / f"request{int(line)}.pkl").open("rb") as file:
            yield int(line), pickle.load(file)


# ---- the loop ----------------------------------------------------------------------------------------------------


def serve(context: Context) -> None:
    """Answer requests until the launch is ended."""
    folder, rank, record = context.record.folder, context.rank, context.record
    namespace = _namespace(context)
    record.idle(True)
    own = os.getpid()
    with compare_calls(context.comm):
        for number, request in requests(folder, rank):
            ops = record.count
            try:
                given = _answer(context, request, namespace)
            except KeyboardInterrupt:  # between the cell's end and the next line
                given = Reply("interrupted")
            if os.getpid() != own:  # a child that the cell has forked and not ended
                os._exit(0)
            given.ops, given.recorded = ops, record.count - ops
            end_lines()
            write_whole(part(folder, rank, f"answer{number}"), dumps(given))


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


def _answer(context: Context, request: Request, namespace: dict[str, Any]) -> Reply:
    if request.do == "begin":
        return Reply()
    return _cell(context, request, namespace) if request.do == "cell" else _get(request.text, namespace)


def _cell(context: Context, request: Request, namespace: dict[str, Any]) -> Reply:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(lines := getattr(stream, "buffer", None), LabelledLines):
            lines.begin_again()
    context.record.idle(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
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


# ---- a cell ------------------------------------------------------------------------------------------------------


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> Reply:
    """Run a cell.

    Args:
        code: Python code.
        name: what tracebacks call it.
        namespace: the variables of the session on this rank.
    """
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        value = _value(code, name, namespace)
        if value is not None:
            namespace["_"] = value
        return Reply(shown="" if value is None else repr(value))
    except KeyboardInterrupt:
        return Reply("interrupted")
    except BaseException as error:  # SystemExit too, which would end the session
        return Reply("error", error=describe(error))


def _value(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Return the value of the last expression; None if the cell ends with something else, or with a semicolon."""
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    quiet = code.rstrip().endswith(";")
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
        return None
    del tree.body[-1]
    exec(compile(tree, name, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if quiet else value
