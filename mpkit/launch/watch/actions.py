"""Actions: forward, loss, backward, optimizer step, in the order in which one rank runs them.

forward      the outermost module that is called, unless it is called within a backward: that is recomputation
loss         what the rank computes between the end of such a forward and the beginning of the backward
backward     one run of autograd's engine
optimizer    one optimizer's step

An action that begins within another one is a part of it (depth 1 and more in the trace).
A step ends with its last optimizer step: gradients may be accumulated over several backwards, and several optimizers
may step. What is loaded, sent or received before the next forward belongs to the next step, such as a pipeline's
receives. `mk.watch.step()` says instead where a step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpkit.launch.watch.costs import WatchedCosts
from mpkit.trace import Kind, Lane, lane_of
from mpkit.trace.record.recorder import Recorder


class Actions:
    """The actions and steps of one rank.

    Args:
        record: the rank's recorder.
        costs: what actions cost.
        before: called before each outermost action.

    Attributes:
        place: stage and micro-batch of what runs now, in a pipeline; -1 for none.
        backwards: how many backwards are running, one within another.
        step_ended: called after each step.
        alone: the group of communications by hand: this rank.
    """

    def __init__(
        self, record: Recorder, costs: WatchedCosts, before: Callable[[], None] = lambda: None
    ) -> None:
        self._record, self._costs, self._before = record, costs, before
        self.place = -1, -1
        self.backwards = 0
        self.step_ended: Callable[[], None] = lambda: None
        self.alone = "0"
        self._depth = 0
        self._loss = -1
        self._step, self._in_step, self._stepped = 0, False, False
        self._by_hand = False
        self._acted = False  # whether the step has had an action
        self._losses: list[torch.Tensor] = []
        self._shares: list[torch.Tensor] = []  # of a pipeline's micro-batches
        self._spans = 0  # communications by hand

    # ---- actions

    def begin(self, kind: Kind, name: str, inputs: Any = ()) -> int:
        """Begin an action, or a part of the one that is running; return its op.

        Args:
            kind, name: the columns of its op.
            inputs: its inputs.
        """
        flops = 0.0
        if not self._depth:
            self.end_loss()
            self._before()
            self._begin_step(kind)
            self._acted = True
            flops = self._costs.begins(kind, name, inputs)
        self._depth += 1
        stage, microbatch = self.place
        return self._record.begin(kind, name, stage=stage, microbatch=microbatch, flops=flops)

    def end(self, op: int) -> None:
        """End what `begin` began."""
        self._depth -= 1
        self._record.end(op)
        if not self._depth:
            self._costs.ends(op)

    @contextmanager
    def span(self, kind: Kind, name: str, flops: float, nbytes: int) -> Iterator[None]:
        """Record what the body does by other means than torch's; see `mpkit.launch.watch.span`."""
        record = self._record
        if lane_of(kind) == Lane.COMPUTE:
            op = inner = self.begin(kind, name)
        else:
            self.end_loss()
            self._begin_step(kind)
            op = record.begin(kind, name, group=self.alone, number=self._spans, nbytes=nbytes)
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
            self.optimizer_stepped()

    def begin_loss(self) -> None:
        """Begin what is computed between a forward and the backward that follows it."""
        if not self._depth and self._loss < 0:
            flops = self._costs.begins(Kind.COMPUTE, "loss")
            stage, microbatch = self.place
            self._loss = self._record.begin(
                Kind.COMPUTE, "loss", stage=stage, microbatch=microbatch, flops=flops
            )

    def end_loss(self) -> None:
        """End it: something else begins."""
        if self._loss >= 0:
            self._record.end(self._loss)
            self._costs.ends(self._loss)
            self._loss = -1

    def begin_backward(self, outputs: Sequence[Any]) -> None:
        """Remember the loss from which a backward starts; a step's loss is the sum of those of its backwards.

        Args:
            outputs: the tensors from which it starts. A loss is the only one, and a scalar.
        """
        if self.backwards or self.place != (-1, -1) or len(outputs) != 1:
            return  # within a backward; or of a micro-batch of a pipeline, whose schedule scales it
        loss = outputs[0]
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def note_share(self, share: torch.Tensor) -> None:
        """Remember a micro-batch's share of the loss of a step of a pipeline, which is the sum of its shares."""
        self._shares.append(share.detach())

    @property
    def is_running(self) -> bool:
        """Whether an action is running."""
        return self._depth > 0

    # ---- steps

    def _begin_step(self, kind: Kind) -> None:
        if self._in_step and self._stepped and kind != Kind.OPTIMIZER and not self._by_hand:
            self.end_step()
        if not self._in_step:
            self._record.begin_step(self._step)
            self._costs.step_begins()
            self._in_step = True

    def communicate(self) -> None:
        """End the step if its optimizer has stepped: what is sent before the next forward belongs to the next step."""
        if self._stepped and not self._depth:
            self._begin_step(Kind.SEND)

    def begin_data(self) -> None:
        """Begin the step to which the samples belong that are about to be loaded."""
        self.end_loss()
        if self._stepped or not self._in_step:
            self._begin_step(Kind.DATA)

    def optimizer_stepped(self) -> None:
        """Remember that the weights are new: the next forward belongs to the next step."""
        self._stepped = True

    def end_step(self) -> None:
        """End the step that is under way, if any."""
        self.end_loss()
        if self._in_step:
            # A pipeline's first step has a backward of its own besides, to learn the shapes.
            if losses := self._shares or self._losses:
                self._record.loss(sum(loss.item() for loss in losses))
            self._record.end_step()
            self._step += 1
            self.step_ended()
        self._in_step = self._stepped = self._acted = False
        self._losses.clear()
        self._shares.clear()

    def finish(self) -> None:
        """End the last step; one that has only communicated is none, and stays open."""
        self.end_loss()
        if self._acted:
            self.end_step()

    def step(self) -> None:
        """End the step here; from now on, optimizers no longer end steps."""
        self._by_hand = True
        self.end_step()
