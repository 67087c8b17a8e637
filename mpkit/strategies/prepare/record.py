"""The dry run of an opened model: run its forward and its loss once, and record them as a Graph.

Everything is computed, on fake tensors if the model allows it. Each output of a block, or of an operation on such an
output, is wrapped in a Value, which shows where it is used.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import peek_interpreter_stack
from mpkit.strategies.data.microbatch import Value as Data
from mpkit.strategies.models.nested_values import REGISTER, flatten, rebuild
from mpkit.strategies.partition.graph import CallNode, Constant, Graph, Leaf, New, PassedArgument
from mpkit.strategies.partition.value import Value, ValueLooked, spec_of
from mpkit.strategies.partition.walk import ForwardWalk, OriginalForward, current_walk
from mpkit.strategies.prepare.observe import Backwards, cut_off
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.flops import Attentions, Meter
from mpkit.trace.record.operators import tensors_in

PLAIN = (bool, int, float, str, bytes, slice, range, torch.Size, torch.dtype, torch.device, type(None))
"""Types other than tensors that may pass between blocks: they are the same for all micro-batches of one shape."""

HOOKS = ("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
"""Methods that request gradients in the middle of a forward; only the rank that computes them sees these."""


class CannotCut(Exception):
    """What an opened module (`scope`) does between its blocks cannot be divided among ranks."""

    def __init__(self, scope: str, why: str) -> None:
        super().__init__(why)
        self.scope = scope


class EnteredFromOutside(Exception):
    """A submodule of a block is called from outside, so the block must be opened."""

    def __init__(self, block: str) -> None:
        super().__init__(f"{block} is entered from outside")
        self.block = block


def tell_if_entered(name: str, block: nn.Module) -> None:
    """Let the dry run detect that a block is entered from outside: OPTForCausalLM calls its model's decoder."""

    def check(*_: Any) -> None:
        if current_walk() is not None:
            raise EnteredFromOutside(name)

    for inner in block.modules():
        if inner is not block and not isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            inner.register_forward_pre_hook(check)


