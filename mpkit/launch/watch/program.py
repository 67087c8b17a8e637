"""A program that knows nothing of mpkit leaves a Trace like any other.

    communication    every operator of c10d: `Communication` and `Completion` (`mpkit.strategies.program_calls`)
    actions          forward, loss, backward, optimizer, steps: `Modules`, `watch_...`, `actions`
    stages, data     torch's pipelines; the time until samples are there
    costs            FLOPs, bytes and memory of each action: `costs`
    names            what the program says it is doing: `Annotations`

Nothing of the program changes: torch offers a place to listen at each of these, and the listeners go at the end.

`Modules` sees forwards and backwards:

    find        a global hook sees the first call of each outermost module
    root        its calls are actions
    layers      the modules inside it that are recorded too: its repeated blocks and what is beside them, or all modules
                down to a depth. Hooks on these few see their forwards, and on their outputs their backwards

The global hook costs each module's call some time. So it is removed when a step has brought nothing new, and returns
when a backward comes without a forward. Compiled modules are recorded as a whole: hooks inside would break the graph.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
import torch.autograd
import torch.autograd.graph
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _BaseDataLoaderIter, _Loss, _PipelineStageBase, current
from mpkit.launch.watch.actions import WATCHED, Actions
from mpkit.launch.watch.costs import WatchedCosts
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.program_calls.communication import Communication
from mpkit.strategies.program_calls.completion import Completion
from mpkit.strategies.program_calls.program import Annotations, SourceLines
from mpkit.strategies.rank_context import Context
from mpkit.trace import Kind
from mpkit.trace.record.hooks import LayerHooks
from mpkit.trace.record.recorder import Recorder

NEEDED = ("torch.distributed.pipelining",)  # watched, so the fork server imports it once for all ranks
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")


def check_watch(watch: Any) -> int | None:
    """Return the depth to which modules are recorded, None (from True) for the repeated blocks."""
    if watch is True:
        return None
    if isinstance(watch, int) and watch >= 0:
        return watch
    raise ValueError(
        f"watch={watch!r}: True records a model's repeated blocks, a number its modules down to that depth, such as "
        "cluster.run(fn, watch=2)"
    )


def watch_function(ctx: Context, function: Callable[..., Any], depth: int | None, *args: Any) -> Any:
    """Call `function(ctx, *args)` on a rank and record what it computes, communicates and holds."""
    record = ctx.comm.wire.record
    annotations, completion = Annotations(), Completion(record)
    communication = Communication(ctx.comm, completion, SourceLines(), annotations)
    roots: WeakSet[nn.Module] = WeakSet()
    optimizers: WeakSet[Optimizer] = WeakSet()
    costs = WatchedCosts(record, annotations, roots, optimizers)
    actions = Actions(record, costs, completion.settle, ctx.rank)
    communication.before = actions.communicate
    modules = Modules(record, actions, roots, depth)
    actions.step_ended = modules.step_ended
    backwards: list[int] = []

    def backward_begins(outputs: Any) -> None:
        modules.backward_begins()
        actions.begin_backward(outputs)
        backwards.append(actions.begin(Kind.BACKWARD, "backward"))
        actions.backwards += 1
        completion.backwards += 1

    def backward_ends() -> None:
        actions.backwards -= 1
        completion.backwards -= 1
        if not actions.backwards:
            modules.backward_ends()
            completion.settle()
        actions.end(backwards.pop())

    replaced = Replacements()
    with ExitStack() as stack:
        for part in (annotations, completion, communication, modules):
            part.install()
            stack.callback(part.uninstall)
        for handle in watch_optimizers(actions, optimizers):
            stack.callback(handle.remove)
        stack.callback(replaced.restore)
        watch_backwards(replaced, backward_begins, backward_ends)
        watch_loaders(replaced, record, actions)
        watch_stages(replaced, actions)
        stack.callback(costs.uninstall)
        token = WATCHED.set(actions)
        stack.callback(WATCHED.reset, token)
        result = function(ctx, *args)
        stack.close()
        actions.finish()
        return result


class Modules:
    """The modules of one rank's program: the outermost ones are added to `roots`, and recorded down to `depth`."""

    def __init__(
        self, record: Recorder, actions: Actions, roots: WeakSet[nn.Module], depth: int | None
    ) -> None:
        self._actions, self.roots, self._depth = actions, roots, depth
        self._handles: list[RemovableHandle] = []
        self._finder: RemovableHandle | None = None
        self._new = False
        self._inside = 0  # how many roots are being called, one within another
        self._forwards = 0  # since the last backward
        self._layers = LayerHooks(
            record,
            lambda: Kind.RECOMPUTE if actions.backwards else Kind.FORWARD,
            lambda: Kind.BACKWARD if actions.backwards else None,
        )

    def install(self) -> None:
        """Begin to look for outermost modules."""
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
        if self._finder is None:
            self._finder = register_module_forward_pre_hook(self._find)

    def uninstall(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_finding()

    def step_ended(self) -> None:
        """Stop looking for outermost modules if the step had no new ones."""
        if not self._new:
            self._stop_finding()
        self._new = False

    def _stop_finding(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _find(self, module: nn.Module, inputs: Any) -> None:
        actions = self._actions
        if torch.compiler.is_compiling() or self._inside or actions.backwards or module in self.roots:
            return
        if actions.depth and actions.place == (-1, -1):  # within something else than a pipeline's action
            return
        if not any(True for _ in module.parameters()) and not isinstance(module, _Loss):
            return  # a ReLU that is called by hand says little
        self._new = True
        self.roots.add(module)
        name = type(module).__name__
        ops: list[int] = []

        def before_forward(_module: nn.Module, inputs: Any, given: Any) -> None:
            if torch.compiler.is_compiling():
                return
            kind = Kind.RECOMPUTE if self._actions.backwards else Kind.FORWARD
            self._inside += 1
            ops.append(self._actions.begin(kind, name, (inputs, given)))

        def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not ops:
                return
            self._forwards += 1
            self._inside -= 1
            self._actions.end(ops.pop())
            if torch.is_grad_enabled() and output is not None:
                self._actions.begin_loss()

        before_forward(module, inputs, {})
        self._handles += [
            module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(after_forward, always_call=True),
        ]
        for path, layer in layers_to_record(module, self._depth):
            self._handles += self._layers.watch(path, layer)

    def backward_begins(self) -> None:
        """Look for outermost modules again if nothing that is known has run since the last backward."""
        if not self._forwards:
            self.install()

    def backward_ends(self) -> None:
        """End the backward of the layer that came last."""
        self._forwards = 0
        self._layers.end_backward()


def layers_to_record(root: nn.Module, depth: int | None = None) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a root whose forwards and backwards are recorded, by name.

    They are those down to `depth`, containers not counted; None: the repeated blocks and those beside them.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": nn.ModuleList(
    ...     nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))})
    >>> [name for name, _ in layers_to_record(model)]
    ['embed', 'layers.0', 'layers.1']
    >>> [name for name, _ in layers_to_record(model, depth=2)]
    ['embed', 'layers.0', 'layers.0.0', 'layers.0.1', 'layers.1', 'layers.1.0', 'layers.1.1']
    """
    if (inner := unwrap_module(root)) is None:
        return []
    return list(_layers_within(inner, "", depth, {id(block) for block in repeated_blocks(inner).values()}))


def _layers_within(
    module: nn.Module, prefix: str, depth: int | None, blocks: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    lists = (nn.ModuleList, nn.ModuleDict)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if depth is None and blocks:
            is_opened = id(child) not in blocks and any(id(inner) in blocks for inner in child.modules())
        else:
            is_opened = isinstance(child, lists if depth is not None else (*lists, nn.Sequential))
        if is_opened:
            yield from _layers_within(child, f"{path}.", depth, blocks)
        elif depth is None:
            if any(True for _ in child.parameters()):
                yield path, child
        elif depth > 0:
            yield path, child
            yield from _layers_within(child, f"{path}.", depth - 1, blocks)


def unwrap_module(root: nn.Module) -> nn.Module | None:
    """Return the program's own module inside DDP, FSDP and the like; None if it is compiled."""
    while True:
        if "torch._dynamo" in sys.modules:
            from mpkit.common.torch_private import OptimizedModule

            if isinstance(root, OptimizedModule):
                return None
        for wrapper in _WRAPPERS:
            inner = root._modules.get(wrapper[:-1])
            if isinstance(inner, nn.Module) and sum(True for _ in root.children()) == 1:
                root = inner
                break
        else:
            return root


