"""What an answer uses on a rank: how much it computes, and how much it holds.

    FLOPs    of matrix products and convolutions, a multiply-add as two
    bytes    of the tensors that the answer makes, while they live; the most at a time

What the rank's other threads do counts too. Of a function counts what happens within its calls, and not what the
exercise does before and after them; of a class, all of it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from mpkit.common.torch_private import TorchDispatchMode, tree_leaves
from mpkit.trace.record.operators import flops_of


class Usage(NamedTuple):
    """What an answer has used on a rank.

    Attributes:
        flops: how much it has computed.
        held: the most bytes that its tensors held at a time.
    """

    flops: float = 0.0
    held: float = 0.0


class Counter:
    """Counts what an answer uses.

    >>> import torch
    >>> counter = Counter()
    >>> with counter.count_calls():
    ...     product = counter.count(torch.matmul)(torch.ones(2, 3), torch.ones(3, 4))
    >>> counter.usage
    Usage(flops=48.0, held=32)

    Args:
        begin: called when the answer begins: where it is called first, or, of anything but a function, at once.
    """

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._flops, self._now, self._most = 0.0, 0, 0
        self._calls, self._counts_calls = 0, False
        self._living: dict[int, weakref.ref[Any]] = {}

    @property
    def usage(self) -> Usage:
        """What has been used up to now."""
        return Usage(self._flops, self._most)

    def count(self, answer: Any) -> Any:
        """Return the answer; if it is a function, only what its calls use counts from now on."""
        if not callable(answer) or isinstance(answer, type):
            self._begin()
            return answer
        self._counts_calls = True

        @wraps(answer)
        def call_counted(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                self._begin()
            self._calls += 1
            try:
                return answer(*args, **kwargs)
            finally:
                self._calls -= 1

        return call_counted

    @contextmanager
    def count_calls(self) -> Iterator[None]:
        """Count what is done inside of the block, in this thread and in those that are started there."""
        run = threading.Thread.run

        def run_counted(thread: threading.Thread) -> None:
            with _OperatorCounter(self):
                run(thread)

        with patch.object(threading.Thread, "run", run_counted), _OperatorCounter(self):
            yield

    def add(self, flops: float, made: Sequence[Any]) -> None:
        """Count an operator: the FLOPs of it, and what it has made."""
        self._flops += flops
        if self._calls or not self._counts_calls:
            for each in made:
                if isinstance(each, Tensor):
                    self._hold(each)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._living:
            return

        def free(_: Any) -> None:
            if self._living.pop(key, None) is not None:
                self._now -= nbytes

        self._living[key] = weakref.ref(storage, free)
        self._now += nbytes
        self._most = max(self._most, self._now)


class _OperatorCounter(TorchDispatchMode):
    """Counts the operators of one thread."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, and count."""
        out = func(*args, **(kwargs or {}))
        self._counter.add(flops_of(func, args, kwargs or {}, out), tree_leaves(out))
        return out
