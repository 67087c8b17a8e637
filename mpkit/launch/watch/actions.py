"""Actions: forward, loss, backward, optimizer step, in the order in which one rank runs them.

forward      the outermost module that is called, unless it is called within a backward: that is recomputation
loss         what the rank computes between the end of such a forward and the beginning of the backward
backward     one run of autograd's engine
optimizer    one optimizer's step

An action that begins within another one is a part of it (depth 1 and more in the trace).
A step ends with its last optimizer step: gradients may be accumulated over several backwards, and several optimizers
may step. What is loaded, sent or received before the next forward belongs to the next step, such as a pipeline's
receives. `mk.watch.step()` says instead where a step ends, and `mk.watch.span(name)` records by hand a piece that the
program does by other means than torch's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

import torch

from mpkit.launch.watch.costs import WatchedCosts
from mpkit.trace import Kind, Lane, lane_of
from mpkit.trace.record.recorder import Recorder


class Actions:
    """The actions and steps of one rank; `before` is called before each outermost action."""

    def __init__(self, record: Recorder, costs: WatchedCosts, before: Callable[[], None], rank: int) -> None:
        self._record, self._costs, self._before = record, costs, before
        self._alone = str(rank)  # the group of communications by hand
        self.place = -1, -1  # stage and micro-batch of what runs now, in a pipeline; -1 for none
        self.backwards = 0  # how many run, one within another
        self.step_ended: Callable[[], None] = lambda: None  # called after each step
        self.depth = 0  # how many actions run, one within another
        self._loss = -1  # the op of the loss that is computed now
        self._step, self._in_step = 0, False
        self.has_stepped = False  # the weights are new: the next forward belongs to the next step
        self._by_hand = False  # the program says where steps end
        self._acted = False  # the step has had an action
        self._losses: list[torch.Tensor] = []
        self.shares: list[torch.Tensor] = []  # of a pipeline's micro-batches
        self._spans = 0  # communications by hand

    def begin(self, kind: Kind, name: str, inputs: Any = ()) -> int:
        """Begin an action, or a part of the one that is running; return its op. `inputs` are the action's."""
        flops = 0.0
        if not self.depth:
            self.end_loss()
            self._before()
            self._begin_step(kind)
            self._acted = True
            flops = self._costs.begins(kind, name, inputs)
        self.depth += 1
        return self._begin_op(kind, name, flops)

    def _begin_op(self, kind: Kind, name: str, flops: float) -> int:
        stage, microbatch = self.place
        return self._record.begin(kind, name, stage=stage, microbatch=microbatch, flops=flops)

    def end(self, op: int) -> None:
        """End what `begin` began."""
        self.depth -= 1
        self._record.end(op)
        if not self.depth:
            self._costs.ends(op)

    @contextmanager
    def span(self, kind: Kind, name: str, flops: float, nbytes: int) -> Iterator[None]:
        """Record what the body does by other means than torch's; see `mk.watch.span`."""
        record = self._record
        if lane_of(kind) == Lane.COMPUTE:
            op = inner = self.begin(kind, name)
        else:
            self.end_loss()
            self._begin_step(kind)
            op = record.begin(kind, name, group=self._alone, number=self._spans, nbytes=nbytes)
            inner = record.begin(Kind.WAIT, ref=op)
            self._spans += 1
        try:
            yield
        except BaseException:
            record.drop(inner)
            raise
        if inner == op:
            self.end(op)
            record.costs(op, flops, nbytes)
        else:
            record.end(inner)
            record.end(op)
        if kind == Kind.OPTIMIZER:
            self.has_stepped = True

    def begin_loss(self) -> None:
        """Begin what the rank computes between a forward and the backward that follows it."""
        if not self.depth and self._loss < 0:
            self._loss = self._begin_op(Kind.COMPUTE, "loss", self._costs.begins(Kind.COMPUTE, "loss"))

    def end_loss(self) -> None:
        """End it: something else begins."""
        if self._loss >= 0:
            self._record.end(self._loss)
            self._costs.ends(self._loss)
            self._loss = -1

    def begin_backward(self, outputs: Sequence[Any]) -> None:
        """Remember the loss from which a backward starts; a step's loss is the sum of those of its backwards.

        Of the tensors from which it starts, a loss is the only one, and a scalar.
        """
        if self.backwards or self.place != (-1, -1) or len(outputs) != 1:
            return  # within a backward; or of a micro-batch of a pipeline, whose schedule scales it
        if isinstance(loss := outputs[0], torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def _begin_step(self, kind: Kind) -> None:
        if self._in_step and self.has_stepped and kind != Kind.OPTIMIZER and not self._by_hand:
            self.end_step()
        if not self._in_step:
            self._record.begin_step(self._step)
            self._costs.step_begins()
            self._in_step = True

    def communicate(self) -> None:
        """End the step if its optimizer has stepped: what is sent before the next forward belongs to the next step."""
        if self.has_stepped and not self.depth:
            self._begin_step(Kind.SEND)

    def begin_data(self) -> None:
        """Begin the step to which the samples belong that are about to be loaded."""
        self.end_loss()
        if self.has_stepped or not self._in_step:
            self._begin_step(Kind.DATA)

    def end_step(self) -> None:
        """End the step that is under way, if any."""
        self.end_loss()
        if self._in_step:
            # A pipeline's first step has a backward of its own besides, to learn the shapes.
            if losses := self.shares or self._losses:
                self._record.loss(sum(loss.item() for loss in losses))
            self._record.end_step()
            self._step += 1
            self.step_ended()
        self._in_step = self.has_stepped = self._acted = False
        self._losses.clear()
        self.shares.clear()

    def finish(self) -> None:
        """End the last step; one that has only communicated is none, and stays open."""
        self.end_loss()
        if self._acted:
            self.end_step()

    def step(self) -> None:
        """End the step here; from now on, optimizers no longer end steps."""
        self._by_hand = True
        self.end_step()


WATCHED: ContextVar[Actions | None] = ContextVar("WATCHED", default=None)
"""The actions of the program that is being watched."""


def step() -> None:
    """End a step of the program here; once it has been called, optimizers no longer end steps.

    Call it where a step ends that has no optimizer step, or several with forwards in between (two networks that are
    trained in turn), or that is an iteration of something else. Where nothing is watched, it does nothing.

    >>> import mpkit as mk
    >>> import torch
    >>> def infer(ctx):
    ...     model = torch.nn.Linear(4, 4)
    ...     for _ in range(3):
    ...         model(torch.ones(2, 4))
    ...         mk.watch.step()
    >>> with mk.Cluster(ranks=1, device="cpu") as cluster:
    ...     _ = cluster.run(infer, watch=True)
    ...     len(cluster.timeline().steps)
    3
    """
    actions = WATCHED.get()
    if actions is not None:
        actions.step()


LANES = (Lane.COMPUTE, Lane.COMM)
_KINDS = {kind.word: kind for kind in Kind if lane_of(kind) in LANES and kind != Kind.WAIT}


def span(
    name: str, *, kind: str = "compute", flops: float = 0.0, nbytes: int = 0
) -> AbstractContextManager[None]:
    """Record a piece of a watched program: `with mk.watch.span("attention"):`.

    What torch does is recorded without it. This is for what mpkit cannot see: another framework, a library in C++. The
    program waits for a communication that is recorded so until the block ends. A step ends after an "optimizer", as
    after one of torch's, or where `mk.watch.step()` says so. Where nothing is watched, nothing is recorded.

    Args:
        name: what the timeline calls it.
        kind: "compute", "forward", "backward", "optimizer", "all_reduce" or another kind of op, as in
            `timeline.to_dataframe()`.
        flops: the FLOPs of a piece that computes.
        nbytes: the bytes that it reads and writes; of a communication its payload.

    Raises:
        ValueError: there is no such kind.

    >>> import mpkit as mk
    >>> def program(ctx):
    ...     with mk.watch.span("another framework's step"):
    ...         with mk.watch.span("its gradients", kind="all_reduce", nbytes=4_000):
    ...             pass
    >>> with mk.Cluster(ranks=1, device="cpu") as cluster:
    ...     _ = cluster.run(program, watch=True)
    ...     cluster.timeline().comm_bytes
    [{'all_reduce': 4000}]
    """
    if kind not in _KINDS:
        near, kinds = get_close_matches(kind, _KINDS, 1) or ["compute"], ", ".join(_KINDS)
        raise ValueError(f"mk.watch.span(kind={kind!r}): there are {kinds}; such as kind={near[0]!r}")
    actions = WATCHED.get()
    return nullcontext() if actions is None else actions.span(_KINDS[kind], name, flops, nbytes)
