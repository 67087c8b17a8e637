"""Run: a notebook's handle on a training that proceeds in other processes.

A thread of this process collects what the ranks do, ten times per second, and notifies the observers. The run and its
picture therefore proceed after the cell that started it has returned, and even while a later cell blocks.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.api.losses import Losses
from mpkit.api.observer import Observer
from mpkit.data.digest import read_taken
from mpkit.errors import MpkitError
from mpkit.launch.output_reader import flush_stdout
from mpkit.parallel.checkpoint.lock import FolderLock
from mpkit.parallel.stage.shard import put_together_by_name
from mpkit.support.display import draw
from mpkit.support.tracebacks import public

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.analysis.placed_ranks import Placement
    from mpkit.api.cluster import Cluster
    from mpkit.data.feeding import Feeder
    from mpkit.devices.hardware import Hardware
    from mpkit.prepare.prepare import TrainJob
    from mpkit.timeline.live_timeline import LiveFeed
    from mpkit.timeline.timeline import Timeline
    from mpkit.trace import Trace

__all__ = ["Observer", "Run", "in_notebook"]

TICK = 0.1
"""Seconds between two ticks."""


@public
class Run:
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
    ) -> None:
        from mpkit.launch.process.installed import installed_modules
        from mpkit.parallel.runtime.train import train

        self.plan = job.plan
        self.steps = job.how.steps
        self.first_step = job.how.first_step
        self._job = job
        self._observers: list[Observer] = list(observers)
        self._telling = threading.RLock()  # held while observers are notified or added
        self._ended = False
        self._over = threading.Event()  # set when the run has ended and every observer has been notified
        self._launch = cluster.launch(
            train,
            (job,),
            timeout=timeout,
            sink=self._output,
            flush=self._flush,
            meta=job.meta,
            modules=installed_modules(job.what.model),
            compares=False,
        )
        self._dashboard: Any = None
        try:
            self._saves_alone = self._lock()
            self._feeder = self._fed_by(job)
            if show or (show is None and in_notebook()):
                self.show()
        except BaseException:
            self._launch.end()
            raise
        self._thread = threading.Thread(target=self._follow, name="mpkit-run", daemon=True)
        atexit.register(self._abandon)
        self._thread.start()

    def _lock(self) -> FolderLock | None:
        """Lock the checkpoint folder against other trainings; called before any rank is started."""
        return None if self._job.how.saving is None else FolderLock(Path(self._job.how.saving.folder))

    # ---- while it runs ------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the run is over: finished, stopped or failed."""
        return self._ended

    @property
    def status(self) -> str:
        """One of "running", "finished", "stopped" or "failed"."""
        if not self.done:
            return "running"
        if self._launch.error is not None:
            return "failed"
        return "stopped" if self._launch.stopped else "finished"

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the ranks are started."""
        return self._launch.pids

    @property
    def waiting_for(self) -> str | None:
        """Which ranks have waited for others for at least 10 s, where those are, and whether they use CPU time."""
        return self._launch.waiting_for

    @property
    def error(self) -> Exception | None:
        """The error that the run failed with, or None."""
        return self._launch.error

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
        with self._telling:
            self._observers.append(observer)
            if self.done:
                self._tell("end", self)

    # ---- its results --------------------------------------------------------------------------------------

    @property
    def losses(self) -> Losses:
        """The loss of every step finished so far, equal to serial training's; the first is that of `first_step`.

        The list says that it is incomplete when it is shown while the run goes on.
        """
        going = not self.done  # before the losses are read, which may be complete by then
        found = self.trace.losses
        return Losses(found, self._so_far(len(found), going))

    def _so_far(self, done: int, going: bool) -> str:
        """Say why there are no losses after `done` steps; "" if all requested steps are done."""
        at = self.first_step + done
        if going:
            return f"{at} of {self.steps} steps are done and the run goes on; run.wait() waits for its end"
        return "" if at >= self.steps else f"the run {self._ended_how()} after step {at} of {self.steps}"

    def _ended_how(self) -> str:
        return {"failed": "failed", "stopped": "was stopped"}.get(self.status, "ended")

    @property
    def data_digest(self) -> list[list[str]]:
        """By step, by rank: the SHA-256 of the rank's part of the step's batch, as `mk.digest.data_digest` computes it.

        A rank without samples, such as one in the middle of a pipeline, has the digest of no data. The steps are
        those that every rank has begun, from `first_step` on.
        """
        return read_taken(self._launch.folder, self._launch.ranks)[0]

    @property
    def samples_seen(self) -> list[list[list[str]]]:
        """By step, by rank: a digest of each sample that the rank took, as `mk.digest.sample_digests` computes them.

        No sample was lost and none seen twice if the digests of all ranks together are those of the whole batch,
        and over an epoch those that `mk.digest.sample_digests` returns for the whole dataset.
        """
        return read_taken(self._launch.folder, self._launch.ranks)[1]

    @property
    def trace(self) -> Trace:
        """The records of every rank so far."""
        return self._launch.trace

    def feed(self) -> LiveFeed:
        """Return a new reader of this run's records, which replays them as they arrive."""
        from mpkit.timeline.live_timeline import LiveFeed

        return LiveFeed(self._launch.folder, self._launch.ranks, self._launch.meta)

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Put the run on a clock.

        Args:
            hardware: the machine to replay the run on, as a `Hardware` or the name of a catalogued machine
                (`mk.hardware()` lists them); None: the one it ran on.
            clock: "measured" (the wall clock) or "virtual" (every rank on a device of its own); None: measured on GPUs,
                virtual on CPU processes, which share their cores.
        """
        from mpkit.timeline.timeline import Timeline

        going = not self.done
        read = self._launch.meta.get("read_before")
        found = Timeline.of(self.trace, hardware, clock)
        if read is not None:
            found.notes.append(
                f"What the DataLoader gave was read before the start, in {read['seconds']:.3g} s, which "
                "is in none of these times; mk.Batches(dataset, batch_size) loads on the ranks, where it counts."
            )
        if going:
            found.so_far = self._so_far(len(self.trace.losses), going)
            found.notes.append(f"So far: {found.so_far}.")
        return found

    def placement(self, hardware: Hardware | str | None = None) -> Placement:
        """Show which rank holds which layers, rows and columns, and which ranks communicate over which link.

        Args:
            hardware: the machine with its nodes and links; None: that of the run, if it was a catalogued machine.
        """
        from mpkit.analysis.placement import placement_of

        return placement_of(self._launch.meta, self.plan.ranks, model=self._job.what.model, hardware=hardware)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights: whole, on the CPU, under the model's own names.

        Raises:
            RankFailed: the run failed.
            MpkitError: the run was stopped before its end, or is still running.
        """
        self._launch.raise_error()
        if self.status != "finished":
            raise MpkitError(
                f"this run is {self.status}: its weights are known when it has finished; run.wait() first"
                if not self.done
                else "this run was stopped before its end, and its weights went with its ranks; "
                f"{self.first_step + len(self.losses)} of {self.steps} steps were done: train for as many to have them"
            )
        return put_together_by_name(self._job.what.names, self._launch.results())

    def show(self) -> None:
        """Show the run's picture: the live one in a notebook, else the newest step as text."""
        if not in_notebook():
            print(self.timeline())
            return
        self._dashboard = draw(self, "widget")
        self.look(self._dashboard)

    @property
    def shown(self) -> bool:
        """Whether a live view of the run was shown in a notebook."""
        return self._dashboard is not None

    def __repr__(self) -> str:
        losses = self.losses
        at = f", loss {losses[-1]:.4g}" if losses else ""
        return (
            f"<Run of {self.plan}: {self.status}, step {self.first_step + len(losses)} of {self.steps}{at}>"
        )

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
            self._look_at_data()
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                self._tell("tick", self)

        try:
            self._launch.finish(TICK, tick)
        except BaseException as error:  # the launch has ended with this error, which `wait` raises
            self._launch.end(error)
        finally:
            atexit.unregister(self._abandon)
            if self._feeder is not None:
                self._feeder.close()
            if self._saves_alone is not None:
                self._saves_alone.release()
            try:
                with self._telling:
                    self._ended = True
                    self._tell("end", self)
            finally:
                self._over.set()

    def _fed_by(self, job: TrainJob) -> Feeder | None:
        """Start a reader that feeds streamed data to the ranks; None if the data is no stream."""
        from mpkit.data.stream import Stream

        if not isinstance(job.what.batches, Stream):
            return None
        from mpkit.data.feeding import Feeder

        steps = range(job.how.first_step, job.how.steps)
        return Feeder(job.what.batches, self._launch.folder, steps, self._launch.ranks)

    def _look_at_data(self) -> None:
        """End the run with the data's error if the stream failed or ran out."""
        error = self._feeder.error if self._feeder is not None else None
        if error is not None and self._launch.error is None:
            self._launch.error = error
            self._launch.kill()

    def _tell(self, what: str, value: Any) -> None:
        """Notify every observer; one that raises is removed, and the run goes on."""
        with self._telling:
            for observer in list(self._observers):
                try:
                    getattr(observer, what)(value)
                except Exception as error:
                    self._observers.remove(observer)
                    trouble = f"{type(error).__name__}: {error}"
                    with suppress(OSError, ValueError):  # standard error may be closed
                        print(
                            f"mpkit: a view of the run stopped ({trouble}); the run goes on", file=sys.stderr
                        )

    def _output(self, line: str) -> None:
        if self._observers:
            self._tell("output", line)
        else:
            print(line)

    def _flush(self) -> None:
        if not self._observers:
            flush_stdout()

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


def in_notebook() -> bool:
    """Whether output goes to a Jupyter front end."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None
