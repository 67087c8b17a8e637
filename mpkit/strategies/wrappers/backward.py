"""When a backward begins, and when autograd is done with it: what a loop of one's own does not tell.

    begin    the gradient of a wrapped module's output arrives, or, where the loss depends on parameters without it,
             the gradient of a parameter, before autograd accumulates it
    end      autograd has computed all gradients: a callback that it runs last, as torch's DDP and FSDP use it

torch.autograd.grad with respect to inputs makes no gradients of parameters, and is none of these backwards. A graph of
a backward of parameters (create_graph=True), for second derivatives, is refused: what was sent has no graph.

A backward within a backward (reentrant checkpoints) belongs to the outer one. A backward that failed has no end; the
next one begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mpkit.common.torch_private import _current_graph_task_id, _execution_engine, _will_engine_execute_node
from mpkit.strategies.models.nested_values import flatten, is_opaque

__all__ = ["ModuleBackwards"]


class ModuleBackwards:
    """The backwards through one module.

    Args:
        parameters: those whose gradients the backwards make.
        begin, end: called in each backward.
        alone: called where torch.autograd.grad computes a parameter's gradient, which is no backward.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        begin: Callable[[], None],
        end: Callable[[], None],
        *,
        alone: Callable[[], None] = lambda: None,
    ) -> None:
        self._alone = alone
        self._begin, self._end = begin, end
        self._nodes: list[Any] = []  # where autograd accumulates the gradients
        self._task = -1  # autograd's number of the backward that is running
        self._tasks = 0  # backwards that have begun
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._gradient)
                self._nodes.append(get_gradient_edge(parameter).node)

    def watch(self, output: Any) -> None:
        """Let the backward begin when the gradient of this output arrives.

        Raises:
            ValueError: the output may hold tensors that nobody finds.
        """
        for leaf in flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._output)
            elif is_opaque(leaf):
                raise ValueError(
                    f"The wrapped module returns {type(leaf).__name__}, and the backward through tensors in it would "
                    "begin unnoticed: iterators, functions and objects that contain themselves cannot be looked into. "
                    "Return tensors, or a tuple, a dict, a dataclass or an object with tensors as attributes."
                )

    def _output(self, _gradient: Tensor) -> None:
        if self._task == _current_graph_task_id():
            return
        if any(map(_is_executed, self._nodes)):  # not begun, or an earlier one failed
            self._start()

    def _gradient(self, _gradient: Tensor) -> None:
        if self._task >= 0:
            return
        if any(map(_is_executed, self._nodes)):
            self._start()
        else:
            self._alone()

    def _start(self) -> None:
        if torch.is_grad_enabled():
            raise _no_second()
        self._task = _current_graph_task_id()
        self._tasks = number = self._tasks + 1
        self._begin()

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


def _no_second() -> ValueError:
    return ValueError(
        "backward(create_graph=True): gradients of a wrapped module's parameters are sent to other ranks, and have no "
        "graph. Second derivatives with respect to inputs work under mk.ddp: torch.autograd.grad(outputs, inputs, "
        "create_graph=True)"
    )
