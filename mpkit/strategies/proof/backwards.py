"""When a backward through a module begins, and when autograd is done with it, which a loop of one's own does not tell.

    begin    the gradient of an output of the module arrives, or, where the loss depends on parameters without it, the
             gradient of a parameter, before autograd accumulates it
    end      autograd has computed all gradients: a callback that it runs last, as torch's DDP and FSDP use it

torch.autograd.grad with respect to inputs makes no gradients of parameters, so it does not count. A backward within a
backward (reentrant checkpoints) belongs to the outer one. A backward that failed has no end; the next one begins anew.
`mk.ddp` averages by these moments, and a loop's proof compares by them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mpkit.common.torch_private import _current_graph_task_id, _execution_engine, _will_engine_execute_node


class ModuleBackwards:
    """The backwards through one module.

    Args:
        begin, end: called in each backward that makes the parameters' gradients.
        alone: called where torch.autograd.grad computes a parameter's gradient, which is not a backward.
        apart: whether the module computes with other tensors than these parameters, as under FSDP.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], begin: Callable[[], None], end: Callable[[], None], *,
        alone: Callable[[], None] = lambda: None, apart: bool = False,
    ) -> None:  # fmt: skip
        self._begin, self._end, self._alone, self._apart = begin, end, alone, apart
        self._task = -1  # autograd's number of the backward that is running
        self._tasks = 0  # backwards that have begun
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._nodes = [get_gradient_edge(parameter).node for parameter in trained]  # that accumulate
        self._handles = [parameter.register_hook(self._on_parameter) for parameter in trained]

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def arrive(self) -> bool:
        """Note that an output's gradient arrives; return whether this backward makes the parameters' gradients."""
        if self._task == _current_graph_task_id():
            return True
        accumulates = self._apart or any(map(_is_executed, self._nodes))
        if accumulates:  # not begun, or an earlier one failed
            self._start()
        return accumulates

    def _on_parameter(self, _gradient: Tensor) -> None:
        if self._task >= 0:
            return
        if any(map(_is_executed, self._nodes)):
            self._start()
        else:
            self._alone()

    def _start(self) -> None:
        self._begin()
        self._task = _current_graph_task_id()
        self._tasks = number = self._tasks + 1

        def last() -> None:
            if number == self._tasks and self._task >= 0:
                self._task = -1
                self._end()

        _execution_engine.queue_callback(last)


def _is_executed(node: Any) -> bool:
    """Return whether the backward that is running accumulates the gradient of a parameter."""
    try:
        return bool(_will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad with respect to this parameter, which accumulates nothing
        return False
