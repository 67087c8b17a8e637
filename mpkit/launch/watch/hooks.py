"""Where torch offers a place to listen: loaders, optimizers, runs of autograd's engine, and its own pipelines.

Each function puts its listeners in place, through the `Replacements` that take them away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.autograd
import torch.autograd.graph
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _BaseDataLoaderIter, _PipelineStageBase, current
from mpkit.launch.watch.actions import Actions
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

__all__ = ["watch_backwards", "watch_loaders", "watch_optimizers", "watch_stages"]


def watch_loaders(replaced: Replacements, record: Recorder, actions: Actions) -> None:
    """Record the time until samples are there: each batch that a DataLoader yields is an op of the step that begins."""
    next_batch: Any = _BaseDataLoaderIter.__next__

    def load(batches: Any) -> Any:
        if actions.is_running or _is_at_its_end(batches):
            return next_batch(batches)
        actions.begin_data()
        op = record.begin(Kind.DATA, type(batches).__name__.strip("_"))
        try:
            return next_batch(batches)
        finally:
            record.end(op)

    replaced.put(_BaseDataLoaderIter, "__next__", load)


def _is_at_its_end(batches: Any) -> bool:
    """Return whether there is no further batch, so that no step begins. Without a length, nobody knows."""
    try:
        return bool(batches._num_yielded >= len(batches))
    except TypeError:
        return False


def watch_backwards(replaced: Replacements, begins: Callable[[Any], None], ends: Callable[[], None]) -> None:
    """Call `begins` before each run of autograd's engine (with what it starts from), and `ends` after it."""
    run = current("_engine_run_backward")

    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        begins(outputs)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            ends()

    for module in (torch.autograd, torch.autograd.graph):
        replaced.put(module, "_engine_run_backward", engine_run_backward)


def watch_optimizers(actions: Actions, seen: weakref.WeakSet[Optimizer]) -> tuple[RemovableHandle, ...]:
    """Record the steps of optimizers; one that steps within another (ZeroRedundancyOptimizer) is a part of it.

    Args:
        actions: the rank's actions.
        seen: the optimizers that have stepped are added here.

    Returns:
        The handles that remove the hooks.
    """
    steps: list[int] = []  # the ops of those that are stepping, one within another

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        seen.add(optimizer)
        steps.append(actions.begin(Kind.OPTIMIZER, type(optimizer).__name__))

    def after_step(*_: Any) -> None:
        if steps:
            actions.end(steps.pop())
        if not steps:
            actions.optimizer_stepped()

    return register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)


def watch_stages(replaced: Replacements, actions: Actions) -> None:
    """Record what the schedules of torch.distributed.pipelining call for each action, with its stage and micro-batch.

    F     forward_one_chunk
    B     backward_one_chunk, or I where it is asked for the gradients of the inputs only
    W     backward_weight_one_chunk

    A step's loss is the mean of those of its micro-batches, as `scale_grads=True` has it.
    """
    base: Any = _PipelineStageBase
    forward, backward = base.forward_one_chunk, base.backward_one_chunk
    weights = base.backward_weight_one_chunk

    def run_action(stage: Any, microbatch: int, kind: Kind, run: Any, *args: Any, **kwargs: Any) -> Any:
        before, actions.place = actions.place, (stage.stage_index, microbatch)
        op = actions.begin(kind, f"stage {stage.stage_index}", (args, kwargs))
        try:
            return run(stage, microbatch, *args, **kwargs)
        finally:
            actions.end(op)
            if kind == Kind.FORWARD and stage.is_last:
                actions.begin_loss()
            actions.place = before

    def forward_one_chunk(stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return run_action(stage, fwd_chunk_id, Kind.FORWARD, forward, *args, **kwargs)

    def backward_one_chunk(
        stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        kind = Kind.BACKWARD if full_backward else Kind.INPUT_GRAD
        if stage.is_last and isinstance(loss, Tensor) and loss.numel() == 1:
            actions.note_share(loss / stage.chunks)
        return run_action(stage, bwd_chunk_id, kind, backward, loss, full_backward, *args, **kwargs)

    def backward_weight_one_chunk(stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return run_action(stage, bwd_chunk_id, Kind.WEIGHT_GRAD, weights, *args, **kwargs)

    for function in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
        replaced.put(base, function.__name__, function)
