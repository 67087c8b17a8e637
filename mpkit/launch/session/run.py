"""Run: a notebook's handle on a training that proceeds in other processes.

A thread of this process follows the ranks, ten times per second, and notifies observers. The run and its picture
therefore proceed after the cell that started it has returned, and even while a later cell blocks.
"""

from __future__ import annotations

import atexit
import sys
import threading
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mpkit.common.display import draw, in_notebook
from mpkit.common.exceptions import one_line
from mpkit.common.tracebacks import public
from mpkit.errors import MpkitError
from mpkit.launch.launched_rank import LaunchedRank
from mpkit.launch.session.execution import TICK, Execution, ProgressLine
from mpkit.strategies.checkpoint.files import lock_folder
from mpkit.strategies.data.digest import read_taken
from mpkit.strategies.proof.proof_thread import ProofThread
from mpkit.strategies.stage.shard import put_together_by_name
from mpkit.timeline.traffic import TokenRoutes, token_routes
from mpkit.trace.attention_work import AttentionWork, attention_work_of
from mpkit.trace.proof import Proof

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.devices.hardware import Hardware
    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.placement.placement import Placement
    from mpkit.strategies.prepare.prepare import TrainJob
    from mpkit.timeline.timeline import Timeline
    from mpkit.trace.expert_load import ExpertLoad
    from mpkit.trace.metrics import Stop


