"""Watching a module and its optimizer: model states go into the ledger, and the optimizer's step becomes an op.

parameters, buffers    count when the watch begins
gradients              count when backward has made them, until `zero_grad` frees their storage
optimizer state        counts after the first step has made it
layers                 (if requested) each layer's part of a forward or backward is an op inside that action
"""

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
        self._closing: list[Callable[[], None]] = []

    def add(self, handles: list[RemovableHandle]) -> None:
        """Remove these hooks at `close` too."""
        self._closing += [handle.remove for handle in handles]

    def watch_gradients(self, recorder: Recorder, module: nn.Module) -> None:
        """Count a module's gradients until `close`."""
        gradients = Gradients(recorder.ledger, module.parameters(), recorder.allocated)
        recorder.memory.add(gradients)
        self._closing.append(lambda: recorder.memory.remove(gradients))

    def close(self) -> None:
        """Remove every hook. Entries in the ledger stay until their storage is freed."""
        for remove in self._closing:
            remove()
        self._closing.clear()


def watch(
    recorder: Recorder, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
    flops: Mapping[str, tuple[float, float]] | None = None, layers: bool = True,
) -> HookHandles:  # fmt: skip
    """Record a rank's part of the model as its states are made and freed, and its optimizer's steps.

    If `recorder.layers` is set, its `layers` are recorded too, with their (forward, backward) FLOPs by name.
    """
    watched = HookHandles()
    ledger = recorder.ledger
    for parameter in module.parameters():
        ledger.track(parameter, "params")
    for buffer in module.buffers():
        ledger.track(buffer, "buffers")
    watched.watch_gradients(recorder, module)
    if optimizer is not None:
        watched.add(watch_optimizer(recorder, optimizer))
    if recorder.layers and layers:
        hooks = LayerHooks(
            recorder,  # nothing is recorded outside an action, such as a look at the model between steps
            lambda: Kind.FORWARD if recorder.busy else None,
            lambda: Kind.BACKWARD if recorder.busy else None,
        )
        for name, layer in layers_of(module):
            watched.add(hooks.watch(name, layer, (flops or {}).get(name, (0.0, 0.0))))
    return watched


def watch_optimizer(
    recorder: Recorder, optimizer: torch.optim.Optimizer, *, elsewhere: bool = False
) -> list[RemovableHandle]:
    """Record an optimizer's steps and count its states, unless they are `elsewhere`, on the host."""
    name = type(optimizer).__name__
    index = states = touched = 0

    def begin_step(*_: Any) -> None:
        nonlocal index
        index = recorder.begin(Kind.OPTIMIZER, name, nbytes=touched)

    def end_step(*_: Any) -> None:
        nonlocal states, touched
        count = sum(map(len, optimizer.state.values()))
        if count != states or not touched:  # new in the first step, and with a parameter that is used later
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
    `forward` and `backward` return the kind of op that begins now; None: it is not recorded.
    """

    def __init__(
        self, recorder: Recorder, forward: Callable[[], Kind | None], backward: Callable[[], Kind | None]
    ) -> None:
        self._recorder, self._forward, self._backward = recorder, forward, backward
        self._running = -1  # the op of the layer whose backward is running

    def watch(
        self, name: str, layer: nn.Module, flops: tuple[float, float] = (0.0, 0.0)
    ) -> list[RemovableHandle]:
        """Record a layer from now on, with the FLOPs of its forward and backward; return the handles that end this."""
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
        """End the latest layer's backward."""
        running, self._running = self._running, -1
        self._recorder.end(running)
