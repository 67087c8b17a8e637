"""What a program's actions cost: FLOPs, bytes moved, and memory by category.

In measured steps a dispatch mode sees every operator: its FLOPs, the bytes that it moves and the memory that it takes.
That costs some 20 us per operator, so later steps are played (`mpkit.trace.record.memory`): an action that begins after
the same ones, with inputs of the same shapes, costs what it cost when it was measured.

Categories: parameters and buffers when their module is first called; gradients after a backward; states after the
optimizer's step. What a forward, a loss or a backward takes besides counts as activations, as do batches; what is
gathered or sent (annotated "FSDP::"), what the optimizer takes for a moment and what the program made before its first
action counts as buffers, unless it is a parameter. What a backend copies for itself is not seen.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import TorchDispatchMode, _get_current_dispatch_mode
from mpkit.strategies.program_calls.program import Annotations
from mpkit.trace import Kind
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.operators import flops_of, moved_by, tensors_in
from mpkit.trace.record.recorder import Recorder


class WatchedCosts:
    """The costs of one rank's actions; `modules` are the outermost ones, `optimizers` those that have stepped."""

    def __init__(
        self, record: Recorder, annotations: Annotations, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:  # fmt: skip
        self._record, self._annotations = record, annotations
        self._modules, self._optimizers = modules, optimizers
        self._memory, self._ledger = record.memory, record.ledger
        self._memory.checks, self._memory.before_end = False, self._sort
        self._known: dict[int, tuple[float, int]] = {}  # FLOPs and bytes of the last action of a sequence
        self._sequence = 0
        self._begins_step = False
        self._mode: OperatorCosts | None = None
        self._kind = Kind.DATA
        self._before = 0.0, 0

    def install(self) -> None:
        """Measure from here on, and count what is held already."""
        if self._mode is not None or torch.compiler.is_compiling():
            return
        self._ledger.be_quiet()
        self._ledger.forget()
        for thing in gc.get_objects():  # what the program made before: all tensors that Python knows of
            if issubclass(type(thing), torch.Tensor):
                category = "params" if issubclass(type(thing), nn.Parameter) else "buffers"
                self._ledger.track(_local(thing), category)
        self._sort()
        self._ledger.be_awake()
        self._mode = OperatorCosts(self._ledger, self._category)
        self._mode.__enter__()

    def uninstall(self) -> None:
        """Stop measuring, unless a mode of the program's lies above ours."""
        if self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def step_begins(self) -> None:
        """Begin a new sequence, with the next action."""
        self._sequence, self._begins_step = 0, True

    def begins(self, kind: Kind, name: str, inputs: Any = ()) -> float:
        """Begin an action; return its FLOPs if they are known. With inputs of other shapes, an action costs something
        else.
        """
        tensors = list(tensors_in(inputs))
        detail = torch.is_grad_enabled(), tuple([tensor.shape for tensor in tensors])
        self._kind = kind
        self._sequence = hash((self._sequence, kind, name, detail))
        if self._begins_step:
            self._begins_step = False
            if self not in self._memory.instruments:
                self._memory.add(self)
            self._record.begin_memory(self._sequence)
        self._memory.detail = detail
        self._memory.follow((kind, name, detail))
        if self._mode is None:
            return self._known.get(self._sequence, (0.0, 0))[0]
        for tensor in tensors:
            self._ledger.track(_local(tensor), "activations")
        self._before = self._mode.flops, self._mode.nbytes
        return 0.0

    def ends(self, op: int) -> None:
        """End the outermost action, whose op is over: write what it cost."""
        self._kind = Kind.DATA
        if self._mode is not None:
            flops, nbytes = self._before
            self._known[self._sequence] = self._mode.flops - flops, self._mode.nbytes - nbytes
        if self._sequence in self._known:
            self._record.costs(op, *self._known[self._sequence])

    def _category(self) -> str:
        gathers = self._annotations.innermost.startswith("FSDP::")
        return "buffers" if gathers or self._kind == Kind.OPTIMIZER else "activations"

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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part of a tensor: of a DTensor its shard."""
    return getattr(tensor, "_local_tensor", tensor)


_DESUGARED = {"DTensor", "AsyncCollectiveTensor"}  # made of others, whose own operators count


class OperatorCosts(TorchDispatchMode):
    """The mode that sees every operator of a measured step.

    `category` returns the category of the memory that is taken now. `flops` and `nbytes` (bytes read and written) are
    sums so far.
    """

    def __init__(self, ledger: Ledger, category: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._category = ledger, category
        self._replaced = Replacements()
        self.flops = 0.0
        self.nbytes = 0

    def __enter__(self) -> Any:
        resize, ledger = torch.UntypedStorage.resize_, self._ledger

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # as FSDP does, past all operators
            resized = resize(storage, size)
            ledger.note_resize(storage)
            return resized

        self._replaced.put(torch.UntypedStorage, "resize_", resize_)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._replaced.restore()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ in _DESUGARED for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        self.nbytes += moved_by(func, args, kwargs, out)
        for tensor in tensors_in(out):
            self._ledger.track(tensor, self._category())
        return out
