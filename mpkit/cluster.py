"""Cluster: ranks on this machine, fresh for every run."""

from __future__ import annotations

import copy
import difflib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpkit.calls import answers
from mpkit.errors import MpkitError
from mpkit.launch.hang import GRACE
from mpkit.launch.launch import Launch
from mpkit.launch.launched import refuse_second_launcher
from mpkit.launch.payload import here, pack
from mpkit.launch.warm import Warm
from mpkit.plan_checks import real, whole
from mpkit.tracebacks import public
from mpkit.train_call import EXAMPLE, MEANT

if TYPE_CHECKING:
    import torch

    from mpkit.devices import Hardware
    from mpkit.plan import Plan
    from mpkit.run import Run
    from mpkit.timeline import Timeline
    from mpkit.trace import Trace

__all__ = ["Cluster"]

MOST_RANKS = 256
"""More processes than that on one machine are a slip of the finger."""

ON_BUSY = ("stop", "wait", "raise")


@public
class Cluster:
    """Ranks on this machine: processes that run your function, or train your model.

    Making one is cheap; a helper process imports torch meanwhile, and ranks are forked from it for every run,
    in some 40 ms, so that nothing of one run carries over into the next.

    >>> import mpkit as mk
    >>> import torch
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(lambda ctx: ctx.comm.all_reduce(torch.ones(2) * ctx.rank).tolist())
    [[1.0, 1.0], [1.0, 1.0]]

    Args:
        ranks: how many processes.
        device: "auto" (GPUs if there are any, else CPU processes), "cpu" or "cuda". Ranks on GPUs speak nccl
            where each has a GPU of its own, else gloo through the host's memory.
        layers: record every layer of the model, not only whole actions.
        start: "fork" (fast), "spawn" (a fresh interpreter a rank; the default where forking is not safe).

    Raises:
        ValueError: no such number of ranks or device here.
    """

    @answers("mk.Cluster(ranks=4)")
    def __init__(
        self, ranks: int, device: str = "auto", *, layers: bool = False, start: str | None = None
    ) -> None:
        refuse_second_launcher()
        self.ranks = _check_ranks(ranks)
        self.device, self.devices = _choose_device(device)
        self.backend = "nccl" if self.device == "cuda" and self.ranks <= self.devices else "gloo"
        self.layers = layers
        if start not in (None, "fork", "spawn"):
            raise ValueError(
                f"start={start!r}: there are 'fork' and 'spawn'; leave it out for what suits here"
            )
        import sys

        self._fork = start == "fork" if start else sys.platform == "linux"
        self._warm: Warm | None = Warm(self._fork)
        self._current: Launch | None = None
        self._training: Run | None = None  # the latest
        self._launching = threading.Lock()  # one thread at a time looks whether it is busy, and launches
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.backend
        return f"Cluster(ranks={self.ranks}, device={self.device!r})  # {state}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def warm_pid(self) -> int | None:
        """Process id of the helper process, the parent of all ranks; None if there is none now."""
        return self._warm.pid if self._warm is not None and self._warm.alive else None

    def resized(self, ranks: int) -> Cluster:
        """A cluster of another number of ranks from the same helper process, which one of them may use at a time.

        Raises:
            ValueError: no such number of ranks, or this cluster is closed.
        """
        if self._closed:
            raise ValueError(f"this cluster is closed; make a new one: mk.Cluster(ranks={ranks})")
        other = copy.copy(self)
        other.ranks, other._current, other._training = _check_ranks(ranks), None, None
        other.backend = "nccl" if other.device == "cuda" and ranks <= other.devices else "gloo"
        return other

    def close(self) -> None:
        """Stop what runs, and the helper process. A closed cluster can be asked for nothing more."""
        self._closed = True
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    @answers("cluster.run(lambda ctx: ctx.rank)")
    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, on_busy: str = "raise"
    ) -> list[Any]:
        """Call `fn(ctx, *args)` on every rank and wait; what the ranks print appears here, labelled.

        Args:
            fn: takes a `Context` first; may be a lambda or defined in this notebook.
            args: sent to every rank by value.
            timeout: seconds without any rank moving after which a hang is reported; None: a few seconds past
                the slowest op while all ranks wait for each other or are stopped, 600 s otherwise. After 10 s a line
                says which rank the others wait for, and where it is.
            on_busy: as in `train`; here an earlier training is left alone unless "stop" or "wait" is asked for.

        Returns:
            What `fn` returned, by rank.

        Raises:
            RankFailed: a rank raised or was killed; with that rank's own traceback.
            CommMismatch: two ranks' calls of one collective or message do not fit.
            Deadlock: the ranks wait for each other.
            ValueError: `fn` or an argument cannot be sent to other processes.
        """
        if not callable(fn):
            raise ValueError(
                f"run(fn) takes a function of a context, such as `lambda ctx: ctx.rank`, not {fn!r}"
            )
        self._make_free(on_busy)
        launch = self.launch(fn, args, timeout=timeout, sink=print)
        launch.finish()
        return launch.results()

    @property
    def trace(self) -> Trace:
        """What the ranks of the latest run recorded: of `run` too, with the spans of your own.

        Raises:
            MpkitError: nothing has run on this cluster yet.
        """
        if self._current is None:
            raise MpkitError("this cluster has no trace yet: cluster.run(fn) or cluster.train(...) first")
        return self._current.trace

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """The latest run on a clock; see `Run.timeline`."""
        from mpkit.replay import replay

        return replay(self.trace, hardware, clock)

    @answers(EXAMPLE, MEANT)
    def train(
        self,
        model: torch.nn.Module,
        data: Any,
        plan: Plan | None = None,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        steps: int = 1,
        seed: int = 0,
        max_grad_norm: float | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_keep: int = 2,
        resume_from: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        show: bool | None = None,
        on_busy: str | None = None,
    ) -> Run:
        """Train `model` as `plan` says. Returns at once; in a notebook the Run shows itself, live.

        Args:
            model: its weights are where training starts; yours is left as it is.
            data: sequence of (inputs, targets), each a whole global batch; step i takes data[i % len(data)]. Or
                `mk.Batches` of a dataset, shuffled anew in each epoch, of which a rank loads its own samples only. Or
                what gives batches one after the other (a generator, an IterableDataset, a DataLoader of one): this
                process reads it as the ranks need it, a few batches ahead; all have the shapes of the first two.
            plan: what to do; None: `Plan.serial()`.
            loss: loss(outputs, targets) -> scalar, the mean over the batch; or (total, count), where something else
                than samples is counted, such as targets that are not masked: the loss is then the sum of totals / the
                sum of counts. Torch's own means are right with masked targets and class weights as they are, and
                `mk.mean_loss` makes them so; for a loss that needs all samples at once there is `mk.whole_batch_loss`.
            optimizer: optimizer(params) -> torch.optim.Optimizer. Called on each rank with a list of all parameters
                that are trained, in the model's order, so that groups by index, number or shape are those of the whole
                model; `mk.by_name(optimizer)` is given (name, parameter) pairs.
            steps: how many.
            seed: of every rank's random state.
            max_grad_norm: clip gradients to this norm, taken over all of them together; None: do not.
            lr_schedule: lr_schedule(step) is what the learning rate is multiplied by in that step; None: 1.
            checkpoint_every: save a checkpoint after every so many steps; None: never. See docs/checkpoints.md.
            checkpoint_dir: the folder that checkpoints are saved in.
            checkpoint_keep: how many of the newest stay there.
            resume_from: a checkpoint, or a folder of them, whose newest whole one is gone on from, on whatever plan
                and number of ranks. `steps` still counts from the very beginning: the same call, with
                resume_from, finishes what was cut short.
            timeout: as in `run`.
            show: whether to show the Run live; None: in a notebook.
            on_busy: what happens to an earlier training of this cluster that goes on: "stop" it, "wait" for its end,
                or "raise" a ValueError; None: stop it in a notebook, where a cell is often run again, else raise.

        Raises:
            ValueError: something in it cannot work; before any process starts.
        """
        from mpkit.plan import Plan
        from mpkit.prepare import prepare
        from mpkit.run import Run, in_notebook

        plan = Plan.serial() if plan is None else plan
        timeout = _check_timeout(timeout)
        on_busy = _check_on_busy(on_busy) or ("stop" if in_notebook() else "raise")
        if on_busy == "raise":
            self._make_free(on_busy)
        with self._earlier_in_view():
            job = prepare(
                model, data, plan, ranks=self.ranks, by_name=self.backend != "nccl",
                loss=loss, optimizer=optimizer, steps=steps, seed=seed,
                max_grad_norm=max_grad_norm, lr_schedule=lr_schedule,
                checkpoint_every=checkpoint_every, checkpoint_dir=checkpoint_dir, checkpoint_keep=checkpoint_keep,
                resume_from=resume_from,
            )  # fmt: skip
        self._make_free(on_busy)
        self._training = Run(self, job, timeout=timeout, show=show)
        return self._training

    @property
    def _busy(self) -> bool:
        return self._current is not None and not self._current.over

    def _make_free(self, on_busy: str) -> None:
        """Stop an earlier training, or wait for its end, or refuse.

        Raises:
            ValueError: the cluster is busy, and is to stay so.
        """
        if not self._busy:
            return
        earlier = self._training if self._training is not None and not self._training.done else None
        _check_on_busy(on_busy)
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
    def _earlier_in_view(self) -> Iterator[None]:
        """If this training is refused, an earlier one that goes on is shown again: its cell may be this one."""
        try:
            yield
        except Exception:
            earlier = self._training
            if earlier is not None and not earlier.done and earlier.shown:
                print("mpkit: the earlier run goes on; this is its view")
                earlier.show()
            raise

    def launch(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout: float | None = None,
        sink: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
        meta: dict[str, Any] | None = None,
        modules: Sequence[str] = (),
        grace: float = GRACE,
        compares: bool = True,
    ) -> Launch:
        """Start `fn(ctx, *args)` on every rank and return its `Launch`; `run` and `train` are made of it.

        Args:
            fn, args, timeout: as in `run`.
            sink, flush: take a labelled line of output, and are told when there are no more for now.
            meta: goes into the trace's meta.
            modules: are imported before ranks are forked, which then need not do so each for itself.
            grace: seconds past the slowest op, if there is no `timeout`.
            compares: compare each communication with its peers' calls; a training's strategies need it not.
        """
        if self._closed:
            raise ValueError(f"this cluster is closed; make a new one: mk.Cluster(ranks={self.ranks})")
        refuse_second_launcher()
        timeout = _check_timeout(timeout)
        self._make_free("raise")
        payload = pack(fn, args)
        settings = here(self.ranks, self.device, self.backend, self.devices, self.layers, compares)
        with self._launching:
            self._make_free("raise")  # another thread may have been first
            if self._warm is None or not self._warm.alive:
                if self._warm is not None:
                    self._warm.close()
                self._warm = Warm(self._fork)
            self._current = Launch(
                self._warm,
                replace(settings, environment=self._warm.environment_since()),
                payload,
                timeout=timeout,
                sink=sink,
                flush=flush,
                meta=meta or {},
                modules=modules,
                grace=grace,
            )
            return self._current


