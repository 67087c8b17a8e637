"""One stage's walk through the model's forward, node after node, as the dry run recorded it.

    own         take its arguments (made here before, or received), run it, check the result, and pass that on
    another's   return stand-ins of the recorded shapes as its result

Any difference from the dry run is an error, since the other ranks rely on it.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpkit.errors import MpkitError
from mpkit.strategies.models.nested_values import Shape, flatten, rebuild
from mpkit.strategies.models.own_draws import spans_at
from mpkit.strategies.models.randomness import Draws
from mpkit.strategies.partition.graph import CallNode, Constant, Division, Leaf, PassedArgument
from mpkit.strategies.partition.value import Spec, Value, ValueLooked, spec_of
from mpkit.strategies.partition.walk import ForwardWalk, OriginalForward


class Forward(ForwardWalk):
    """One stage's walk through a forward.

    `known` has the tensors that the stage received, by number of the value; `draws` the random numbers of each node.
    """

    def __init__(
        self, parameters: dict[int, str], device: torch.device, division: Division, stage: int,
        known: dict[int, Tensor], draws: Draws,
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        self._graph, self._stage_of = division.graph, division.stage_of
        self._stage, self._device = stage, device
        self._known, self._draws = known, draws
        self._needed = frozenset(division.outputs[stage])
        calls = [(node.name, True) if node.block else (node.scope, False) for node in division.graph.nodes]
        self._spans = [*spans_at(calls, draws.own.spans), ()]
        self._next = 0
        self.made: dict[int, Tensor] = {}  # tensors that other stages need, by number

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a node if it is this stage's, and else return stand-ins."""
        k = self._next
        node = self._graph.nodes[k] if k < len(self._graph.nodes) else None
        if node is None or node.name != name:
            return self._answer(name, func, args, kwargs, node)
        leaves, shape = flatten((args, kwargs))
        given = tuple(leaf.number for leaf in leaves if type(leaf) is Value and leaf.number >= 0)
        if given != node.arguments:
            raise _another_way(f"{name} was given the values {given}, and {node.arguments} in the dry run")
        self._next += 1
        if node.random:
            self._draws.begin(f"{k} {name}", self._spans[k])
        own = self._stage_of[k] == self._stage
        result = self._do(node, func, leaves, shape) if own else self._pass_over(node, leaves)
        if node.random:
            self._draws.begin(f"after {k}", self._spans[k + 1])
        else:  # the module that does may be another rank's
            self._draws.own.move(self._spans[k + 1], self._device)
        return result

    def check_end(self) -> None:
        """Check that all nodes of the dry run have been reached."""
        if self._next < len(self._graph.nodes):
            raise _another_way(f"{self._graph.nodes[self._next].name} did not happen")

    def _answer(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], due: CallNode | None
    ) -> Any:
        """Answer a question about shapes, which every value can; anything else is unexpected here."""
        if type(func) is not OriginalForward:
            try:
                return func(*args, **kwargs)
            except ValueLooked:
                pass
        raise _another_way(f"{name} happened instead of {'the end' if due is None else due.name}")

    # ---- own ----------------------------------------------------------------------------------------------

    def _do(self, node: CallNode, func: Any, leaves: list[Any], shape: Shape) -> Any:
        real = [self.tensor(leaf) if type(leaf) is Value else leaf for leaf in leaves]
        for i, _ in node.written:
            real[i] = self._before_writing(leaves[i], real[i])
        args, kwargs = rebuild(shape, real)
        if self.checkpoints and node.block and torch.is_grad_enabled():
            func = partial(checkpoint, func, use_reentrant=False)
        result, result_shape = flatten(func(*args, **kwargs))
        for i, number in node.written:
            leaves[i].number, leaves[i].behind = number, real[i]
            self._keep(number, real[i])
        if result_shape != node.result:
            raise _another_way(f"{node.name} made something of another structure than in the dry run")
        fresh: dict[int, Value] = {}
        pairs = zip(node.leaves, result, strict=True)
        return rebuild(node.result, [self._check_leaf(node, *pair, leaves, real, fresh) for pair in pairs])

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor behind a value."""
        if value.behind is None:
            value.behind = self._known.get(value.number)
            if value.behind is None:
                which = value.called or f"value {value.number}"
                raise _another_way(f"stage {self._stage} needs {which}, which it did not in the dry run")
        return value.behind

    def _before_writing(self, value: Value, tensor: Tensor) -> Tensor:
        """Return a tensor that may be written into; the old one is kept for others, or for a backward."""
        if value.number in self._needed:
            self.made[value.number] = tensor.clone()
        return tensor.clone() if value.number in self._known else tensor

    def _check_leaf(
        self, node: CallNode, promised: Leaf, leaf: Any, given: list[Any], real: list[Any], fresh: dict[int, Value]
    ) -> Any:  # fmt: skip
        """Return a leaf of a result as the forward continues with it, checked against the dry run."""
        if isinstance(promised, Constant):
            if type(leaf) is not type(promised.value) or leaf != promised.value:
                raise _another_way(
                    f"{node.name} gave back {leaf!r}, and {promised.value!r} in the dry run, which the other ranks "
                    "go on with; what depends on numbers travels in a tensor"
                )
            return leaf
        if isinstance(promised, PassedArgument):
            before = given[promised.place]
            if leaf is not real[promised.place] and type(before) is Value and isinstance(leaf, Tensor):
                return Value(spec_of(leaf), self._device, before.number, leaf)  # a copy on this rank
            return before
        spec = self._graph.specs[promised.number]
        if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (spec.shape, spec.dtype):
            made = _describe_spec(spec_of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise _another_way(
                f"{node.name} made {made}, and {_describe_spec(spec)} in the dry run: what goes from block to block "
                "may depend on the shapes of the data, and not on its values"
            )
        if promised.number not in fresh:
            fresh[promised.number] = Value(spec, self._device, promised.number, leaf)
            self._keep(promised.number, leaf)
        return fresh[promised.number]

    def _keep(self, number: int, tensor: Tensor) -> None:
        if number in self._needed:
            self.made[number] = tensor

    # ---- another's ----------------------------------------------------------------------------------------

    def _pass_over(self, node: CallNode, given: list[Any]) -> Any:
        for i, number in node.written:
            given[i].number, given[i].behind = number, None
        fresh: dict[int, Value] = {}
        back: list[Any] = []
        for leaf in node.leaves:
            if isinstance(leaf, Constant):
                back.append(leaf.value)
            elif isinstance(leaf, PassedArgument):
                back.append(given[leaf.place])
            else:
                if leaf.number not in fresh:
                    fresh[leaf.number] = Value(self._graph.specs[leaf.number], self._device, leaf.number)
                back.append(fresh[leaf.number])
        return rebuild(node.result, back)


def _another_way(what: str) -> MpkitError:
    return MpkitError(
        f"The model's forward went another way than in its dry run, by which the ranks know what they send each other: "
        f"{what}. Between its blocks a forward may depend on the shapes of the data only; within a block, and before "
        "the first one, on values too. Put what depends on values into a block, or train with Plan.serial()."
    )


def _describe_spec(spec: Spec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