@public
class Run(Execution):
    """A running or finished training on the ranks of a cluster. Made by `Cluster.train`.

    Attributes:
        plan: the Plan it follows.
        steps: the total number of steps, including those before the checkpoint that it resumes from.
        first_step: the number of the first step that this run does itself: 0, or where that checkpoint ends.
        done: whether it is over: finished, stopped or failed.

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

    blocks = False
    steps: int

    def __init__(
        self, cluster: Cluster, job: TrainJob, *, timeout: float | None = None, show: bool | None = None,
        board: Any = None,
    ) -> None:  # fmt: skip
        from mpkit.strategies.packing.world import installed_modules
        from mpkit.strategies.runtime.train import train

        self.plan, self.steps, self.first_step = job.plan, job.how.steps, job.how.first_step
        self.theory = float(job.plan.bubble_in_theory or 0) or None
        self._job, self._cluster = job, cluster
        self._dashboard: Any = None
        self._over = threading.Event()  # set when the run has ended and every observer has been notified
        saving = job.how.saving if cluster.rank == 0 else None
        self._folder_lock = lock_folder(saving) if saving is not None else None  # against other trainings
        try:
            super().__init__(
                cluster.launch, job.plan.describe().split(". ")[0].rstrip("."), train, (job,), timeout=timeout,
                meta=job.meta, modules=installed_modules(job.what.model), compares=False,
            )  # fmt: skip
            launch = self._launch
            if not launch.leads:
                job = job.without_proof("rank 0's process compares the steps, and has `run.proof`")
            self._proving = ProofThread(job, launch.folder, lambda: launch.losses)
            launched = isinstance(launch, LaunchedRank)
            shows = show or (show is None and (sys.stderr.isatty() if launched else in_notebook()))
            if shows and not launched:
                self.show(board)
            elif shows and launch.leads:
                self._observers.append(ProgressLine())
        except BaseException:
            if hasattr(self, "_launch"):
                self._launch.end()
            self._unlock()
            raise
        self._thread = threading.Thread(target=self.follow, name="mpkit-run", daemon=True)
        atexit.register(self._abandon)
        self._thread.start()

    def _unlock(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.release()

    def work(self) -> Run:
        """Run this process's rank, which a launcher has started, in this thread, and wait for the others."""
        self._launch.work()
        return self.wait()

    def wait(self) -> Run:
        """Wait until the run is over, and return the Run. Interrupting the wait stops the run.

        Raises:
            RankFailed: a rank raised or was killed; the error carries that rank's own traceback.
            Deadlock: the ranks waited for each other.
        """
        try:
            while not self._over.wait(0.2):  # a wait without a timeout cannot be interrupted on every system
                pass
        except KeyboardInterrupt:
            self.stop()
            raise
        self._launch.raise_error()
        return self

    def stop(self) -> Run:
        """End the ranks now, and return the Run. Losses and trace keep what was recorded so far."""
        self._launch.end()
        self._over.wait(10.0)
        return self

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
        return {"text/plain": repr(self)} if self._dashboard is None else dict(self._dashboard.mimebundle())

    def follow(self) -> None:
        """Follow the ranks to their end, in the run's own thread; `wait` raises what they end with."""
        try:
            self._launch.finish(TICK, self._tick)
        except BaseException as error:  # the launch ends with it, and `wait` raises it
            self._launch.end(error)
        finally:
            atexit.unregister(self._abandon)
            try:
                self._proving.finish()
                self._look_at_proof()
                self._note_end()
                self._unlock()
                self._end()
            finally:
                self._over.set()

    def _tick(self) -> None:
        self._look_at_proof()
        super()._tick()

    def _look_at_proof(self) -> None:
        """End the run if a step was found that is not that of serial training."""
        if self._proving.error is not None and self._launch.error is None:
            self._launch.error = self._proving.error
            self._launch.kill()

    def _note_end(self) -> None:
        launch = self._launch
        if launch.error is not None:
            launch.trace.meta["failed"] = one_line(launch.error)
        if launch.leads and launch.error in (None, self._proving.error):
            self._proving.note_first_times()
            launch.trace.meta["proof"] = self.proof.to_dict()

    def _abandon(self) -> None:
        """Stop the ranks because the script ends while they still train."""
        try:
            ended = f"the script ended after step {self.first_step + len(self.losses)} of {self.steps}"
            print(f"mpkit: {ended}, and the ranks with it; run.wait() waits for them", file=sys.stderr)
        finally:
            self.stop()

    @property
    def proof(self) -> Proof:
        """Whether the run is equal to serial training: which of its steps were compared, and how close they are."""
        return self._proving.proof

    @property
    def expert_load(self) -> ExpertLoad:
        """How many rows each expert computed so far, by layer and step: a heatmap in a notebook.

        Raises:
            ValueError: the model has no experts, or no step is done.
        """
        return self.trace.expert_load

    def token_routes(self, layer: str = "", step: int = -1) -> TokenRoutes:
        """Return from which rank to which rank one layer's tokens travelled to their experts: ribbons in a notebook.

        Args:
            layer: a part of the layer's name, such as "block1"; "": the first layer with experts.
            step: the step's place among those that are done; -1: the last one.

        Raises:
            ValueError: the model has no experts, or there is no such layer or step.
        """
        return token_routes(self.trace, layer, step)

    @property
    def attention_work(self) -> AttentionWork:
        """How much attention each rank computed where ranks share sequences: pairs of a query and a key, by step.

        Raises:
            ValueError: ranks share no sequences, or no step is done.
        """
        return attention_work_of(self.trace.ranks, self.plan.mesh.groups("cp"))

    @property
    def stopped_early(self) -> Stop | None:
        """Where and why `on_step` ended the training early: step, rank and reason; None if it did not."""
        return self.trace.stop if self._launch.leads else None  # under a launcher, rank 0 knows

    @property
    def data_digest(self) -> list[list[str]]:
        """By step, by rank: the SHA-256 of the rank's part of the step's batch, as `mk.data.data_digest` computes it.

        A rank without samples, such as one in the middle of a pipeline, has the digest of no data. The steps are
        those that every rank has begun, from `first_step` on.
        """
        return self._read_taken()[0]

    @property
    def samples_seen(self) -> list[list[list[str]]]:
        """By step, by rank: a digest of each sample that the rank took, as `mk.data.sample_digests` computes them.

        No sample was lost and none seen twice if the digests of all ranks together are those of the whole batch,
        and over an epoch those that `mk.data.sample_digests` returns for the whole dataset.
        """
        return self._read_taken()[1]

    def _read_taken(self) -> tuple[list[list[str]], list[list[list[str]]]]:
        if not self._launch.leads:
            raise MpkitError("what all ranks took is known on rank 0: `if cluster.rank == 0:`")
        return read_taken(self._launch.folder, self._launch.ranks)

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Put the run on a clock; while it goes on, what was recorded so far.

        Args:
            hardware: the machine to replay the run on, as a `Hardware` or the name of a catalogued machine
                (`mk.hardware()` lists them); None: the one it ran on.
            clock: "measured" (the wall clock) or "virtual" (every rank on a device of its own); None: measured on GPUs,
                virtual on CPU processes, which share their cores.
        """
        going = not self.done  # before the records are read, which may be complete by then
        timeline = super().timeline(hardware, clock)
        if read := self._launch.meta.get("read_before"):
            timeline.notes.append(
                f"What the DataLoader gave was read before the start, in {read['seconds']:.3g} s, which "
                "is in none of these times; mk.Batches(dataset, batch_size) loads on the ranks, where it counts."
            )
        if going:
            done = f"{self.first_step + len(self._launch.losses)} of {self.steps} steps are done"
            timeline.so_far = f"{done} and the run goes on; run.wait() waits for its end"
            timeline.notes.append(f"So far: {timeline.so_far}.")
        return timeline

    def placement(self, hardware: Hardware | str | None = None) -> Placement:
        """Show which rank holds which layers, rows and columns, and which ranks communicate over which link.

        Args:
            hardware: the machine with its nodes and links; None: that of the run, if it was a catalogued machine.
        """
        from mpkit.strategies.placement.placement import placement

        meta = self._launch.meta
        if hardware is None and meta.get("hardware", "cpu") != "cpu":
            hardware = meta["hardware"]
        return placement(self.plan, self._job.what.model, hardware=hardware, stages=meta["stages"])

    def what_if(self, **changes: Any) -> Any:
        """Predict this run's step after some changes, from the times that it recorded.

        The changes apply in the given order, and the result says what each of them contributes. A changed plan is
        played without its tensors (`mk.trace_fake`), with the run's own times: it takes seconds, and trains nothing.

        Args:
            changes: link: how many times as fast messages and collectives are. ranks: of the axis that has several,
                else dp. cut="balanced". Any other field of a Plan: microbatches, schedule, virtual_stages, zero, ...

        Returns:
            A `WhatIf`: step_time (seconds), bubble, memory (bytes by rank), timeline, causes. It prints as a table and
            shows both timelines on one axis in a notebook.

        Raises:
            ValueError: there is no such change, the plan or the model cannot work so, or the run has no two steps.

        >>> import torch, mpkit as mk
        >>> from mpkit.strategies.data.datasets import spirals
        >>> from mpkit.models import MLP
        >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
        ...     run = cluster.train(
        ...         MLP(2, 3), spirals(64, 1), mk.Plan.gpipe(2, 4), steps=3,
        ...         loss=torch.nn.functional.cross_entropy, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     found = run.wait().what_if(link=2, schedule="1f1b")
        >>> [change for change, seconds in found.causes]
        ['link x2', 'schedule 1f1b']
        """
        own = self._cluster
        free = own.device == "cpu" and own.fork_server_pid is not None and not own.busy
        helper = own.resized(1) if free else None
        return resolve_name("mpkit.prediction.experiments.what_if:what_if")(self, self._job, helper, changes)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights: whole, on the CPU, under the model's own names.

        In 16 bits, they are the fp32 weights that the optimizer updated. Frozen weights and buffers are in 16 bits, as
        the ranks computed with them.

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
        return put_together_by_name(self._job.what.names, [each.state for each in self._launch.results()])

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return the moving average of the weights, which `train(..., ema=0.999)` keeps; buffers as they are.

        Raises:
            MpkitError: the training keeps none, or it has not finished.
        """
        if self._job.how.ema is None:
            raise MpkitError("this run kept no average of its weights: cluster.train(..., ema=0.999) does")
        self.state_dict()  # raises if there is none
        return put_together_by_name(self._job.what.names, [each.averaged for each in self._launch.results()])
