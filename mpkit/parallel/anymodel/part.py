"""A stage of an opened model: the model's own forward, in which this stage's nodes are done and the others passed over.

    skeleton   a rank keeps the whole model, but of its weights only those that its stages compute with
    walk       node after node, as the dry run promised:
                   own         its arguments are taken (made here before, or received), it is done, checked, and goes on
                   another's   its result is stand-ins of the promised shapes
    outputs    what other stages need; at the last stage, the model's outputs as far as the loss looks at them

Since the forward runs as it is written, control flow on the model's inputs works as ever: every rank has the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.parallel.anymodel.graph import Constant, Division, Given, Leaf, Node, Opened
from mpkit.parallel.anymodel.structure import Shape, flatten, rebuild
from mpkit.parallel.anymodel.value import Looked, Value, spec_of
from mpkit.parallel.anymodel.walk import Call, Walk, prepare_modules
from mpkit.parallel.job import Spec
from mpkit.parallel.microbatch import Value as Data
from mpkit.parallel.randomness import Draws
from mpkit.parallel.stage import Stage, call

__all__ = ["Part", "place_parts"]


def place_parts(
    model: nn.Module,
    opened: Opened,
    numbers: Iterable[int],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[dict[int, Stage], dict[str, Tensor]]:
    """A rank's stages by number, and what of the model's state is in no stage's layers, on the rank of stage 0.

    The model becomes the rank's skeleton: weights that no stage here needs are let go.

    Args:
        model: this rank's own copy, on the CPU.
        numbers: of the stages.
        device: the rank's.
        dtype: what is computed in, if not in the model's own precision.
    """
    here = tuple(numbers)
    inside = tuple(f"{block}." for block in opened.blocks)
    parameters = {id(parameter) for parameter in model.parameters()}
    skeleton = Skeleton(model, opened, here, device, dtype)
    rest = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and id(value) not in parameters and not name.startswith(inside)
    }
    return {number: Part(number, skeleton, opened) for number in here}, rest if 0 in here else {}


class Skeleton:
    """A rank's model: whole as to its modules, with stand-ins for the weights that other ranks hold.

    Attributes:
        model: the user's, on this rank.
        parameters: those that are here, by their first name in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Opened,
        stages: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.model, self.device = model, device
        self.blocks = prepare_modules(model, opened.modules, opened.blocks)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = {name for number in stages for name in opened.held[number]}
        here = {block for number in stages for block in opened.placed[number]}
        elsewhere = tuple(f"{block}." for block in opened.blocks if block not in here)

        def computed_in(tensor: Tensor) -> torch.dtype:
            return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

        def stand_in(tensor: Tensor, called: str) -> Value:
            spec = spec_of(tensor)._replace(dtype=computed_in(tensor))
            return Value(spec, device, -1, called=called)

        self.parameters = {name: p for name, p in model.named_parameters() if name in held}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and names[id(parameter)] not in held:
                    module._parameters[name] = stand_in(parameter, names[id(parameter)])
            for name, buffer in module._buffers.items():
                if buffer is not None and f"{prefix}.".startswith(elsewhere):
                    module._buffers[name] = stand_in(buffer, f"{prefix}.{name}")
                elif buffer is not None:
                    module._buffers[name] = buffer.to(device, computed_in(buffer))
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}


