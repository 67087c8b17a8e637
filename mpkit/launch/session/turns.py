"""Turns: a cluster runs one thing at a time; what becomes of an earlier training when another is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpkit.common.display import in_notebook
from mpkit.launch.session.cluster_checks import check_on_busy

if TYPE_CHECKING:
    from mpkit.launch.launch import Launch
    from mpkit.launch.launched_rank import LaunchedRank
    from mpkit.launch.session.run import Run

__all__ = ["Turns"]


class Turns:
    """What one cluster has run.

    Attributes:
        latest: the latest launch, of a training or a function.
        training: the latest training.
    """

    def __init__(self) -> None:
        self.latest: Launch | LaunchedRank | None = None
        self.training: Run | None = None

    def make_free(self, on_busy: str) -> None:
        """Stop an earlier training, wait for its end, or raise.

        Raises:
            ValueError: the cluster is busy, and `on_busy` is "raise".
        """
        check_on_busy(on_busy)
        if self.latest is None or self.latest.has_ended:
            return
        earlier = self.training if self.training is not None and not self.training.done else None
        if earlier is None or on_busy == "raise":
            raise ValueError(
                "this cluster is still busy with an earlier run: run.wait() for its end, or run.stop() it, or "
                'cluster.train(..., on_busy="stop") or "wait"; for runs side by side make another Cluster'
            )
        done = f"after step {earlier.first_step + len(earlier.losses)} of {earlier.steps}"
        if on_busy == "stop":
            print(
                f'mpkit: the earlier run of {earlier.plan} was stopped {done} for this one (on_busy="stop")'
            )
            earlier.stop()
        else:
            print(f'mpkit: waiting for the end of the earlier run of {earlier.plan} (on_busy="wait")')
            earlier.join()

    @contextmanager
    def instead_of_earlier(self, on_busy: str | None) -> Iterator[None]:
        """Prepare a new training in the body while an earlier one still runs; then make the cluster free for it.

        If the new training is refused, the earlier one goes on, and a line says how to see it: its view may be gone if
        both belong to one cell.
        """
        on_busy = check_on_busy(on_busy) or ("stop" if in_notebook() else "raise")
        if on_busy == "raise":
            self.make_free(on_busy)
        try:
            yield
        except Exception:
            earlier = self.training
            if earlier is not None and not earlier.done and earlier.shown:
                print("mpkit: the earlier run goes on: run.show() shows it here, run.stop() ends it")
            raise
        self.make_free(on_busy)
