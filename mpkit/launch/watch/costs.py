"""What a program's actions cost: FLOPs, bytes moved, and memory by category.

A step's actions are known by their sequence: each one's kind, name and shapes of inputs, after those before it.

    measure    steps are measured (`mpkit.launch.watch.measured_step`) until one repeats another: in the first, the
               optimizer makes its states; from the second on, a step leaves memory as it found it
    reuse      an action of such a step costs what it cost when it was measured: its FLOPs are recorded when it begins,
               its peak of memory and what it leaves when it is over. What is new is measured from there on

Categories: parameters and buffers when their module is first called; gradients after a backward; states after the
optimizer's step. What a forward, a loss or a backward takes besides counts as activations, as do batches; what is
gathered or sent (annotated "FSDP::"), what the optimizer takes for a moment and what the program made before its first
action counts as buffers, unless it is a parameter. What a backend copies for itself is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mpkit.common.torch_private import _get_current_dispatch_mode
from mpkit.launch.watch.measured_step import StepMeasurement
from mpkit.strategies.program_calls.annotations import Annotations
from mpkit.trace import Kind
from mpkit.trace.record.operators import tensors_in
from mpkit.trace.record.recorder import Recorder

__all__ = ["Cost", "WatchedCosts"]


class Cost(NamedTuple):
    """What an action costs, and the memory before it and after it, in bytes by category.

    `changes` lead from the one to the other by way of the peak.
    """

    flops: float
    nbytes: int
    before: dict[str, int]
    after: dict[str, int]
    changes: list[tuple[str, int]]


class WatchedCosts:
    """The costs of one rank's actions.

    Args:
        record: the rank's recorder.
        annotations: what the program says it is doing.
        modules: the outermost modules.
        optimizers: the optimizers that have stepped.
    """

    def __init__(
        self, record: Recorder, annotations: Annotations, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:  # fmt: skip
        self._record, self._annotations = record, annotations
        self._modules, self._optimizers = modules, optimizers
        self._ledger = record.ledger
        self._known: dict[int, Cost] = {}  # of the last action of a sequence
        self._sequence = 0
        self._new = True  # whether this step has had an action that no earlier one had
        self._mode: StepMeasurement | None = None
        self._kind = Kind.COMPUTE
        self._before: tuple[float, int, dict[str, int]] | None = None

    # ---- begin and end of watching

    def install(self) -> None:
        """Wait for the first action: what comes before it costs nothing in a step."""

    def uninstall(self) -> None:
        """Stop measuring."""
        self._stop()

    # ---- a step, and its actions

    def step_begins(self) -> None:
        """Begin a new sequence. If the last step repeated one that was measured, this one need not be."""
        if not self._new:
            self._stop()
        self._sequence, self._new = 0, False

    def begins(self, kind: Kind, name: str, inputs: Any = ()) -> float:
        """Begin an action; return its FLOPs if they are known.

        Args:
            kind, name: the columns of its op.
            inputs: its inputs: actions whose inputs have other shapes cost something else.
        """
        tensors = list(tensors_in(inputs))
        shapes = tuple([tensor.shape for tensor in tensors])
        self._kind = kind
        self._sequence = hash((self._sequence, kind, name, torch.is_grad_enabled(), shapes))
        cost = self._known.get(self._sequence)
        self._new |= cost is None
        if cost is not None and self._mode is None:
            if cost.before != self._ledger.held:
                self._ledger.change(*_changes(self._ledger.held, cost.before))
            return cost.flops
        self._measure()
        if self._mode is not None:
            for tensor in tensors:
                self._ledger.track(_local(tensor), "activations")
            self._mode.forget_peak()
            self._before = self._mode.flops, self._mode.nbytes, dict(self._ledger.held)
        return 0.0

    def ends(self, op: int) -> None:
        """End the outermost action, whose op is over: write what it cost."""
        if self._mode is None:
            cost = self._known.get(self._sequence)
            if cost is not None:
                self._ledger.change(*cost.changes)
                self._record.costs(op, cost.flops, cost.nbytes)
            return
        self._sort()
        self._kind = Kind.DATA
        if self._before is not None:
            flops, nbytes, before = self._before
            peak, after = self._mode.forget_peak(), dict(self._ledger.held)
            cost = Cost(
                self._mode.flops - flops, self._mode.nbytes - nbytes, before, after,
                _changes(before, peak) + _changes(peak, after),
            )  # fmt: skip
            self._new |= self._leaves_more(self._known.get(self._sequence), cost)
            self._known[self._sequence] = cost
            self._record.costs(op, cost.flops, cost.nbytes)
            self._before = None

    @staticmethod
    def _leaves_more(before: Cost | None, cost: Cost) -> bool:
        """Return whether the action left other model states than the last time: a state was made in between."""
        lasting = ("params", "grads", "optimizer")
        return before is None or any(before.after[name] != cost.after[name] for name in lasting)

    # ---- measuring, and not

    def _measure(self) -> None:
        if self._mode is not None or torch.compiler.is_compiling():
            return
        self._ledger.clear()
        self._count_what_is_held()
        self._sort()
        self._mode = StepMeasurement(self._ledger, self._category)
        self._mode.__enter__()

    def _stop(self) -> None:
        """Stop measuring, unless a mode of the program's lies above ours."""
        if self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None
            self._ledger.forget()

    def _count_what_is_held(self) -> None:
        """Count what the program made before its first action: all tensors that Python knows of."""
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                category = "params" if issubclass(type(thing), nn.Parameter) else "buffers"
                self._ledger.track(_local(thing), category)

    # ---- categories

    def _category(self) -> str:
        if self._annotations.innermost.startswith("FSDP::") or self._kind == Kind.OPTIMIZER:
            return "buffers"
        return "activations"

    def _sort(self) -> None:
        """Put parameters, buffers, gradients and optimizer states into their categories."""
        move = self._ledger.move
        for module in list(self._modules):
            for parameter in module.parameters():
                move(_local(parameter), "params")
                if parameter.grad is not None:
                    move(_local(parameter.grad), "grads")
            for buffer in module.buffers():
                move(_local(buffer), "buffers")
        for optimizer in list(self._optimizers):
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.dim():
                        move(_local(value), "optimizer")


def _changes(before: dict[str, int], after: dict[str, int]) -> list[tuple[str, int]]:
    """Return what leads from one level to another; less first, so that the sum never exceeds both."""
    deltas = [(category, after[category] - before[category]) for category in after]
    return sorted([change for change in deltas if change[1]], key=itemgetter(1))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: of a DTensor its shard."""
    return getattr(tensor, "_local_tensor", tensor)
