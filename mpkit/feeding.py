"""Feeder: reads data that come one after the other, in the caller's process, and gives them to the ranks.

    read     in a thread, at most AHEAD batches before the rank that is furthest, and HELD before the one that is last
    serve    each rank in a thread of its own: a batch's size and shapes, then the samples that it takes
    fail     when every rank has come to a batch that there is none of: with the error that reading it ended in

So memory does not grow with the steps, and ranks that are faster than the data wait for them, on their timeline.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from mpkit.data_stream import Stream, UnfitBatch
from mpkit.errors import RankFailed
from mpkit.parallel.fed import SOCKET
from mpkit.parallel.microbatch import Value, batch_size, map_tensors, signature

__all__ = ["Feeder"]

AHEAD, HELD = 2, 8


class Feeder:
    """Feeds one run.

    Args:
        stream: what is read.
        folder: of the launch.
        steps: that the ranks will do; those before the first are read and let go.
        ranks: how many there are.

    Raises:
        ValueError: the folder's path is too long for a socket.
    """

    def __init__(self, stream: Stream, folder: Path, steps: range, ranks: int) -> None:
        self._stream, self._steps, self._ranks = stream, steps, ranks
        self._state = threading.Condition()
        self._batches: dict[int, tuple[Value, Value]] = {}
        self._asked: dict[int, int] = {}  # by rank, the newest step
        self._read = 0  # batches read so far
        self._trouble: BaseException | None = None
        self._over = False
        try:
            self._address = str(folder / SOCKET)
            self._listener = Listener(self._address, "AF_UNIX", backlog=ranks)
        except OSError as error:
            raise ValueError(
                f"data that come one after the other reach the ranks through a socket in {folder}: {error}. A shorter "
                "TMPDIR helps, such as /tmp; or give the data as a list."
            ) from None
        for target in (self._reading, self._accepting):
            threading.Thread(target=target, name=f"mpkit-data{target.__name__}", daemon=True).start()

    @property
    def error(self) -> RankFailed | None:
        """Why there is no batch where every rank wants one; None as long as there is, or some rank is not there yet."""
        with self._state:
            asked = len(self._asked) == self._ranks and min(self._asked.values()) >= self._read
            if self._trouble is None or not asked:
                return None
            trouble, came, asks = self._trouble, self._read, self._steps.stop
        if isinstance(trouble, StopIteration):
            return RankFailed(
                f"the data ended after {came} batches, and {asks} steps take {asks}: steps={came} trains on all of "
                "them. A generator gives its batches once; a list, or an object whose __iter__ begins anew, is gone "
                "through again and again."
            )
        if isinstance(trouble, UnfitBatch):
            return RankFailed(str(trouble))
        failed = RankFailed(f"the data failed at batch {came}: {type(trouble).__name__}: {trouble}")
        failed.__cause__ = trouble
        return failed

    def close(self) -> None:
        """The run is over."""
        with self._state:
            self._over = True
            self._batches.clear()
            self._state.notify_all()
        with contextlib.suppress(OSError), Client(self._address, "AF_UNIX"):
            pass  # wakes the thread that listens, which closes the socket

    # ---- read -----------------------------------------------------------------------------------------------

    def _reading(self) -> None:
        batches = self._stream.read()
        try:
            for step in range(self._steps.stop):
                with self._state:
                    self._state.wait_for(partial(self._may_read, step))
                    if self._over:
                        return
                batch = next(batches)
                with self._state:
                    if step in self._steps:
                        self._batches[step] = batch
                    self._read = step + 1
                    self._state.notify_all()
        except BaseException as error:  # the data's own, which the run ends with
            with self._state:
                self._trouble = error
                self._state.notify_all()
        finally:
            batches.close()
            self._stream.close()

    def _may_read(self, step: int) -> bool:
        first = self._steps.start
        foremost = max(self._asked.values(), default=first)
        last = min(self._asked.values()) if len(self._asked) == self._ranks else first
        return self._over or (step <= foremost + AHEAD and step <= last + HELD)

    # ---- serve ----------------------------------------------------------------------------------------------

    def _accepting(self) -> None:
        with self._listener:
            for _ in range(self._ranks):
                connection = self._listener.accept()
                if self._over:
                    return
                threading.Thread(
                    target=self._serving, args=(connection,), name="mpkit-data", daemon=True
                ).start()

    def _serving(self, connection: Connection[Any, Any]) -> None:
        with contextlib.suppress(OSError, EOFError), connection:  # the rank is gone
            while True:
                rank, step, which = pickle.loads(connection.recv_bytes())
                batch = self._wait_for(rank, step)
                if batch is None:
                    return
                connection.send_bytes(pickle.dumps(_answer(batch, which)))

    def _wait_for(self, rank: int, step: int) -> tuple[Value, Value] | None:
        with self._state:
            self._asked[rank] = step
            if len(self._asked) == self._ranks:
                for done in [each for each in self._batches if each < min(self._asked.values())]:
                    del self._batches[done]
            self._state.notify_all()
            self._state.wait_for(lambda: self._over or step in self._batches)
            return None if self._over else self._batches[step]


def _answer(batch: tuple[Value, Value], which: tuple[int, int, int | None] | None) -> Any:
    inputs, targets = batch
    if which is None:
        return batch_size(inputs), signature(inputs, targets)
    # Copies: a view would be sent with all of the batch that it is of.
    return tuple(map_tensors(lambda tensor: tensor[slice(*which)].clone(), value) for value in batch)