def _check_on_busy(on_busy: str | None) -> str | None:
    if on_busy is not None and str(on_busy) not in ON_BUSY:
        raise ValueError(
            f'on_busy={on_busy!r}: what happens to an earlier run that goes on, "stop", "wait" or "raise", such as '
            'cluster.train(..., on_busy="stop")'
        )
    return on_busy


def _check_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    seconds = real(timeout)
    if seconds is None or not seconds > 0:
        raise ValueError(f"timeout={timeout!r}: a number of seconds above 0, such as timeout=60, or None")
    return seconds


def _check_ranks(ranks: Any) -> int:
    number = whole(ranks)
    if number is None or number < 1:
        raise ValueError(
            f"Cluster(ranks={ranks!r}): a number of processes, 1 or more, such as mk.Cluster(ranks=4)"
        )
    if number > MOST_RANKS:
        raise ValueError(
            f"Cluster(ranks={ranks}) would start {ranks} processes on this machine; up to {MOST_RANKS} are allowed. "
            "mk.simulate draws larger pipelines without processes."
        )
    return number


def _choose_device(device: str) -> tuple[str, int]:
    """("cpu", 0) or ("cuda", how many GPUs). Asks the driver how many there are; starts no CUDA context."""
    if device not in ("auto", "cpu", "cuda"):
        near = difflib.get_close_matches(str(device), ["auto", "cpu", "cuda"], 1, 0.3) or ["auto"]
        raise ValueError(f"device={device!r}: there are 'auto', 'cpu' and 'cuda'; did you mean {near[0]!r}?")
    if device == "cpu":
        return "cpu", 0
    import torch

    devices = torch.cuda.device_count()
    if devices == 0 and device == "cuda":
        raise ValueError(
            "device='cuda': torch sees no GPU here (torch.cuda.device_count() is 0); "
            "device='cpu' runs the same code on CPU processes"
        )
    return ("cuda", devices) if devices else ("cpu", 0)
