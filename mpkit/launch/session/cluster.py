"""Cluster: ranks on this machine, fresh for every run."""

from __future__ import annotations

import copy
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mpkit.common.calls import answers
from mpkit.common.display import draw, in_notebook
from mpkit.common.missing_packages import require_torch
from mpkit.common.tracebacks import public
from mpkit.devices.local.choose import check_ranks, devices_html, devices_text, place_ranks
from mpkit.errors import MpkitError
from mpkit.launch.hang.hang import check_timeout
from mpkit.launch.launch import Helper, Launch, RankLaunch, import_ahead
from mpkit.launch.place import is_launched, place_here, refuse_second_launcher
from mpkit.launch.process.fork_server import ForkServerClient
from mpkit.launch.process.payload import check_function, pack, settings_here
from mpkit.strategies.packing.world import report_what_stays

if TYPE_CHECKING:
    import torch

    from mpkit.devices.hardware import Hardware
    from mpkit.launch.session.run import Run
    from mpkit.launch.torchrun import Launcher
    from mpkit.plan.plan import Plan
    from mpkit.timeline.timeline import Timeline
    from mpkit.trace import Trace


EXAMPLE = """\
cluster.train(
    model,
    data,  # [(inputs, targets), ...], or mk.Batches(dataset, batch_size=32)
    mk.Plan.ddp(2),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    steps=10,
)"""


def elsewhere() -> dict[str, str]:
    """Return what other libraries call arguments of `Cluster.train`, and what to use here."""
    return tomllib.loads((files(__package__) / "elsewhere.toml").read_text(encoding="utf-8"))


