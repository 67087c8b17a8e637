"""The time that a program spends until its samples are there: each batch that a DataLoader yields is an op."""

from __future__ import annotations

from typing import Any

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _BaseDataLoaderIter
from mpkit.launch.watch.actions import Actions
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

__all__ = ["WatchedLoaders"]


class WatchedLoaders:
    """The batches of every DataLoader of one rank's program.

    Args:
        record: the rank's recorder.
        actions: the rank's actions: a batch belongs to the step that is about to begin.
    """

    def __init__(self, record: Recorder, actions: Actions) -> None:
        self._record, self._actions = record, actions
        self._replaced = Replacements()

    def install(self) -> None:
        """Begin to see batches being loaded."""
        record, actions = self._record, self._actions
        next_batch: Any = _BaseDataLoaderIter.__next__

        def load(batches: Any) -> Any:
            if actions.is_running or _is_at_its_end(batches):
                return next_batch(batches)
            actions.begin_data()
            op = record.begin(Kind.DATA, type(batches).__name__.strip("_"))
            try:
                return next_batch(batches)
            finally:
                record.end(op)

        self._replaced.put(_BaseDataLoaderIter, "__next__", load)

    def uninstall(self) -> None:
        """Leave DataLoaders as they were."""
        self._replaced.restore()


def _is_at_its_end(batches: Any) -> bool:
    """Return whether there is no further batch, so that no step begins. Without a length, nobody knows."""
    try:
        return bool(batches._num_yielded >= len(batches))
    except TypeError:
        return False