class Loose(nn.Module):
    """The parameters of a stage that belong to opened modules: a position embedding that the model adds itself."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)


class Part(Stage):
    """A stage of an opened model.

    Attributes:
        layers: its blocks, then its loose parameters.
    """

    def __init__(self, number: int, skeleton: Skeleton, opened: Opened) -> None:
        blocks = [(name, skeleton.blocks[name]) for name in opened.placed[number]]
        self._parameters = {name: skeleton.parameters[name] for name in opened.held[number]}
        inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
        loose = Loose([p for p in self._parameters.values() if id(p) not in inside])
        super().__init__(number, [*blocks, ("loose parameters", loose)], skeleton.device)
        self._skeleton = skeleton
        self._state = [name for name, stage in opened.state.items() if stage == number]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By their first names in the model."""
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, Tensor]:
        """What this stage gives of the model's state, on the CPU."""
        whole = self._skeleton.model.state_dict(keep_vars=True)
        entries = {name: whole[name] for name in self._state}
        return {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in entries.items()
        }

    def run(
        self, division: Division, data: Data, received: tuple[Tensor, ...], draws: Draws
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """The model's outputs as far as they are known here, and what other stages need of this one.

        Args:
            division: for micro-batches of this shape.
            data: the model's inputs.
            received: what other stages made, in the order of the routes that end here.
            draws: the random numbers.
        """
        arriving = (route for route in division.routes if route.target == self.number)
        numbers = [division.outputs[route.source][i] for route in arriving for i in route.which]
        known = dict(zip(numbers, received, strict=True))
        draws.begin("")
        with Forward(self._skeleton, division, self.number, known, draws) as forward:
            outputs = call(self._skeleton.model, data, first=True)
        forward.check_end()
        wanted = frozenset(division.graph.wanted) if self.number == len(division.outputs) - 1 else frozenset()
        leaves, shape = flatten(outputs)
        leaves = [
            forward.tensor(leaf) if type(leaf) is Value and leaf.number in wanted else leaf for leaf in leaves
        ]
        made = tuple(forward.made[number] for number in division.outputs[self.number])
        return rebuild(shape, leaves), made


class Forward(Walk):
    """One stage's walk through a forward.

    Args:
        skeleton: the rank's model.
        division: whose nodes they are.
        stage: the one that is computed.
        known: what it received, by number of the value.
        draws: random numbers, for each node its own.

    Attributes:
        made: what other stages need, by number.
    """

    def __init__(
        self, skeleton: Skeleton, division: Division, stage: int, known: dict[int, Tensor], draws: Draws
    ) -> None:
        super().__init__(skeleton.names)
        self._graph, self._stage_of = division.graph, division.stage_of
        self._stage, self._device = stage, skeleton.device
        self._known, self._draws = known, draws
        self._needed = frozenset(division.outputs[stage])
        self._next = 0
        self.made: dict[int, Tensor] = {}

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do it, if it is this stage's."""
        k = self._next
        node = self._graph.nodes[k] if k < len(self._graph.nodes) else None
        if node is None or node.name != name:
            return self._answer(name, func, args, kwargs, node)
        leaves, shape = flatten((args, kwargs))
        given = tuple(leaf.number for leaf in leaves if type(leaf) is Value and leaf.number >= 0)
        if given != node.arguments:
            raise _another_way(f"{name} was given other tensors than in the dry run")
        self._next += 1
        if node.random:
            self._draws.begin(f"{k} {name}")
        own = self._stage_of[k] == self._stage
        result = self._do(node, func, leaves, shape) if own else self._pass_over(node, leaves)
        if node.random:
            self._draws.begin(f"after {k}")
        return result

    def check_end(self) -> None:
        """Everything that the dry run promised has happened."""
        if self._next < len(self._graph.nodes):
            raise _another_way(f"{self._graph.nodes[self._next].name} did not happen")

    def _answer(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], due: Node | None
    ) -> Any:
        """A question about shapes, which every value can answer."""
        if type(func) is not Call:
            try:
                return func(*args, **kwargs)
            except Looked:
                pass
        raise _another_way(f"{name} happened instead of {'the end' if due is None else due.name}")

    # ---- own ----------------------------------------------------------------------------------------------

    def _do(self, node: Node, func: Any, leaves: list[Any], shape: Shape) -> Any:
        real = [self.tensor(leaf) if type(leaf) is Value else leaf for leaf in leaves]
        for i, _ in node.written:
            real[i] = self._before_writing(leaves[i], real[i])
        args, kwargs = rebuild(shape, real)
        result, result_shape = flatten(func(*args, **kwargs))
        for i, number in node.written:
            leaves[i].number, leaves[i].behind = number, real[i]
            self._keep(number, real[i])
        if result_shape != node.result:
            raise _another_way(f"{node.name} made something of another structure than in the dry run")
        fresh: dict[int, Value] = {}
        back = [
            self._checked(node, promised, leaf, leaves, real, fresh)
            for promised, leaf in zip(node.leaves, result, strict=True)
        ]
        return rebuild(node.result, back)

    def tensor(self, value: Value) -> Tensor:
        """What is behind a value."""
        if value.behind is None:
            value.behind = self._known.get(value.number)
            if value.behind is None:
                which = value.called or f"value {value.number}"
                raise _another_way(f"stage {self._stage} needs {which}, which it did not in the dry run")
        return value.behind

    def _before_writing(self, value: Value, tensor: Tensor) -> Tensor:
        """What is written into must be left as it was where others, or a backward, need it so."""
        if value.number in self._needed:
            self.made[value.number] = tensor.clone()
        return tensor.clone() if value.number in self._known else tensor

    def _checked(
        self,
        node: Node,
        promised: Leaf,
        leaf: Any,
        given: list[Any],
        real: list[Any],
        fresh: dict[int, Value],
    ) -> Any:
        """A leaf of a result, as the forward goes on with it."""
        if isinstance(promised, Constant):
            if type(leaf) is not type(promised.value) or leaf != promised.value:
                raise _another_way(
                    f"{node.name} gave back {leaf!r}, and {promised.value!r} in the dry run, which the other ranks "
                    "go on with; what depends on numbers travels in a tensor"
                )
            return leaf
        if isinstance(promised, Given):
            before = given[promised.place]
            if leaf is not real[promised.place] and type(before) is Value and isinstance(leaf, Tensor):
                return Value(spec_of(leaf), self._device, before.number, leaf)  # a copy of it, here
            return before
        spec = self._graph.specs[promised.number]
        if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (spec.shape, spec.dtype):
            made = _described(spec_of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise _another_way(
                f"{node.name} made {made}, and {_described(spec)} in the dry run: what goes from block to block may "
                "depend on the shapes of the data, and not on its values"
            )
        if promised.number not in fresh:
            fresh[promised.number] = Value(spec, self._device, promised.number, leaf)
            self._keep(promised.number, leaf)
        return fresh[promised.number]

    def _keep(self, number: int, tensor: Tensor) -> None:
        if number in self._needed:
            self.made[number] = tensor

    # ---- another's ----------------------------------------------------------------------------------------

    def _pass_over(self, node: Node, given: list[Any]) -> Any:
        for i, number in node.written:
            given[i].number, given[i].behind = number, None
        fresh: dict[int, Value] = {}
        back: list[Any] = []
        for leaf in node.leaves:
            if isinstance(leaf, Constant):
                back.append(leaf.value)
            elif isinstance(leaf, Given):
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


def _described(spec: Spec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
