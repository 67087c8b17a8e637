"""What is known of a run: how it stands, and its results, while it proceeds and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.tracebacks import public
from mpkit.errors import MpkitError
from mpkit.launch.session.losses import Losses
from mpkit.strategies.data.digest import read_taken
from mpkit.strategies.stage.shard import put_together_by_name
from mpkit.timeline.token_routes import TokenRoutes, token_routes
from mpkit.trace.attention_work import AttentionWork, attention_work_of

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.devices.hardware import Hardware
    from mpkit.launch.launch import Launch
    from mpkit.launch.launched_rank import LaunchedRank
    from mpkit.launch.session.cluster import Cluster
    from mpkit.launch.session.what_if_result import WhatIf
    from mpkit.strategies.placement.placed_ranks import Placement
    from mpkit.strategies.prepare.prepare import TrainJob
    from mpkit.timeline.live_timeline import LiveFeed
    from mpkit.timeline.timeline import Timeline
    from mpkit.trace import Trace
    from mpkit.trace.expert_load import ExpertLoad
    from mpkit.trace.metrics import Metrics, Stop

__all__ = ["RunResults"]


@public
class RunResults:
    """The results of a training on the ranks of a cluster, as far as they are known.

    Args:
        job: the training.
        launch: its ranks.
        cluster: what they were started from.
    """

    def __init__(self, job: TrainJob, launch: Launch | LaunchedRank, cluster: Cluster) -> None:
        self.plan = job.plan
        self.steps = job.how.steps
        self.first_step = job.how.first_step
        self._job = job
        self._launch = launch
        self._ended = False
        self._cluster = cluster

    # ---- how a view shows it -----------------------------------------------------------------------------

    blocks = False
    """Whether its cell runs until the run is over."""

    @property
    def title(self) -> str:
        """The plan, in a few words."""
        return self.plan.describe().split(". ")[0].rstrip(".")

    @property
    def theory(self) -> float | None:
        """The bubble according to the schedule's formula, or None."""
        theory = self.plan.bubble_in_theory
        return float(theory) if theory else None

    # ---- how it stands ------------------------------------------------------------------------------------

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
    def error(self) -> Exception | None:
        """The error that the run failed with, or None."""
        return self._launch.error

    # ---- what its ranks recorded --------------------------------------------------------------------------

    @property
    def losses(self) -> Losses:
        """The loss of every step finished so far, equal to serial training's; the first is that of `first_step`.

        The list says that it is incomplete when it is shown while the run goes on.
        """
        going = not self.done  # before the losses are read, which may be complete by then
        losses = self._launch.losses
        return Losses(losses, self._so_far(len(losses), going))

    @property
    def metrics(self) -> Metrics:
        """What `ctx.log` and `evaluate=` logged so far: `run.metrics["eval loss"]` is a dict of the value by step.

        `run.metrics.to_dataframe()` has those of all ranks.
        """
        return self.trace.metrics

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

    def _so_far(self, done: int, going: bool) -> str:
        """Say why there are no losses after `done` steps; "" if all requested steps are done."""
        at = self.first_step + done
        if going:
            return f"{at} of {self.steps} steps are done and the run goes on; run.wait() waits for its end"
        if self.stopped_early is not None:
            step, rank, reason = self.stopped_early
            return f"on_step on rank {rank} ended the run after step {step + 1} of {self.steps}: {reason}"
        return "" if at >= self.steps else f"the run {self._ended_how()} after step {at} of {self.steps}"

    def _ended_how(self) -> str:
        return {"failed": "failed", "stopped": "was stopped"}.get(self.status, "ended")

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

    @property
    def trace(self) -> Trace:
        """The records of every rank so far."""
        return self._launch.trace

    def feed(self) -> LiveFeed:
        """Return a new reader of this run's records, which replays them as they arrive."""
        from mpkit.timeline.live_timeline import LiveFeed

        return LiveFeed(self._launch.folder, self._launch.ranks, self._launch.meta)

    # ---- what follows from that ---------------------------------------------------------------------------

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
        timeline = Timeline.of(self.trace, hardware, clock)
        if read is not None:
            timeline.notes.append(
                f"What the DataLoader gave was read before the start, in {read['seconds']:.3g} s, which "
                "is in none of these times; mk.Batches(dataset, batch_size) loads on the ranks, where it counts."
            )
        if going:
            timeline.so_far = self._so_far(len(self._launch.losses), going)
            timeline.notes.append(f"So far: {timeline.so_far}.")
        return timeline

    def placement(self, hardware: Hardware | str | None = None) -> Placement:
        """Show which rank holds which layers, rows and columns, and which ranks communicate over which link.

        Args:
            hardware: the machine with its nodes and links; None: that of the run, if it was a catalogued machine.
        """
        from mpkit.strategies.placement.placement import placement_of

        return placement_of(self._launch.meta, self.plan.ranks, model=self._job.what.model, hardware=hardware)

    def what_if(self, **changes: Any) -> WhatIf:
        """Predict this run's step after some changes, from the times that it recorded.

        The changes apply in the given order, and the result says what each of them contributes. A changed plan is
        played without its tensors (`mk.trace_fake`), with the run's own times: it takes seconds, and trains nothing.

        Args:
            changes: link: how many times as fast messages and collectives are. overlap=False: each rank waits for every
                collective and every message that it sends. ranks: of the axis that has several, else dp.
                cut="balanced". Any other field of a Plan: microbatches, schedule, virtual_stages, zero, bucket_mb, ...

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
        from mpkit.common.upward_calls import provide_method

        own = self._cluster
        helper = own.resized(1) if own.device == "cpu" and own.fork_server_pid is not None else None
        found: WhatIf = provide_method("Run.what_if")(self, self._job, helper, changes)
        return found

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
