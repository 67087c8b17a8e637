"""When a communication is complete, and who waits for it.

    a future       gloo's collectives have one: a thread waits for each in the order of issue and writes the end. It
                   blocks in C++ without Python's lock, so it takes one wake-up per collective and delays no one
    a wait         messages and gloo's reduce-scatter complete only within `Work.wait`, which this module wraps
    C++            DDP waits where Python does not see it: at the end of a backward for what was issued in it; before it
                   returns for what it issues elsewhere. What is complete then counts as waited for

A callback on the future would run in gloo's own thread, which would have to take Python's lock before it could tell
anyone that the collective is complete; with a main thread that keeps the lock, that is a deadlock.
On a GPU ends are CUDA events in the current stream, at the waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from mpkit.record.recorder import Recorder
from mpkit.support.replaced import Replaced
from mpkit.trace import Kind
from mpkit.watch.lines import Lines

__all__ = ["Completion"]

_RECENT = 256  # outputs of functional collectives that may still be waited for


class Completion:
    """The communications of one rank that are under way.

    Args:
        record: the rank's recorder.
        lines: the program's lines.
        follows: whether a thread follows futures; on a GPU it does not, since they say when work was queued.
    """

    def __init__(self, record: Recorder, lines: Lines, *, follows: bool) -> None:
        self._record, self._lines = record, lines
        self._open: set[int] = set()
        self._ops: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._outputs: dict[int, int] = {}  # the op that fills a tensor, by its address
        self._latest: Any = None  # kept until its caller has it, so that the caller receives this very object
        self._unseen: dict[int, Callable[[], bool]] = {}  # is it complete? Its wait may happen in C++
        self.backwards = 0  # how many backwards are running, one within another
        self._futures: SimpleQueue[tuple[int, Any] | None] | None = SimpleQueue() if follows else None
        self._wait: Callable[..., Any] = dist.Work.wait
        self._replaced = Replaced()

    # ---- begin and end of watching

    def install(self) -> None:
        """Begin to see waits, and to follow futures."""
        see = self._waited

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            return see(work, args, kwargs)

        wait.__doc__ = self._wait.__doc__
        self._replaced.put(dist.Work, "wait", wait)
        if self._futures is not None:
            threading.Thread(target=self._follow, args=(self._futures,), daemon=True).start()

    def uninstall(self) -> None:
        """Leave waits as they were. What is still under way stays open in the trace."""
        self.settle()
        self._replaced.restore()
        self._latest = None
        if self._futures is not None:
            self._futures.put(None)

    # ---- a communication starts

    def started(self, op: int, work: Any, outputs: list[torch.Tensor], *, by_python: bool) -> None:
        """Follow a communication whose op has begun.

        Args:
            op: the op's index.
            work: torch's handle.
            outputs: the tensors that it fills.
            by_python: whether Python has issued it, and so receives the handle.
        """
        self._open.add(op)
        self._ops[work] = op
        self._latest = work
        if outputs:
            self._outputs[outputs[0].data_ptr()] = op
            if len(self._outputs) > _RECENT:
                del self._outputs[next(iter(self._outputs))]
        is_complete: Callable[[], bool] = work.is_completed
        if self._futures is not None:
            with suppress(RuntimeError):  # gloo's messages and reduce-scatters have no future
                future = work.get_future()
                is_complete = future.done  # DDP waits for the future, which is complete before its handle
                self._futures.put((op, future))
        if self.backwards or not by_python:
            self._unseen[op] = is_complete

    # ---- it completes

    def _follow(self, futures: SimpleQueue[tuple[int, Any] | None]) -> None:
        """Write the end of each communication that has a future, in the order of issue."""
        while (item := futures.get()) is not None:
            op, future = item
            try:
                future.wait()
            except RuntimeError:  # it failed: the program's own wait raises this, and the op stays open
                continue
            finally:
                del item, future  # they keep the tensors alive
            self._end(op)

    def _end(self, op: int) -> None:
        if op in self._open:
            self._open.discard(op)
            self._record.complete(op)

    # ---- someone waits for it

    def _waited(self, work: Any, args: Any, kwargs: Any) -> Any:
        """Wait for a handle as the program asks, and record the waiting."""
        op = self._ops.get(work)
        self._latest = None
        if op is None:  # of ctx.comm, or from before the watching began
            return self._wait(work, *args, **kwargs)
        return self._waiting(op, lambda: self._wait(work, *args, **kwargs))

    def wait_for_output(self, tensor: torch.Tensor, wait: Callable[[], Any]) -> Any:
        """Wait for the functional collective that fills this tensor, and record the waiting."""
        self._latest = None
        op = self._outputs.pop(tensor.data_ptr(), None)
        return wait() if op is None else self._waiting(op, wait)

    def _waiting(self, op: int, wait: Callable[[], Any]) -> Any:
        record = self._record
        self._unseen.pop(op, None)
        waiting = record.begin(Kind.WAIT, ref=op, where=self._lines.here() or "")
        try:
            result = wait()
        except BaseException:
            record.drop(waiting)
            raise
        record.end(waiting)
        self._end(op)
        return result

    def settle(self) -> None:
        """Record that C++ has waited for what it issued: a backward is over, or something else begins."""
        if not self._unseen or self.backwards:
            return
        self._latest = None
        for op, is_complete in list(self._unseen.items()):
            if self._futures is None or is_complete():
                del self._unseen[op]
                waiting = self._record.begin(Kind.WAIT, ref=op)
                self._record.end(waiting)
                self._end(op)