def watch_loaders(replaced: Replacements, record: Recorder, actions: Actions) -> None:
    """Record the time until samples are there: each batch that a DataLoader yields is an op of the step that begins."""
    next_batch: Any = _BaseDataLoaderIter.__next__

    def load(batches: Any) -> Any:
        if actions.depth or _is_at_its_end(batches):
            return next_batch(batches)
        actions.begin_data()
        op = record.begin(Kind.DATA, type(batches).__name__.strip("_"))
        try:
            return next_batch(batches)
        finally:
            record.end(op)

    replaced.put(_BaseDataLoaderIter, "__next__", load)


def _is_at_its_end(batches: Any) -> bool:
    """Return whether no further batch comes, so that no step begins. Without a length, that is unknown."""
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


def watch_optimizers(actions: Actions, seen: WeakSet[Optimizer]) -> tuple[RemovableHandle, ...]:
    """Record the steps of optimizers; one that steps within another (ZeroRedundancyOptimizer) is a part of it.

    Optimizers that have stepped are added to `seen`. The handles remove the hooks.
    """
    steps: list[int] = []  # the ops of those that are stepping, one within another

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        seen.add(optimizer)
        steps.append(actions.begin(Kind.OPTIMIZER, type(optimizer).__name__))

    def after_step(*_: Any) -> None:
        if steps:
            actions.end(steps.pop())
        if not steps:
            actions.has_stepped = True

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
            actions.shares.append(loss.detach() / stage.chunks)
        return run_action(stage, bwd_chunk_id, kind, backward, loss, full_backward, *args, **kwargs)

    def backward_weight_one_chunk(stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return run_action(stage, bwd_chunk_id, Kind.WEIGHT_GRAD, weights, *args, **kwargs)

    for function in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
        replaced.put(base, function.__name__, function)
