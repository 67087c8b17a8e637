"""OverlappedPair: a forward and a backward that run as one (F & B), each while the other's tokens travel.

    F   attention │ dispatch ........ │ experts │ return ......... │ attention of the next layer ...
    B             │ experts' gradient │ ....... │ attention's ...  │ experts' gradient ...

    begin     the backward gets a thread of its own, with the modes of torch that are in force in the caller's, where
              the forward runs
    make way  at each all-to-all of experts, once it is under way, the other action goes on, until it comes to an
              all-to-all itself or to its end; then this one waits for what has travelled meanwhile
    end       both are done; or one failed, and the other one ends where it has made way

Exactly one of them runs at any time, and which one follows from the program alone. So ranks that share experts start
their collectives in one order, and every number is that of one action after the other. What is recorded of each is
several parts (`mpkit.trace.PartFlag`). A forward makes way in its dispatch and return, and a backward in their
gradients. A forward that is repeated for its backward does not, since it works on random states that it puts back at
its end.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1 and figure 4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any, Literal

import torch

from mpkit.common.torch_private import _get_current_dispatch_mode_stack, _get_current_function_mode_stack
from mpkit.trace.record.recorder import Recorder

__all__ = ["OverlappedPair", "Turn"]

Turn = Literal["F", "B"]
"""The action whose turn it is: the forward or the backward."""

OTHER: dict[Turn, Turn] = {"F": "B", "B": "F"}
THREAD = "mpkit-backward"
"""The name of the thread in which the backward of a pair runs."""

GRACE = 5.0
"""Seconds in which the backward of a failed pair is to end; one that waits for other ranks ends with the process."""


class PairEnded(BaseException):
    """The other action has failed. No `except Exception` of a model stops it."""


class OverlappedPair:
    """A forward and a backward that take turns.

    Args:
        record: the rank's recorder.
        device: the rank's device.

    >>> from mpkit.trace.record.silent_recorder import SilentRecorder
    >>> pair, said = OverlappedPair(SilentRecorder(), torch.device("cpu")), []
    >>> def compute(turn):
    ...     for layer in range(2):
    ...         said.append(f"{turn}{layer}")
    ...         pair.make_way(turn)
    >>> pair.run(lambda: compute("F"), lambda: compute("B"))
    >>> said
    ['F0', 'B0', 'F1', 'B1']
    """

    def __init__(self, record: Recorder, device: torch.device) -> None:
        self._record, self._device = record, device
        self._turn: Turn = "F"
        self._changed = threading.Condition()
        self._over = False  # one of them is
        self._error: BaseException | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both. An exception of either ends both, and is raised here."""
        # ---- begin
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        thread = threading.Thread(
            target=copy_context().run, args=(self._run_backward, backward, modes), name=THREAD, daemon=True
        )
        thread.start()
        # ---- make way
        try:
            forward()
            self._hand_over("F", over=True)
            thread.join()
        except PairEnded:
            pass  # the backward's error is raised below
        except BaseException as error:
            self._fail(error)
        # ---- end
        if self._error is not None:
            thread.join(GRACE)
            raise self._error

    def _run_backward(self, backward: Callable[[], None], modes: list[Any]) -> None:
        try:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                if self._device.type != "cpu":
                    torch.get_device_module(self._device).set_device(self._device)
                self._wait_for("B")
                backward()
            self._hand_over("B", over=True)
        except PairEnded:
            pass  # the forward's error is raised in its thread
        except BaseException as error:
            self._fail(error)

    def alternates(self, turn: Turn) -> bool:
        """Return whether it is this action's turn, and the other one is there to go on meanwhile."""
        return self._turn == turn and not self._over

    def make_way(self, turn: Turn) -> None:
        """Let the other action run until it makes way itself, or ends."""
        if not self.alternates(turn):
            return
        ops = self._record.suspend()
        self._hand_over(turn)
        self._wait_for(turn)
        self._record.resume(ops)

    def _hand_over(self, turn: Turn, *, over: bool = False) -> None:
        with self._changed:
            if self._error is not None:
                raise PairEnded
            self._turn, self._over = OTHER[turn], self._over or over
            self._changed.notify_all()

    def _wait_for(self, turn: Turn) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == turn or self._error is not None)
            if self._error is not None:
                raise PairEnded

    def _fail(self, error: BaseException) -> None:
        """End the other action where it waits; an interruption of the caller's counts more than what followed."""
        with self._changed:
            if self._error is None or not isinstance(error, Exception):
                self._error = error
            self._changed.notify_all()
