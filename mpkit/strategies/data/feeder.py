"""Feeder: reads batches one after the other in the caller's process and sends them to the ranks.

    read     in a thread, at most AHEAD batches beyond the foremost rank and HELD beyond the last one
    serve    one thread per rank: sends a batch's size and shapes, then the samples that the rank takes
    fail     once every rank has requested a batch that does not exist, with the error that reading it raised

Memory therefore does not grow with the number of steps, and ranks that are faster than the data wait for it; the wait
is visible on their timeline.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from mpkit.errors import RankFailed
from mpkit.strategies.data.fed_batches import SOCKET
from mpkit.strategies.data.microbatch import Value, batch_size, map_tensors, signature
from mpkit.strategies.data.stream import Stream, UnfitBatch

__all__ = ["Feeder"]

AHEAD, HELD = 2, 8


class Feeder:
    """Feeds the ranks of one run.

    Args:
        stream: the data to read.
        folder: the launch's folder.
        steps: the steps that the ranks will do; batches of earlier steps are read and discarded.
        ranks: the number of ranks.

    Raises:
        ValueError: the folder's path is too long for a socket.
    """

    def __init__(self, stream: Stream, folder: Path, steps: range, ranks: int) -> None:
        self._stream, self._steps, self._ranks = stream, steps, ranks
        self._state = threading.Condition()
        self._batches: dict[int, tuple[Value, Value]] = {}
        self._asked: dict[int, int] = {}  # by rank, the newest step requested
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
        for target in (self._read_batches, self._accept_ranks):
            threading.Thread(target=target, name=f"mpkit-data{target.__name__}", daemon=True).start()

    @property
    def error(self) -> RankFailed | None:
        """The reason why there is no batch, once every rank has requested it; None before that, or if there is one."""
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
        """End the run: stop reading and serving."""
        with self._state:
            self._over = True
            self._batches.clear()
            self._state.notify_all()
        with contextlib.suppress(OSError), Client(self._address, "AF_UNIX"):
            pass  # wakes the listening thread, which closes the socket

    # ---- read -----------------------------------------------------------------------------------------------

    def _read_batches(self) -> None:
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
        except BaseException as error:  # raised by the data; the run ends with it
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

    def _accept_ranks(self) -> None:
        with self._listener:
            for _ in range(self._ranks):
                connection = self._listener.accept()
                if self._over:
                    return
                threading.Thread(
                    target=self._serve_rank, args=(connection,), name="mpkit-data", daemon=True
                ).start()

    def _serve_rank(self, connection: Connection[Any, Any]) -> None:
        with contextlib.suppress(OSError, EOFError), connection:  # the rank has exited
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
    # Copies: pickling a view would send the whole batch that it belongs to.
    return tuple(map_tensors(lambda tensor: tensor[slice(*which)].clone(), value) for value in batch)