def record(
    model: nn.Module, inputs: Data, targets: Data, loss: Callable[[Any, Any], Any], device: torch.device,
    backwards: Backwards, kinds: Mapping[str, Hashable],
) -> Graph:  # fmt: skip
    """Record what the forward of a prepared model (`prepare_modules`) does to a micro-batch, or raise CannotCut.

    `kinds` has, by block, a key that is equal for blocks that compute the same.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.enable_grad(), NodeRecording(names, device, backwards, kinds) as recording:
        outputs = call(model, inputs, first=True)
    with torch.enable_grad(), LossValues(recording) as wanted:
        result = loss(outputs, targets)
    wanted.see([result])
    given = {leaf.number for leaf in flatten(outputs)[0] if type(leaf) is Value}
    if not given.issuperset(wanted.numbers):
        raise CannotCut(
            "", f"the loss takes tensors from an object that cannot be looked into, as can {REGISTER}"
        )
    graph: Graph = recording.graph
    graph.wanted = tuple(wanted.numbers)
    graph.loss = backwards.count(wanted.watch.measured(), [_real(result)], wanted.given)
    return graph


class NodeRecording(ForwardWalk):
    """A walk that records every node."""

    def __init__(
        self, parameters: dict[int, str], device: torch.device, backwards: Backwards, kinds: Mapping[str, Hashable]
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        self.graph = Graph()
        self._device, self._backwards, self._kinds = device, backwards, kinds
        self._instead: dict[int, int] = {}  # by storage of a copy that a block was given, the original's
        self._alive: dict[int, WeakSet[Value]] = {}  # by storage
        self._made_in: dict[int, int] = {}  # by storage, the node that made it
        self._kept: list[Tensor] = []  # kept alive, so that no storage address is reused

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the tensors behind the values and record it."""
        graph, scope = self.graph, self.scopes[-1]
        if name in HOOKS:
            raise CannotCut(scope, f"{name} is called on a tensor that a block made")
        if peek_interpreter_stack() is not None:
            raise CannotCut(scope, f"{name} is called within a transform of torch.func (vmap, grad or jvp)")
        leaves, shape = flatten((args, kwargs))
        values = [leaf for leaf in leaves if type(leaf) is Value]
        self._check_handed_over(name, leaves)
        for value in values:
            if value.stale:
                raise CannotCut(scope, f"{name} is given a view of a tensor that was written into since")
        block = isinstance(func, OriginalForward)
        real, given = self._given_to(leaves, block)
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in real]
        watch = OperatorWatch(self, len(graph.nodes), real, "" if block else name)
        real_args, real_kwargs = rebuild(shape, real)
        try:
            with Attentions(watch), watch:
                result = func(*real_args, **real_kwargs)
        except ValueLooked:
            raise CannotCut(
                scope,
                f"{name} computes with what other layers made in place of its parameters (functional_call), or within "
                f"an object that cannot be looked into, as can {REGISTER}",
            ) from None
        after, shape_after = flatten((real_args, real_kwargs))
        if shape_after != shape or any(one is not other for one, other in zip(real, after, strict=True)):
            raise CannotCut(scope, f"{name} changes a list, a dict or an object that it was given")
        made, result_shape = flatten(result)
        written = [
            i for i, (leaf, version) in enumerate(zip(real, versions, strict=True))
            if isinstance(leaf, Tensor) and leaf._version != version
        ]  # fmt: skip
        if not block and not written and not any(isinstance(leaf, Tensor) for leaf in made):
            return self._answer(name, func, args, kwargs)
        parameters = tuple(self._parameters[id(leaf)] for leaf in leaves if id(leaf) in self._parameters)
        numbers = tuple(value.number for value in values)
        node = CallNode(name, block, scope, numbers, parameters, result_shape, ())
        node.written = self._write(node, leaves, real, written)
        node.leaves, back = self._wrap(node, leaves, real, made)
        kind = (self._kinds.get(name), tuple(map(spec_of, values))) if block else None
        node.random = watch.random
        tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
        node.flops = self._backwards.count(watch.measured(), tensors, given, kind)
        graph.nodes.append(node)
        return rebuild(result_shape, back)

    def _given_to(self, leaves: list[Any], block: bool) -> tuple[list[Any], list[Tensor]]:
        """Return the tensors behind the leaves of a node's arguments, and those through which gradients arrive.

        A block is given copies without a graph, so that its backward ends at them.
        """
        real = [_real(leaf) for leaf in leaves]
        if not block:
            return real, [leaf for leaf in real if isinstance(leaf, Tensor) and leaf.requires_grad]
        wraps = [type(leaf) is Value for leaf in leaves]
        cut, ends = cut_off([leaf for leaf, is_value in zip(real, wraps, strict=True) if is_value])
        copies = iter(cut)
        given = [next(copies) if is_value else leaf for leaf, is_value in zip(real, wraps, strict=True)]
        for before, after in zip(real, given, strict=True):
            if before is not after:
                self._instead[after.untyped_storage()._cdata] = self.storage(before)
                self._kept.append(after)
        return given, ends

    def storage(self, tensor: Tensor) -> int:
        """Return a number that is equal for tensors that share memory in a training."""
        number = int(tensor.untyped_storage()._cdata)
        return self._instead.get(number, number)

    def inputs_only(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that an operation's arguments depend on the inputs only: a hook or an attribute may pass on others."""
        if self._made_in:
            self._check_handed_over(getattr(func, "__name__", "an operation"), flatten((args, kwargs))[0])

    def _check_handed_over(self, name: str, leaves: list[Any]) -> None:
        for leaf in leaves:
            maker = self.made_in(leaf) if isinstance(leaf, Tensor) and type(leaf) is not Value else None
            if maker is not None:
                raise CannotCut(
                    self.scopes[-1],
                    f"{name} is given a tensor that {self.graph.nodes[maker].name} made and did not return (a hook, a "
                    "cache or an attribute kept it)",
                )

    def _answer(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a question about shapes, the only ones that values can answer."""
        try:
            return func(*args, **kwargs)
        except ValueLooked:
            raise CannotCut(
                self.scopes[-1], f"{name} looks at the numbers of a tensor that a block made"
            ) from None

    def _write(
        self, node: CallNode, leaves: list[Any], real: list[Any], written: list[int]
    ) -> tuple[tuple[int, int], ...]:
        """Give each value that was written into a new number, since it differs from now on: (position, number), ..."""
        versions = []
        for i in written:
            value = leaves[i]
            if type(value) is not Value:
                if id(value) in self._parameters or not node.arguments:
                    continue  # inputs, which every rank writes into
                raise CannotCut(
                    node.scope, f"{node.name} writes what a block made into a tensor that no block made"
                )
            for other in self._alive.get(self.storage(real[i]), ()):
                other.stale = other is not value
            value.number, value.behind = self._number(real[i]), real[i]
            versions.append((i, value.number))
        return tuple(versions)

    def _wrap(
        self, node: CallNode, leaves: list[Any], real: list[Any], made: list[Any]
    ) -> tuple[tuple[Leaf, ...], list[Any]]:
        """Return the leaves of a result as the graph records them, and those with which the forward continues."""
        places = {id(leaf): i for i, leaf in enumerate(real) if not isinstance(leaf, PLAIN)}
        fresh: dict[int, Value] = {}
        described: list[Leaf] = []
        back: list[Any] = []
        for leaf in made:
            if id(leaf) in places:
                described.append(PassedArgument(places[id(leaf)]))
                back.append(leaves[places[id(leaf)]])
            elif isinstance(leaf, Tensor):
                value = fresh.get(id(leaf))
                if value is None:
                    value = fresh[id(leaf)] = Value(spec_of(leaf), self._device, self._number(leaf), leaf)
                    self._alive.setdefault(self.storage(leaf), WeakSet()).add(value)
                described.append(New(value.number))
                back.append(value)
            elif isinstance(leaf, PLAIN):
                described.append(Constant(leaf))
                back.append(leaf)
            else:
                raise CannotCut(
                    node.scope,
                    f"{node.name} gives back a {type(leaf).__name__}, which cannot be sent to another rank, as can "
                    f"{REGISTER}",
                )
        return tuple(described), back

    def _number(self, tensor: Tensor) -> int:
        number = len(self.graph.specs)
        self.graph.specs[number] = spec_of(tensor)
        return number

    def keep(self, tensor: Tensor, node: int) -> None:
        """Record that a node made this tensor."""
        storage = self.storage(tensor)
        if storage not in self._made_in:
            self._made_in[storage] = node
            self._kept.append(tensor)

    def made_in(self, tensor: Tensor) -> int | None:
        """Return the node that made the tensor; None if no node did."""
        return self._made_in.get(self.storage(tensor))


class OperatorWatch(Meter):
    """Observes a node's operators: costs, random numbers, and tensors of other blocks that bypass the graph."""

    def __init__(self, recording: NodeRecording, node: int, given: list[Any], operation: str = "") -> None:
        super().__init__()
        self._recording, self._node, self._operation = recording, node, operation
        self._given = {recording.storage(leaf) for leaf in given if isinstance(leaf, Tensor)}
        self.random = False

    def give(self, leaves: list[Any]) -> None:
        """Let operators read these tensors from now on."""
        self._given |= {self._recording.storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recording, storage = self._recording, self._recording.storage
        given = set(self._given)
        for leaf in tensors_in((args, kwargs)):
            given.add(storage(leaf))
            maker = recording.made_in(leaf)
            if maker is not None and maker != self._node and storage(leaf) not in self._given:
                node = recording.graph.nodes[maker]
                raise CannotCut(
                    recording.scopes[-1],
                    f"a tensor that {node.name} made is read without having been handed over (kept in an "
                    "attribute, a cache or a closure)",
                )
            if id(leaf) in recording._parameters and self._operation and storage(leaf) not in self._given:
                raise CannotCut(
                    recording.scopes[-1],
                    f"{self._operation} computes with {recording._parameters[id(leaf)]}, which it is not given",
                )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.random = self.random or draws(func, args, kwargs or {})
        for leaf in tensors_in(out):
            if storage(leaf) not in given:  # not a view of an earlier tensor
                recording.keep(leaf, self._node)
        return out


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    arguments |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return arguments.get("dropout_p") != 0.0


class LossValues(ForwardWalk):
    """A walk that records which values the loss uses."""

    def __init__(self, recording: NodeRecording) -> None:
        super().__init__(recording._parameters)
        self.numbers: dict[int, None] = {}
        self.watch = OperatorWatch(recording, -1, [])
        self.given: list[Tensor] = []  # what it is given that has a gradient

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the tensors behind the values without wrapping its result: a loss may do anything."""
        leaves, shape = flatten((args, kwargs))
        self.see(leaves)
        real = [_real(leaf) for leaf in leaves]
        pairs = zip(leaves, real, strict=True)
        self.given += [leaf for one, leaf in pairs if type(one) is Value and leaf.requires_grad]
        self.watch.give(real)
        real_args, real_kwargs = rebuild(shape, real)
        with self.watch:
            return func(*real_args, **real_kwargs)

    def see(self, leaves: list[Any]) -> None:
        """Record that the loss uses these values."""
        for leaf in leaves:
            if type(leaf) is Value and leaf.number >= 0:
                self.numbers[leaf.number] = None


def _real(leaf: Any) -> Any:
    return leaf.behind if type(leaf) is Value else leaf
