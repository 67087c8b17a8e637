"""Instrumentation: a program that knows nothing of mpkit leaves a Trace like any other.

    communication    every operator of c10d                          `communication`, `completion`
    actions          forward, loss, backward, optimizer, steps       `modules`, `optimizers`, `actions`; every backward
    stages           stage and micro-batch, under torch's pipelining  `pipelining`
    data             the time until samples are there                `loading`
    costs            FLOPs, bytes and memory of each action            `costs`
    names            what the program says it is doing               `annotations`

Nothing of the program changes: torch offers a place to listen at each of these, and `ProgramRecording` takes its
listeners away at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch.autograd
import torch.autograd.graph
from torch import nn
from torch.optim import Optimizer

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import current
from mpkit.launch.watch.actions import Actions
from mpkit.launch.watch.costs import WatchedCosts
from mpkit.launch.watch.loading import WatchedLoaders
from mpkit.launch.watch.modules import Modules
from mpkit.launch.watch.optimizers import Optimizers
from mpkit.launch.watch.pipelining import ProgramStages
from mpkit.launch.watch.span import WATCHED
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.program_calls.annotations import Annotations
from mpkit.strategies.program_calls.communication import Communication, warn_of_unknown
from mpkit.strategies.program_calls.completion import Completion
from mpkit.strategies.program_calls.lines import SourceLines
from mpkit.trace import Kind

__all__ = ["EngineRuns", "ProgramRecording"]


class ProgramRecording:
    """The context in which one rank's program is recorded.

    Args:
        comm: the communicator of all ranks, with the rank's recorder.
        depth: how deep modules are recorded; None: repeated blocks and the modules beside them.
    """

    def __init__(self, comm: Communicator, depth: int | None = None) -> None:
        record = comm.wire.record
        lines, self.annotations = SourceLines(), Annotations()
        self.completion = Completion(record)
        self.communication = Communication(comm, self.completion, lines, self.annotations)
        roots: WeakSet[nn.Module] = WeakSet()
        optimizers: WeakSet[Optimizer] = WeakSet()
        self.costs = WatchedCosts(record, self.annotations, roots, optimizers)
        self.actions = Actions(record, self.costs, self.completion.settle)
        self.communication.before = self.actions.communicate
        self.actions.alone = str(comm.rank)
        self.modules = Modules(record, self.actions, roots, depth)
        self.actions.step_ended = self.modules.step_ended
        self.optimizers = Optimizers(self.actions, optimizers)
        self.backwards = EngineRuns(self._backward_begins, self._backward_ends)
        self.loading = WatchedLoaders(record, self.actions)
        self.stages = ProgramStages(self.actions)
        self._backward_ops: list[int] = []

    def __enter__(self) -> Self:
        warn_of_unknown()
        for part in self._parts():
            part.install()
        self._token = WATCHED.set(self.actions)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        WATCHED.reset(self._token)
        self.costs.uninstall()
        for part in reversed(self._parts()):
            part.uninstall()
        if kind is None:
            self.actions.finish()

    def _parts(
        self,
    ) -> tuple[
        Annotations
        | Completion
        | Communication
        | Modules
        | Optimizers
        | EngineRuns
        | WatchedLoaders
        | ProgramStages,
        ...,
    ]:
        return (
            self.annotations, self.completion, self.communication, self.modules, self.optimizers, self.backwards,
            self.loading, self.stages,
        )  # fmt: skip

    def _backward_begins(self, outputs: Any) -> None:
        self.modules.backward_begins()
        self.actions.begin_backward(outputs)
        self._backward_ops.append(self.actions.begin(Kind.BACKWARD, "backward"))
        self.actions.backwards += 1
        self.completion.backwards += 1

    def _backward_ends(self) -> None:
        self.actions.backwards -= 1
        self.completion.backwards -= 1
        if not self.actions.backwards:
            self.modules.backward_ends()
            self.completion.settle()
        self.actions.end(self._backward_ops.pop())


class EngineRuns:
    """The runs of autograd's engine.

    Args:
        begins: called before each run, with the tensors from which it starts.
        ends: called after each run, also after one that raised.
    """

    def __init__(self, begins: Callable[[Any], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._replaced = Replacements()

    def install(self) -> None:
        """Begin to see backwards."""
        run, begins, ends = current("_engine_run_backward"), self._begins, self._ends

        def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            begins(outputs)
            try:
                return run(outputs, *args, **kwargs)
            finally:
                ends()

        for module in (torch.autograd, torch.autograd.graph):
            self._replaced.put(module, "_engine_run_backward", engine_run_backward)

    def uninstall(self) -> None:
        """Leave backwards as they were."""
        self._replaced.restore()
