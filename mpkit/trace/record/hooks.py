"""Watching a module and its optimizer: model states go into the ledger, and the optimizer's step becomes an op.

parameters, buffers    counted when the watch begins
gradients              counted when backward has made them, until `zero_grad` frees their storage
optimizer state        counted after the first step has made it
layers                 (if requested) each layer's part of a forward or backward, as an op inside that action
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mpkit.common.torch_private import tree_leaves
from mpkit.trace import Kind
from mpkit.trace.record.memory import Gradients
from mpkit.trace.record.recorder import Recorder


class HookHandles:
    """The hooks that `watch` registered; `close` removes them."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._last: list[Callable[[], None]] = []

    def close(self) -> None:
        """Remove every hook. Entries in the ledger stay until their storage is freed."""
        for handle in self._handles:
            handle.remove()
        for forget in self._last:
            forget()
        self._handles.clear()
        self._last.clear()

    def _watch_gradients(self, recorder: Recorder, module: nn.Module) -> None:
        gradients = Gradients(recorder.ledger, module.parameters(), recorder.allocated)
        recorder.memory.add(gradients)
        self._last.append(lambda: recorder.memory.remove(gradients))


def watch(
    recorder: Recorder,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    flops: Mapping[str, tuple[float, float]] | None = None,
    layers: bool = True,
) -> HookHandles:
    """Record the module's states as they are made and freed, and the optimizer's steps.

    Args:
        module: a rank's part of the model; call it once for each part.
        optimizer: the optimizer of that part's parameters; its `step` becomes an OPTIMIZER op.
        flops: (forward, backward) FLOPs by layer, as in `Flops.layers`; used if `recorder.layers` is set.
        layers: whether the module's layers may be watched too, if `recorder.layers` is set.
    """
    watched = HookHandles()
    ledger = recorder.ledger
    for parameter in module.parameters():
        ledger.track(parameter, "params")
    for buffer in module.buffers():
        ledger.track(buffer, "buffers")
    watched._watch_gradients(recorder, module)
    if optimizer is not None:
        watched._handles += watch_optimizer(recorder, optimizer)
    if recorder.layers and layers:
        hooks = LayerHooks(
            recorder,  # nothing is recorded outside of an action, such as a look at the model between steps
            lambda: Kind.FORWARD if recorder.busy else None,
            lambda: Kind.BACKWARD if recorder.busy else None,
        )
        for name, layer in layers_of(module):
            watched._handles += hooks.watch(name, layer, (flops or {}).get(name, (0.0, 0.0)))
    return watched


def watch_optimizer(
    recorder: Recorder, optimizer: torch.optim.Optimizer, *, elsewhere: bool = False
) -> list[RemovableHandle]:
    """Record an optimizer's steps and count its states.

    Args:
        elsewhere: whether its states are on the host and so do not count as device memory.
    """
    name = type(optimizer).__name__
    index = states = touched = 0

    def begin_step(*_: Any) -> None:
        nonlocal index
        index = recorder.begin(Kind.OPTIMIZER, name, nbytes=touched)

    def end_step(*_: Any) -> None:
        nonlocal states, touched
        count = sum(map(len, optimizer.state.values()))
        if (
            count != states or not touched
        ):  # made in the first step, or for a parameter that is used for the first time
            states, touched = count, _track_states(recorder, optimizer, elsewhere)
        recorder.end(index, nbytes=touched)

    return [optimizer.register_step_pre_hook(begin_step), optimizer.register_step_post_hook(end_step)]


def _track_states(recorder: Recorder, optimizer: torch.optim.Optimizer, elsewhere: bool) -> int:
    """Count the optimizer's state, and return the bytes that a step reads and writes.

    Zero-dimensional states are left out: Adam's step counters, which are on the host.
    """
    touched = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            touched += 2 * parameter.nbytes + parameter.grad.nbytes
            for state in optimizer.state.get(parameter, {}).values():
                if isinstance(state, torch.Tensor) and state.dim():
                    if not elsewhere:
                        recorder.ledger.track(state, "optimizer")
                    touched += 2 * state.nbytes
    return touched


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a module: its children, and the children of containers among them.

    >>> [name for name, _ in layers_of(nn.ModuleDict({"wte": nn.Embedding(2, 2), "h": nn.ModuleList([nn.GELU()])}))]
    ['wte', 'h.0']
    """
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from ((f"{name}.{inner}", layer) for inner, layer in layers_of(child))
        else:
            yield name, child


class LayerHooks:
    """Records the forwards and backwards of layers, as ops within the action that is running.

    A layer's backward lasts from the arrival of the gradient of its output until that of the next layer's, or until
    the action is over. (Module backward hooks would be more precise, but they forbid layers that work in place.)

    Args:
        recorder: the rank's recorder.
        forward, backward: return the kind of op of a forward or backward that begins now; None: it is not recorded.
    """

    def __init__(
        self, recorder: Recorder, forward: Callable[[], Kind | None], backward: Callable[[], Kind | None]
    ) -> None:
        self._recorder, self._forward, self._backward = recorder, forward, backward
        self._running = -1  # the op of the layer whose backward is running

    def watch(
        self, name: str, layer: nn.Module, flops: tuple[float, float] = (0.0, 0.0)
    ) -> list[RemovableHandle]:
        """Record a layer from now on, and return the handles that end this.

        Args:
            name, layer: the layer.
            flops: the FLOPs of its forward and of its backward.
        """
        recorder, ops = self._recorder, list[int]()  # a layer may be called within itself

        def begin(kind: Kind | None, flops: float) -> int:
            if kind is None:
                return -1
            stage, microbatch, _ = recorder.place()
            return recorder.begin(kind, name, stage=stage, microbatch=microbatch, flops=flops)

        def begin_forward(*_: Any) -> None:
            ops.append(begin(self._forward(), flops[0]))

        def gradient_arrived(_: torch.Tensor) -> None:
            self.end_backward()
            self._running = begin(self._backward(), flops[1])

        def end_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if ops:
                recorder.end(ops.pop())
            for tensor in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(gradient_arrived)
                    break

        return [
            layer.register_forward_pre_hook(begin_forward, prepend=True),
            layer.register_forward_hook(end_forward, always_call=True),
        ]

    def end_backward(self) -> None:
        """End the backward of the layer that came last."""
        running, self._running = self._running, -1
        self._recorder.end(running)
