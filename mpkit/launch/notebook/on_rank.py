"""A rank's half of a session: wait for a request, answer it, and wait again, for as long as the session lasts.

Requests and answers are files in the launch's folder, and a pipe per rank wakes it:

    request7.pkl       what is asked; all ranks that are asked read the same file
    rank3.requests     a pipe: a line with the number of a request wakes the rank, which otherwise sleeps in a read
    rank3.answer7      its answer, which appears whole

A rank that waits for a request counts as finished in its trace: so it is no part of a hang, and ranks that wait for it
in a cell that it does not run are recognized as waiting in vain.
"""

import ast
import linecache
import os
import pickle
import signal
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import OUTPUT_LIMIT, part
from mpkit.launch.process.output import LabelledLines, end_lines
from mpkit.launch.process.rank import describe
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.program_calls.communication import compare_calls
from mpkit.strategies.rank_context import Context


@dataclass
class Reply:
    """What a rank answers."""

    state: str = "ok"  # or "error", or "interrupted"
    shown: str = ""  # the value of the cell's last expression as text; "" if it has none
    value: bytes = b""  # the value itself, pickled, where the request wants it
    error: dict[str, str] = field(default_factory=dict)  # what `describe` returned
    ops: int = 0  # in the rank's trace when the cell began
    recorded: int = 0  # ops that the cell added


def serve(context: Context) -> None:
    """Answer requests until the launch is ended. The answer to number 0 says that the rank is ready."""
    folder, rank, record = context.record.folder, context.rank, context.record
    namespace, own = _namespace(context), os.getpid()
    path = part(folder, rank, "requests")
    os.mkfifo(path, 0o600)
    record.idle(True)
    # The pipe has a writer of its own, so that it never ends.
    with path.open("r+b", buffering=0) as pipe, compare_calls(context.comm):
        write_whole(part(folder, rank, "answer0"), dumps(Reply()))
        for line in pipe:
            number, ops = int(line), record.count
            code, name, wants_value = pickle.loads((folder / f"request{number}.pkl").read_bytes())
            try:
                given = _answer(context, code, name, namespace, wants_value)
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
    own = {name: getattr(context, name) for name in ("comm", "rank", "world_size", "device")}
    vars(main).update(ctx=context, **own, torch=torch, dist=dist, mk=mk)
    return vars(main)


def _answer(context: Context, code: str, name: str, namespace: dict[str, Any], wants_value: bool) -> Reply:
    """Run a cell, which tracebacks call `name`.

    With `wants_value`, return the value of its last expression, and leave it out of the variables.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(lines := getattr(stream, "buffer", None), LabelledLines):
            lines.room = OUTPUT_LIMIT
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    context.record.idle(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        value = _value(code, name, namespace)
        if wants_value:
            return Reply(value=dumps(value.detach().cpu() if hasattr(value, "detach") else value))
        if value is not None:
            namespace["_"] = value
        return Reply(shown="" if value is None else repr(value))
    except KeyboardInterrupt:
        return Reply("interrupted")
    except BaseException as error:  # SystemExit too, which would end the session
        return Reply("error", error=describe(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context.record.idle(True)


def _value(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Return the value of the last expression; None if the cell ends with something else, or with a semicolon."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if code.rstrip().endswith(";") else value