@public
class Cluster:
    """Ranks on this machine: processes that run your function, or train your model.

    Making a cluster is cheap: a helper process imports torch in the background, and for every run the ranks are
    forked from it, so that nothing carries over from one run to the next. Meanwhile a thread of this process imports
    what `train` will need.

    >>> import mpkit as mk
    >>> import torch
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(lambda ctx: ctx.comm.all_reduce(torch.ones(2) * ctx.rank).tolist())
    [[1.0, 1.0], [1.0, 1.0]]

    Args:
        ranks: the number of processes; with `devices` one per device by default. None where a launcher has started
            them (torchrun, srun, mpirun): see `from_env`.
        device: "auto" (GPUs if there are any, else CPU processes), "cpu", "cuda", another kind of accelerator ("xpu",
            "hpu", "mps"), or one of them ("cuda:1"), which all ranks share. Ranks on GPUs use nccl if each has a GPU
            of its own; else, and on other accelerators, gloo through the host's memory.
        devices: which device each rank is on: [2, 0] puts rank 0 on the GPU that torch counts as 2; "cuda:1",
            ["xpu:0", "xpu:1"], or "cuda" for all. More ranks than devices share them in turn. What
            CUDA_VISIBLE_DEVICES hides is not there; `print(cluster)` says who is where, and which variable decided.
            Under a launcher the list is for the ranks of one node, by LOCAL_RANK.
        layers: record every layer of the model, not only whole actions.
        start: "fork" (fast) or "spawn" (a fresh interpreter per rank; the default where forking is not safe).

    Raises:
        ValueError: the number of ranks or the device is not available here.
    """

    @answers("mk.Cluster(ranks=4)")
    def __init__(
        self, ranks: int | None = None, device: str = "auto", *, devices: Any = None, layers: bool = False,
        start: str | None = None,
    ) -> None:  # fmt: skip
        require_torch("mk.Cluster")
        launched = ranks is None and is_launched()
        if not launched:
            refuse_second_launcher()
        self._chosen = chosen = place_ranks(1 if launched and devices is None else ranks, device, devices)
        self.ranks, self.device, self.devices = chosen.ranks or 0, chosen.kind, len(chosen.numbers)
        self.backend = "nccl" if self.device == "cuda" and chosen.one_each(self.ranks) else "gloo"
        self.layers = layers
        if start not in (None, "fork", "spawn"):
            raise ValueError(f"start={start!r}: there are 'fork' and 'spawn', or leave it out")
        self._session: Launcher | None = None
        if launched:
            from mpkit.launch.torchrun import Launcher

            self._session = Launcher(chosen)
            self.ranks, self.backend = self._session.ranks, self._session.backend
        self._fork = start == "fork" if start else sys.platform == "linux"
        self._helper = Helper(None if launched else self._fork_server_maker())
        self._imports = import_ahead()
        self._latest: RankLaunch | None = None

    @classmethod
    def from_env(cls, device: str = "auto", *, layers: bool = False) -> Cluster:
        """Return the cluster of the ranks that a launcher has started, of which this process is one.

        Under torchrun, SLURM's srun or mpirun, on one machine or several, every process runs the same script and makes
        the same calls. `train` and `run` then run this process's rank here, and return when all ranks have finished.
        The results of `run`, `run.losses` and `run.state_dict()` are the same on every rank; `run.trace` and
        `run.timeline()` are those of rank 0. See docs/many-machines.md.

        Raises:
            ValueError: no launcher's variables are set.
            MpkitError: not all processes came.
        """
        place_here()  # says what is missing
        return cls(None if is_launched() else 1, device, layers=layers)

    @property
    def rank(self) -> int:
        """This process's rank under a launcher; 0 where this process starts the ranks itself."""
        return 0 if self._session is None else self._session.rank

    def _fork_server_maker(self) -> Callable[[], ForkServerClient]:
        return partial(ForkServerClient, self._fork)

    def __repr__(self) -> str:
        state = "closed" if self._helper.closed else self.backend
        first = f"Cluster(ranks={self.ranks}, device={self.device!r})  # {state}"
        rows = self._session.devices if self._session else None
        return first if self.device == "cpu" else f"{first}\n{devices_text(self._chosen, self.ranks, rows)}"

    def _repr_html_(self) -> str | None:
        rows = self._session.devices if self._session else None
        return None if self.device == "cpu" else devices_html(self._chosen, self.ranks, rows)

    @property
    def _last_gpu(self) -> int | None:
        started = self.device == "cuda" and self._session is None
        return self._chosen.number_of(self.ranks - 1) if started else None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def fork_server_pid(self) -> int | None:
        """Process id of the helper process, the parent of all ranks; None if there is none now."""
        fork_server = self._helper.fork_server
        return fork_server.pid if fork_server is not None and fork_server.alive else None

    def resized(self, ranks: int) -> Cluster:
        """Return a cluster of another number of ranks that shares this helper process; one of them may run at a time.

        Raises:
            ValueError: there can be no such number of ranks, or this cluster is closed.
        """
        self._check_open(ranks)
        if self._session is not None and ranks != self.ranks:
            raise ValueError(
                f"the launcher has started {self.ranks} ranks, and {ranks} are asked for: start the script with as "
                "many (torchrun --nproc-per-node), or without a launcher, where a Cluster starts its ranks itself"
            )
        other = copy.copy(self)
        other.ranks, other._latest = check_ranks(ranks), None
        if self._session is None:
            other.backend = "nccl" if other.device == "cuda" and self._chosen.one_each(ranks) else "gloo"
        return other

    def _check_open(self, ranks: int) -> None:
        if self._helper.closed:
            raise ValueError(f"this cluster is closed; make a new one: mk.Cluster(ranks={ranks})")

    @property
    def busy(self) -> bool:
        """Whether something runs on this cluster, or on one that shares its helper process."""
        return self._helper.latest is not None and not self._helper.latest.has_ended

    def _check_free(self) -> None:
        if self.busy:
            shared = "the cluster whose helper process this one shares (cluster.resized)"
            whose = "this cluster" if self._helper.latest is self._latest else shared
            raise ValueError(
                f"{whose} is still busy with an earlier run: run.wait() for its end, or run.stop() it; for runs side "
                f"by side make another Cluster: mk.Cluster(ranks={self.ranks})"
            )

    def close(self) -> None:
        """Stop whatever runs, and the helper process. A closed cluster cannot be used again."""
        self._helper.closed = True
        if self._helper.fork_server is not None:
            self._helper.fork_server.close()

    @answers("cluster.run(lambda ctx: ctx.rank)")
    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool | int = False
    ) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank and wait; what the ranks print appears here, labelled.

        Args:
            fn: a function whose first argument is a `Context`; may be a lambda or defined in this notebook.
            args: further arguments, sent to every rank by value.
            timeout: seconds without progress on any rank after which a hang is reported, also of ranks that compute.
                None: a rank that uses CPU time is never given up; if none does, a hang is reported after half a second
                where no rank can ever go on, after 30 s where all ranks wait or are stopped, and after 600 s otherwise.
                After 10 s a line says which rank the others wait for, and where it is.
            watch: record what `fn` does although it does not know of mpkit: communication of torch.distributed, DDP,
                FSDP and pipelining; forwards, backwards and optimizer steps; memory. True records a model's repeated
                blocks, a number its modules down to that depth. A notebook shows it live; `cluster.timeline()` has it.

        Returns:
            What `fn` returned, by rank.

        Raises:
            RankFailed: a rank raised or was killed; the error carries that rank's own traceback.
            CommMismatch: the calls of two ranks for one collective or message do not match.
            Deadlock: the ranks wait for each other.
            ValueError: `fn` or an argument cannot be sent to other processes, or an earlier run still goes on.
        """
        check_function(fn, args)
        if watch is not False:
            return self._run_watched(fn, args, watch, timeout)
        from mpkit.strategies.program_calls.communication import ComparedFunction

        launch = self.launch(ComparedFunction(fn), args, timeout=timeout)
        launch.work()
        return launch.results()

    def _run_watched(
        self, fn: Callable[..., Any], args: tuple[Any, ...], watch: bool | int, timeout: float | None
    ) -> list[Any]:
        """Run a function, recorded; in a notebook its dashboard is filled while its cell runs."""
        from mpkit.launch.session.execution import Execution
        from mpkit.launch.watch.program import NEEDED, check_watch, watch_function

        execution = Execution(
            self.launch, getattr(fn, "__name__", type(fn).__name__), watch_function, (fn, check_watch(watch), *args),
            timeout=timeout, modules=NEEDED, meta={"watched": True},
        )  # fmt: skip
        assert self._latest is not None
        if in_notebook():
            execution.look(draw(execution, "widget"))
            execution.follow()
        else:
            self._latest.work()
        return self._latest.results()

    @property
    def trace(self) -> Trace:
        """What the ranks of the latest `run` or `train` recorded, including your own spans.

        Raises:
            MpkitError: nothing has run on this cluster yet.
        """
        if self._latest is None:
            raise MpkitError("this cluster has no trace yet: cluster.run(fn) or cluster.train(...) first")
        return self._latest.trace

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Put the latest run on a clock; see `Run.timeline`."""
        from mpkit.timeline.timeline import Timeline

        return Timeline.of(self.trace, hardware, clock)

    @answers(EXAMPLE, elsewhere)
    def train(
        self, model: torch.nn.Module, data: Any, plan: Plan | None = None, *,
        loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
        steps: int = 1, seed: int = 0, max_grad_norm: float | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        checkpoint_every: int | None = None, checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_keep: int = 2, resume_from: str | os.PathLike[str] | None = None,
        on_step: Callable[[Any, int], Any] | None = None, evaluate: Any = None, every: int | None = None,
        ema: float | None = None, verify: Any = "first",
        timeout: float | None = None, show: bool | None = None,
    ) -> Run:  # fmt: skip
        """Train `model` as `plan` says. Returns at once; in a notebook the Run shows itself, live.

        Args:
            model: the model whose weights training starts from; it is left unchanged.
            data: sequence of (inputs, targets), each a whole global batch; step i takes data[i % len(data)]. Or
                `mk.Batches` of a dataset, reshuffled in each epoch, of which a rank loads its own samples only. Or an
                iterable that yields batches (a generator, an IterableDataset, a DataLoader of one): this process reads
                it as the ranks need it, a few batches ahead; all batches must have the shapes of the first two.
            plan: the plan to follow; None: `Plan.serial()`.
            loss: loss(outputs, targets) -> scalar, the mean over the batch; or (total, count) if something other than
                samples is counted, such as unmasked targets: the loss is then the sum of totals / the sum of counts.
                Torch's own means are correct as they are, even with masked targets and class weights, and
                `mk.mean_loss` makes a function around one correct; a loss that needs all samples at once takes
                `mk.whole_batch_loss`.
            optimizer: optimizer(params) -> torch.optim.Optimizer, or a list of several. Called on each rank with a list
                of all parameters that are trained, in the model's order, so that groups by index, number or shape are
                those of the whole model; `mk.optimizer.by_name(optimizer)` receives (name, parameter) pairs instead.
            steps, seed: the number of steps, and the seed of every rank's random state.
            max_grad_norm, lr_schedule: clip all gradients together to this norm; the learning rate's factor in a step.
            checkpoint_every: save a checkpoint after every so many steps; None: never. See docs/checkpoints.md.
            checkpoint_dir, checkpoint_keep: the folder for checkpoints, and how many of the newest are kept there.
            resume_from: a checkpoint, or a folder of them, whose newest complete one is resumed, on any plan and any
                number of ranks. `steps` still counts from the very beginning: the same call with resume_from finishes
                a training that was cut short.
            verify: the steps that are compared with plain PyTorch: "first", two and a later one; "all"; some, counted
                from 1, such as (1, 10); or False. `run.proof` says which were equal (docs/proof.md).
            on_step, evaluate, every, ema: what happens between steps (docs/callbacks.md): on_step(ctx, step) on every
                rank; evaluation on data, or (data, metric), every so many steps; the decay of an average of weights.
            timeout, show: as in `run`; whether to show the Run live, None: only in a notebook. A notebook, where cells
                are often run again, stops an earlier training that still runs; elsewhere that is an error.

        Raises:
            ValueError: an argument cannot work; raised before any process starts.
        """
        timeout = check_timeout(timeout)
        with self._instead_of_earlier(), self._shown_ahead(show, plan, steps) as board:
            self._imports.join()
            from mpkit.launch.session.run import Run
            from mpkit.launch.torchrun import agree_on_job
            from mpkit.strategies.prepare.prepare import prepare

            job = agree_on_job(self._session, lambda: prepare(
                model, data, plan, ranks=self.ranks, by_name=self.backend != "nccl", gpu=self._last_gpu,
                loss=loss, optimizer=optimizer, steps=steps, seed=seed, max_grad_norm=max_grad_norm, verify=verify,
                lr_schedule=lr_schedule, checkpoint_every=checkpoint_every, checkpoint_dir=checkpoint_dir, every=every,
                checkpoint_keep=checkpoint_keep, resume_from=resume_from, on_step=on_step, evaluate=evaluate, ema=ema,
            ))  # fmt: skip
        run = self._helper.training = Run(self, job, timeout=timeout, show=show, board=board)
        return run if self._session is None else run.work()

    @contextmanager
    def _instead_of_earlier(self) -> Iterator[None]:
        """Prepare a training in the body while an earlier one still runs; then, in a notebook, stop the earlier one.

        If the new training is rejected, the earlier one goes on, and a line says how to see it: its view may be gone if
        both belong to one cell.
        """
        earlier = self._helper.training
        if not in_notebook() or earlier is None:
            self._check_free()
        try:
            yield
        except Exception:
            if earlier is not None and not earlier.done and earlier.shown:
                print("mpkit: the earlier run goes on: run.show() shows it here, run.stop() ends it")
            raise
        if earlier is not None and not earlier.done:
            done = f"after step {earlier.first_step + len(earlier.losses)} of {earlier.steps}"
            print(f"mpkit: the earlier run of {earlier.plan} was stopped {done} for this one")
            earlier.stop()

    @contextmanager
    def _shown_ahead(self, show: bool | None, plan: Plan | None, steps: int) -> Iterator[Any]:
        """Show empty lanes in a notebook while a training is prepared in the body; if it is rejected, they go again."""
        sees = in_notebook() and show is not False and self._session is None
        if not sees or not hasattr(plan, "describe") or not isinstance(steps, int):
            yield None
            return
        board = draw(self, "waiting", plan, steps)
        try:
            yield board
        except BaseException:
            board.withdraw()
            raise

    def launch(
        self, fn: Callable[..., Any], args: tuple[Any, ...], *, timeout: float | None = None,
        sink: Callable[[str], None] = print, meta: dict[str, Any] | None = None, modules: Sequence[str] = (),
        compares: bool = True,
    ) -> RankLaunch:  # fmt: skip
        """Start `fn(ctx, *args)` on every rank and return its `Launch`; `run` and `train` are built on this.

        Args:
            fn, args, timeout: as in `run`.
            sink, meta, modules: receives each labelled line of output; entries for the trace's meta; modules to import
                before ranks are forked, so that the ranks need not each import them.
            compares: compare each communication with its peers' calls; a training's strategies do not need this.
        """
        self._check_open(self.ranks)
        timeout = check_timeout(timeout)
        self._check_free()
        payload = pack(fn, args)
        numbers = self._chosen.numbers
        settings = settings_here(self.ranks, self.device, self.backend, numbers, self.layers, compares)
        how: dict[str, Any] = {"timeout": timeout, "sink": sink, "meta": meta or {}}
        if self._session is not None:
            from mpkit.launch.launched_rank import LaunchedRank

            self._latest = self._helper.latest = LaunchedRank(self._session, settings, payload, **how)
            report_what_stays(modules)
            return self._latest
        refuse_second_launcher()
        with self._helper.launching:
            self._check_free()  # another thread may have launched first
            server = self._helper.provide()
            settings = replace(settings, environment=server.environment_since())
            self._latest = self._helper.latest = Launch(server, settings, payload, modules=modules, **how)
        try:
            report_what_stays(modules)  # while the ranks start
        except UserWarning:  # the program's filters make errors of warnings
            self._latest.end()
            raise
        return self._latest


def borrow_cluster(given: Cluster | None, ranks: int = 1) -> AbstractContextManager[Cluster]:
    """Return a context of the given cluster, or of a new one of CPU ranks that is closed afterwards."""
    return nullcontext(given) if given is not None else Cluster(ranks, device="cpu")


@contextmanager
def borrow_clusters(
    given: Callable[[int], Cluster] | None, device: str = "auto"
) -> Iterator[Callable[[int], Cluster]]:
    """Yield `clusters(ranks)` for consecutive runs of different sizes; if none is given, they share a helper."""
    if given is not None:
        yield given
        return
    with Cluster(1, device) as own:
        yield own.resized
