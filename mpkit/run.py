"""Run: the handle a notebook holds on a training that goes on elsewhere.

A thread of this process takes in what the ranks do, ten times a second, and tells whoever looks on. So a run goes
on, and its picture moves, while the cell that started it has long returned or a later one blocks.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from mpkit.errors import MpkitError
from mpkit.onlooker import Onlooker
from mpkit.parallel.digest import read_taken
from mpkit.parallel.shard import put_together_by_name

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.cluster import Cluster
    from mpkit.devices import Hardware
    from mpkit.live import LiveFeed
    from mpkit.places import Placement
    from mpkit.prepare import TrainJob
    from mpkit.timeline import Timeline
    from mpkit.trace import Trace

__all__ = ["Onlooker", "Run"]

TICK = 0.1
"""Seconds between two looks."""


class Run:
    """A training that goes on, or went, on the ranks of a cluster. Made by `Cluster.train`.

    Attributes:
        plan: the Plan it follows.
        steps: how many steps it was asked for, those before a checkpoint that it goes on from included.
        first_step: the number of the first step that it does itself: 0, or where that checkpoint ends.

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
        onlookers: tuple[Onlooker, ...] = (),
    ) -> None:
        from mpkit.launch.installed import installed_modules
        from mpkit.parallel.train import train

        self.plan = job.plan
        self.steps = job.steps
        self.first_step = job.first_step
        self._job = job
        self._onlookers: list[Onlooker] = list(onlookers)
        self._telling = threading.RLock()  # held while onlookers are told, or one joins them
        self._ended = False
        self._over = threading.Event()  # ended, and every onlooker has been told
        self._launch = cluster.launch(
            train,
            (job,),
            timeout=timeout,
            sink=self._output,
            meta=job.meta,
            modules=installed_modules(job.model),
        )
        self._dashboard: Any = None
        if show or (show is None and _in_notebook()):
            self.show()
        self._thread = threading.Thread(target=self._follow, name="mpkit-run", daemon=True)
        atexit.register(self._abandon)
        self._thread.start()

    # ---- while it goes ------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it is over: finished, stopped or failed."""
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
        """Process ids by rank; empty until they are started."""
        return self._launch.pids

    @property
    def error(self) -> Exception | None:
        """What went wrong, or None."""
        return self._launch.error

    def wait(self) -> Run:
        """Until it is over; returns the Run. Interrupting the wait stops the run.

        Raises:
            RankFailed: a rank raised or was killed; with that rank's own traceback.
            Deadlock: the ranks waited for each other.
        """
        try:
            while not self._over.wait(0.2):  # a wait without end could not be interrupted everywhere
                pass
        except KeyboardInterrupt:
            self.stop()
            raise
        if self._launch.error is not None:
            raise self._launch.error
        return self

    def stop(self) -> Run:
        """End the ranks now. Losses and trace stay as far as they came; returns the Run."""
        self._launch.kill()
        self._over.wait(10.0)
        return self

    def look(self, onlooker: Onlooker) -> None:
        """Tell `onlooker` what happens from now on."""
        with self._telling:
            self._onlookers.append(onlooker)
            if self.done:
                self._tell("end", self)

    # ---- what it left -------------------------------------------------------------------------------------

    @property
    def losses(self) -> list[float]:
        """The loss of every step finished so far, equal to serial training's; the first is that of `first_step`."""
        return self.trace.losses

    @property
    def data_digest(self) -> list[list[str]]:
        """By step, by rank: the SHA-256 of what the rank took of the step's batch, as `mk.data_digest` makes it.

        A rank without samples, such as one in the middle of a pipeline, has the digest of nothing. The steps are
        those that every rank has begun, from `first_step` on.
        """
        return read_taken(self._launch.folder, self._launch.ranks)[0]

    @property
    def samples_seen(self) -> list[list[list[str]]]:
        """By step, by rank: a digest of each sample that the rank took, as `mk.sample_digests` makes them.

        No sample was lost and none seen twice if those of all ranks together are those of the whole batch; over an
        epoch, `mk.sample_digests` of the whole dataset.
        """
        return read_taken(self._launch.folder, self._launch.ranks)[1]

    @property
    def trace(self) -> Trace:
        """What every rank recorded, so far."""
        return self._launch.trace

    def feed(self) -> LiveFeed:
        """A new reader of this run's records that replays them as they come."""
        from mpkit.live import LiveFeed

        return LiveFeed(self._launch.folder, self._launch.ranks, self._launch.meta)

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """The run on a clock.

        Args:
            hardware: the name of a catalogued machine (`mk.hardware()` lists them) or a `Hardware` to replay the
                run on; None: the one it ran on.
            clock: "measured" (the wall clock) or "virtual" (every rank on a device of its own); None: measured
                on GPUs, virtual on CPU processes, which share their cores.
        """
        from mpkit.replay import replay

        return replay(self.trace, hardware, clock)

    def placement(self, hardware: Hardware | str | None = None) -> Placement:
        """Which rank holds which layers and which rows and columns of them, and who talks over which link: a picture.

        Args:
            hardware: with its nodes and links; None: that of the run, if it was a catalogued machine.
        """
        from mpkit.placing import placement_of

        return placement_of(self._launch.meta, self.plan.ranks, model=self._job.model, hardware=hardware)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights: whole, on the CPU, with the model's own names.

        Raises:
            RankFailed: the run failed.
            MpkitError: the run was stopped before its end, or still goes on.
        """
        if self._launch.error is not None:
            raise self._launch.error
        if self.status != "finished":
            raise MpkitError(
                f"this run is {self.status}: its weights are known when it has finished; run.wait() first"
                if not self.done
                else "this run was stopped before its end, and its weights went with its ranks; "
                f"{self.first_step + len(self.losses)} of {self.steps} steps were done: train for as many to have them"
            )
        return put_together_by_name(self._job.names, self._launch.results())

    def show(self) -> None:
        """The run's picture: in a notebook the live one, else the newest step as text."""
        if not _in_notebook():
            print(self.timeline())
            return
        from mpkit.views.dashboard import show_run

        self._dashboard = show_run(self)
        self.look(self._dashboard)

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
        try:
            while not self._launch.poll(TICK):
                if time.monotonic() - looked >= TICK:
                    looked = time.monotonic()
                    self._tell("tick", self)
        finally:
            atexit.unregister(self._abandon)
            with self._telling:
                self._ended = True
                self._tell("end", self)
            self._over.set()

    def _tell(self, what: str, value: Any) -> None:
        """Tell every onlooker; one that fails is told nothing more, and the run goes on."""
        with self._telling:
            for onlooker in list(self._onlookers):
                try:
                    getattr(onlooker, what)(value)
                except Exception as error:
                    self._onlookers.remove(onlooker)
                    trouble = f"{type(error).__name__}: {error}"
                    print(f"mpkit: a view of the run stopped ({trouble}); the run goes on", file=sys.stderr)

    def _output(self, line: str) -> None:
        if self._onlookers:
            self._tell("output", line)
        else:
            print(line, flush=True)

    def _abandon(self) -> None:
        """The script ends while ranks still train."""
        done = self.first_step + len(self.losses)
        print(
            f"mpkit: the script ended after step {done} of {self.steps}, and the ranks with it; "
            "run.wait() waits for them",
            file=sys.stderr,
        )
        self.stop()


def _in_notebook() -> bool:
    """Whether output goes to a Jupyter front end."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None
