"""When a communication is complete, and who waits for it.

    a wait      the op ends with `Work.wait`, or with the operator `wait_tensor` of functional collectives
    C++         DDP waits unseen by Python: at the end of a backward for communication issued in it, and before it
                returns for any other. Communication that is complete then counts as waited for
    nobody      an op whose handle nobody holds any more ends when the next one begins, if it is complete by then

So the end in the trace is when the program, on its own thread, could know of it, as with the kit's own strategies. (A
callback on the future would be earlier, but it runs in gloo's thread, which then has to take Python's lock: with
a main thread that keeps the lock while it waits for gloo, that is a deadlock. A thread that waits for each future makes
the main thread compete for the lock.) On a GPU ends are CUDA events in the current stream, at the same places.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpkit.common.process_wide import Replacements
from mpkit.strategies.comm.call_checks import CheckedCall
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

_RECENT = 256  # outputs of functional collectives that may still be waited for
_OURS = 3  # references to a handle that nobody else holds: the table's, a variable and getrefcount's argument


class _OpenCall(NamedTuple):
    """A communication under way: torch's handle, which this keeps alive, its op, its line, and its check."""

    work: Any
    op: int
    where: str
    call: CheckedCall | None


class Completion:
    """The communications of one rank that are under way."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._issued: dict[int, _OpenCall] = {}  # by the handle's identity
        self._outputs: dict[int, int] = {}  # by a tensor's address, the handle that fills it
        self._unseen: dict[int, Any] = {}  # handles that C++ may wait for
        self.backwards = 0  # how many are running, one within another
        self._wait: Callable[..., Any] = dist.Work.wait
        self._replaced = Replacements()

    # ---- begin and end of watching

    def install(self) -> None:
        """Intercept waits."""
        see = self._wait_for_handle

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            return see(work, args, kwargs)

        wait.__doc__ = self._wait.__doc__
        self._replaced.put(dist.Work, "wait", wait)

    def uninstall(self) -> None:
        """Restore waits. Communications that are still under way stay open in the trace."""
        self.settle()
        self._replaced.restore()
        self._issued.clear()

    # ---- a communication starts

    def follow(
        self, op: int, work: Any, where: str, filled: Any, *, by_python: bool, call: CheckedCall | None = None
    ) -> None:
        """Follow a communication whose op has begun.

        Args:
            filled: a tensor, a list of tensors or a list of lists.
            by_python: whether Python has issued it, and so receives the handle.
        """
        handle = id(work)
        self._issued[handle] = _OpenCall(work, op, where, call)
        while not isinstance(filled, torch.Tensor) and filled:
            filled = filled[0]
        if isinstance(filled, torch.Tensor):
            self._outputs[filled.data_ptr()] = handle
            if len(self._outputs) > _RECENT:
                del self._outputs[next(iter(self._outputs))]
        if self.backwards or not by_python:
            self._unseen[handle] = work

    # ---- someone waits for it

    def _wait_for_handle(self, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a handle, and record the waiting."""
        if id(work) not in self._issued:  # of ctx.comm, waited for already, or issued before `install`
            return self._wait(work, *args, **kwargs)
        return self._record_wait(id(work), self._wait, work, *args, **kwargs)

    def wait_for_output(self, tensor: torch.Tensor, wait: Callable[[], Any]) -> Any:
        """Wait for the functional collective that fills this tensor, and record the waiting."""
        handle = self._outputs.pop(tensor.data_ptr(), -1)
        return wait() if handle not in self._issued else self._record_wait(handle, wait)

    def _record_wait(self, handle: int, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        record, issued = self._record, self._issued.pop(handle)
        self._unseen.pop(handle, None)
        waiting = record.begin(Kind.WAIT, ref=issued.op, where=issued.where)
        try:
            result = wait(*args, **kwargs)
            if issued.call is not None:
                issued.call.compare()
        except BaseException:
            record.drop(waiting)
            raise
        record.end(waiting)
        record.end(issued.op)
        return result

    def settle(self) -> None:
        """Outside of backwards, end the ops that C++ has waited for, and those that are complete and forgotten."""
        if self.backwards or not self._issued:
            return
        for handle, work in list(self._unseen.items()):
            if _is_complete(work):
                self._record_wait(handle, lambda: None)  # C++ has waited
        for handle, (work, op, _, _) in list(self._issued.items()):
            if handle not in self._unseen and work.is_completed() and sys.getrefcount(work) <= _OURS:
                del self._issued[handle]
                self._record.end(op)


def _is_complete(work: Any) -> bool:
    """Return whether the handle's future, for which DDP waits, is complete; the handle itself is so later."""
    if work.is_completed():
        return True
    with suppress(RuntimeError):  # gloo's messages and reduce-scatters have no future
        return bool(work.get_future().done())
    return False
