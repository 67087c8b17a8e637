"""Run: a notebook's handle on a training that proceeds in other processes.

A thread of this process collects what the ranks do, ten times per second, and notifies the observers. The run and its
picture therefore proceed after the cell that started it has returned, and even while a later cell blocks.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from mpkit.common.display import draw, in_notebook
from mpkit.common.exceptions import one_line
from mpkit.common.tracebacks import public
from mpkit.launch.launched_rank import LaunchedRank
from mpkit.launch.session.launched_cluster import ProgressLine, provable_here
from mpkit.launch.session.observer import Observer, Observers
from mpkit.launch.session.run_list import keep
from mpkit.launch.session.run_results import RunResults
from mpkit.strategies.checkpoint.foreign_files import lock_folder
from mpkit.strategies.checkpoint.lock import FolderLock
from mpkit.strategies.proof.proof_thread import ProofThread
from mpkit.trace.proof import Proof

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.prepare.prepare import TrainJob

__all__ = ["Observer", "Run"]

TICK = 0.1
"""Seconds between two ticks."""


@public
class Run(RunResults):
    """A running or finished training on the ranks of a cluster. Made by `Cluster.train`.

    Attributes:
        plan: the Plan it follows.
        steps: the total number of steps, including those before the checkpoint that it resumes from.
        first_step: the number of the first step that this run does itself: 0, or where that checkpoint ends.

    >>> import mpkit as mk
    >>> import tempfile, torch
    >>> how = dict(
    ...     model=torch.nn.Linear(4, 1),
    ...     data=mk.Batches(torch.utils.data.TensorDataset(torch.randn(10, 4), torch.randn(10, 1)), batch_size=4),
    ...     loss=torch.nn.functional.mse_loss,
    ...     optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    ... )
    >>> with tempfile.TemporaryDirectory() as folder, mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     run = cluster.train(**how, plan=mk.Plan.ddp(2), steps=4, checkpoint_every=2, checkpoint_dir=folder)
    ...     _ = run.wait()
    ...     run = cluster.train(**how, plan=mk.Plan.ddp(2), steps=6, resume_from=folder)
    ...     run.first_step, len(run.wait().losses)
    (4, 2)
    """

    def __init__(
        self,
        cluster: Cluster,
        job: TrainJob,
        *,
        timeout: float | None = None,
        show: bool | None = None,
        observers: tuple[Observer, ...] = (),
        board: Any = None,
    ) -> None:
        from mpkit.strategies.packing.edited_modules import installed_modules
        from mpkit.strategies.runtime.train import train

        self._observers = Observers(observers)
        self._over = threading.Event()  # set when the run has ended and every observer has been notified
        launch = cluster.launch(
            train,
            (job,),
            timeout=timeout,
            sink=self._observers.output,
            flush=self._observers.flush,
            meta=job.meta,
            modules=installed_modules(job.what.model),
            compares=False,
        )
        super().__init__(job, launch, cluster)
        self._dashboard: Any = None
        try:
            self._saves_alone = self._lock()
            if isinstance(launch, LaunchedRank):
                job = provable_here(job, launch)
            self._proving = ProofThread(job, launch.folder, lambda: launch.losses)
            if isinstance(launch, LaunchedRank):
                if launch.leads and (show or (show is None and sys.stderr.isatty())):
                    self._observers.add(ProgressLine())
            elif show or (show is None and in_notebook()):
                self.show(board)
        except BaseException:
            self._launch.end()
            raise
        self._thread = threading.Thread(target=self._follow, name="mpkit-run", daemon=True)
        atexit.register(self._abandon)
        self._thread.start()

    def _lock(self) -> FolderLock | None:
        """Lock the checkpoint folder against other trainings; called before any rank is started."""
        how = self._job.how
        if how.saving is None or not self._launch.leads:
            return None
        return lock_folder(how.saving, how.resume, how.steps)

    # ---- while it runs ------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the ranks are started."""
        return self._launch.pids

    @property
    def waiting_for(self) -> str | None:
        """Which ranks have waited for others for at least 10 s, where those are, and whether they use CPU time."""
        return self._launch.waiting_for

    def wait(self) -> Run:
        """Wait until the run is over, and return the Run. Interrupting the wait stops the run.

        Raises:
            RankFailed: a rank raised or was killed; the error carries that rank's own traceback.
            Deadlock: the ranks waited for each other.
        """
        try:
            self.join()
        except KeyboardInterrupt:
            self.stop()
            raise
        self._launch.raise_error()
        return self

    def join(self) -> None:
        """Wait until the run is over, however it ends."""
        while not self._over.wait(0.2):  # a wait without a timeout cannot be interrupted on every system
            pass

    def stop(self) -> Run:
        """End the ranks now, and return the Run. Losses and trace keep what was recorded so far."""
        self._launch.end()
        self._over.wait(10.0)
        return self

    def look(self, observer: Observer) -> None:
        """Notify `observer` of everything from now on."""
        with self._observers.telling:
            self._observers.add(observer)
            if self.done:
                self._observers.tell("end", self)

    # ---- shown --------------------------------------------------------------------------------------------

    def show(self, board: Any = None) -> None:
        """Show the run's picture: the live one in a notebook, else the newest step as text.

        Args:
            board: a view that was displayed while the run was prepared; None: display one here.
        """
        if not in_notebook():
            print(self.timeline())
            return
        self._dashboard = draw(self, "widget", board)
        self.look(self._dashboard)

    @property
    def shown(self) -> bool:
        """Whether a live view of the run was shown in a notebook."""
        return self._dashboard is not None

    def __repr__(self) -> str:
        losses = self.losses
        at = f", loss {losses[-1]:.4g}" if losses else ""
        stop = self.stopped_early
        why = f"; ended by on_step on rank {stop.rank}: {stop.reason}" if stop is not None else ""
        known = not self.proof.difference and (self.proof.steps or self.proof.why_not)
        proof = f"; {self.proof}" if known else ""
        step = f"step {self.first_step + len(losses)} of {self.steps}"
        return f"<Run of {self.plan}: {self.status}, {step}{at}{why}{proof}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._dashboard is None:
            return {"text/plain": repr(self)}
        bundle: dict[str, Any] = self._dashboard.mimebundle()
        return bundle

    # ---- the thread ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        looked = 0.0

        def tick() -> None:
            nonlocal looked
            self._look_at_proof()
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                self._observers.tell("tick", self)

        try:
            self._launch.finish(TICK, tick)
        except BaseException as error:  # the launch has ended with this error, which `wait` raises
            self._launch.end(error)
        finally:
            atexit.unregister(self._abandon)
            try:
                self._proving.finish()
                self._look_at_proof()
                if self._launch.error is not None:
                    self._launch.trace.meta["failed"] = one_line(self._launch.error)
                if self._launch.leads and self._launch.error in (None, self._proving.error):
                    self._proving.note_first_times()
                    self._launch.trace.meta["proof"] = self.proof.to_dict()
                if self._saves_alone is not None:
                    self._saves_alone.release()
                with self._observers.telling:
                    self._ended = True
                    self._observers.tell("end", self)
                if in_notebook():
                    keep(self)
            finally:
                self._over.set()

    def _look_at_proof(self) -> None:
        """End the run if a step was found that is not that of serial training."""
        if self._proving.error is not None and self._launch.error is None:
            self._launch.error = self._proving.error
            self._launch.kill()

    @property
    def proof(self) -> Proof:
        """Whether the run is equal to serial training: which of its steps were compared, and how close they are."""
        return self._proving.proof

    def _abandon(self) -> None:
        """Stop the ranks because the script ends while they still train."""
        try:
            done = self.first_step + len(self.losses)
            print(
                f"mpkit: the script ended after step {done} of {self.steps}, and the ranks with it; "
                "run.wait() waits for them",
                file=sys.stderr,
            )
        finally:
            self.stop()
