"""A recorder that records nothing, for ranks that nobody looks at: those of a plain torchrun."""

from contextlib import nullcontext
from typing import Any

from mpkit.trace import CATEGORIES
from mpkit.trace.record.contexts import Current
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.memory import StepMemory
from mpkit.trace.record.recorder import Recorder


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _no_context(*_: Any, **__: Any) -> Any:
    """Return a context that does nothing."""
    return nullcontext()


class SilentLedger(Ledger):
    """A ledger without entries."""

    track = move = change = note_resize = _do_nothing

    def __init__(self) -> None:
        self.held = dict.fromkeys(CATEGORIES, 0)


class SilentMemory(StepMemory):
    """The memory of steps that nobody looks at."""

    add = remove = _do_nothing
    saving = _no_context

    def __init__(self) -> None:
        self.active = self.playing = False


class SilentRecorder(Recorder):
    """A Recorder without files: strategies call it as they call any other.

    >>> record = SilentRecorder()
    >>> with record.step(0), record.span("attention"):
    ...     record.begin(0), record.busy
    (-1, False)
    """

    note_parts = end = drop = begin_step = begin_memory = end_step = loss = costs = log = idle = close = (
        _do_nothing
    )
    step = span = _no_context

    def __init__(self) -> None:
        self.layers = False
        self.ledger = SilentLedger()
        self.memory = SilentMemory()
        self.allocated = None

    def begin(self, kind: int, name: str = "", **columns: Any) -> int:
        """Record nothing, and return the index of no op."""
        return -1

    @property
    def count(self) -> int:
        """The number of ops: none."""
        return 0

    @property
    def current(self) -> Current:
        """Nowhere."""
        return Current(None, None, None)

    @property
    def busy(self) -> bool:
        """Whether an op is open: never."""
        return False

    def place(self) -> tuple[int, int, int]:
        """Return that there is no stage, micro-batch or step."""
        return -1, -1, -1
