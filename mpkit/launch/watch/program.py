"""A program that knows nothing of mpkit leaves a Trace like any other.

    communication    every operator of c10d                          `communication`, `completion`
    actions          forward, loss, backward, optimizer, steps       `hooks`, `actions`
    stages, data     torch's pipelines; the time until samples are there    `hooks`
    costs            FLOPs, bytes and memory of each action            `costs`
    names            what the program says it is doing               `annotations`

Nothing of the program changes: torch offers a place to listen at each of these, and the listeners go at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from mpkit.common.process_wide import Replacements
from mpkit.launch.watch.actions import Actions
from mpkit.launch.watch.costs import WatchedCosts
from mpkit.launch.watch.hooks import Modules, watch_backwards, watch_loaders, watch_optimizers, watch_stages
from mpkit.launch.watch.span import WATCHED
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.program_calls.communication import Communication
from mpkit.strategies.program_calls.completion import Completion
from mpkit.strategies.program_calls.program import Annotations, SourceLines
from mpkit.strategies.rank_context import Context
from mpkit.trace import Kind

NEEDED = ("torch.distributed.pipelining",)
"""Modules whose classes are watched, so the fork server imports them once for all ranks."""


def check_watch(watch: Any) -> int | None:
    """Return the depth to which modules are recorded, None for the repeated blocks.

    Args:
        watch: True, or the depth.

    Raises:
        ValueError: it is neither.

    >>> check_watch(True) is None, check_watch(2)
    (True, 2)
    """
    if watch is True:
        return None
    if isinstance(watch, int) and watch >= 0:
        return watch
    raise ValueError(
        f"watch={watch!r}: True records a model's repeated blocks, a number its modules down to that depth, such as "
        "cluster.run(fn, watch=2)"
    )


def watch_function(ctx: Context, function: Callable[..., Any], depth: int | None, *args: Any) -> Any:
    """Call `function(ctx, *args)` on a rank and record what it computes, communicates and holds.

    Args:
        ctx: the rank's context.
        function: the user's function.
        depth: how deep modules are recorded; None: repeated blocks and the modules beside them.
        args: the function's further arguments.
    """
    with recording(ctx.comm, depth):
        return function(ctx, *args)


@contextmanager
def recording(comm: Communicator, depth: int | None) -> Iterator[None]:
    """Record the program that runs in the block, on the rank of this communicator of all ranks."""
    record = comm.wire.record
    annotations, completion = Annotations(), Completion(record)
    communication = Communication(comm, completion, SourceLines(), annotations)
    roots: WeakSet[nn.Module] = WeakSet()
    optimizers: WeakSet[Optimizer] = WeakSet()
    costs = WatchedCosts(record, annotations, roots, optimizers)
    actions = Actions(record, costs, completion.settle)
    actions.alone, communication.before = str(comm.rank), actions.communicate
    modules = Modules(record, actions, roots, depth)
    actions.step_ended = modules.step_ended
    backwards: list[int] = []

    def backward_begins(outputs: Any) -> None:
        modules.backward_begins()
        actions.begin_backward(outputs)
        backwards.append(actions.begin(Kind.BACKWARD, "backward"))
        actions.backwards += 1
        completion.backwards += 1

    def backward_ends() -> None:
        actions.backwards -= 1
        completion.backwards -= 1
        if not actions.backwards:
            modules.backward_ends()
            completion.settle()
        actions.end(backwards.pop())

    replaced = Replacements()
    with ExitStack() as stack:
        for part in (annotations, completion, communication, modules):
            part.install()
            stack.callback(part.uninstall)
        for handle in watch_optimizers(actions, optimizers):
            stack.callback(handle.remove)
        stack.callback(replaced.restore)
        watch_backwards(replaced, backward_begins, backward_ends)
        watch_loaders(replaced, record, actions)
        watch_stages(replaced, actions)
        stack.callback(costs.uninstall)
        token = WATCHED.set(actions)
        stack.callback(WATCHED.reset, token)
        yield
        stack.close()
        actions.finish()
