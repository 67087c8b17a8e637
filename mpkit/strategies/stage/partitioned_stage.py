"""A stage of a partitioned model: the model's own forward, which runs this stage's nodes and skips the others.

    skeleton   a rank keeps the whole model, but only those weights that its stages compute with
    walk       the forward, node after node (`mpkit.strategies.partition.forward`)
    outputs    what other stages need; at the last stage, the model's outputs as far as the loss uses them

Since the forward runs as it is written, control flow on the model's inputs works as usual: every rank has the inputs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value as Data
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.models.randomness import Draws
from mpkit.strategies.partition.forward import Forward
from mpkit.strategies.partition.graph import Division, PartitionedModel
from mpkit.strategies.partition.value import Value, spec_of
from mpkit.strategies.partition.walk import prepare_modules
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.strategies.stage.stage import Stage, call


def place_parts(
    model: nn.Module,
    partition: PartitionedModel,
    numbers: Iterable[int],
    device: torch.device,
    dtype: torch.dtype | None = None,
    sharded: ShardedModel | None = None,
) -> tuple[dict[int, Stage], dict[str, Tensor]]:
    """Return a rank's stages by number, and, with stage 0, the part of the model's state that is in no stage's layers.

    The model, this rank's own copy on the CPU, becomes its skeleton: weights that no stage here needs are dropped.
    The computation is in `dtype`, if it is not the model's own.
    """
    here = tuple(numbers)
    inside = tuple(f"{block}." for block in partition.blocks)
    parameters = {id(parameter) for parameter in model.parameters()}
    repeated = repeated_blocks(model).values()
    skeleton = Skeleton(model, partition, here, device, dtype)
    rest = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and id(value) not in parameters and not name.startswith(inside)
        if not isinstance(value, Value)  # a parameter of another rank
    }
    parts: dict[int, Stage] = {
        number: PartitionedStage(number, skeleton, partition, sharded, repeated) for number in here
    }
    return parts, rest if 0 in here else {}


class Skeleton:
    """A rank's model: all of its modules, with stand-ins for the weights that other ranks hold.

    `parameters` has the parameters that are here, by their first names in the model.
    """

    def __init__(
        self, model: nn.Module, partition: PartitionedModel, stages: tuple[int, ...], device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.model, self.device = model, device
        self.blocks = prepare_modules(model, partition.modules, partition.blocks)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = {name for number in stages for name in partition.held[number]}
        here = {block for number in stages for block in partition.placed[number]}
        elsewhere = tuple(f"{block}." for block in partition.blocks if block not in here)

        def computed_in(tensor: Tensor) -> torch.dtype:
            return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

        def stand_in(tensor: Tensor, called: str) -> Value:
            return Value(spec_of(tensor)._replace(dtype=computed_in(tensor)), device, -1, called=called)

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


class LooseParameters(nn.Module):
    """A stage's parameters that belong to opened modules, such as a position embedding that the model adds itself.

    The function that this module runs may use them.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the function."""
        return run()


class PartitionedStage(Stage):
    """A stage of a partitioned model, whose `layers` are its blocks, then its loose parameters."""

    def __init__(
        self, number: int, skeleton: Skeleton, partition: PartitionedModel,
        sharded: ShardedModel | None = None, repeated: Collection[nn.Module] = (),
    ) -> None:  # fmt: skip
        blocks = [(name, skeleton.blocks[name]) for name in partition.placed[number]]
        self._parameters = {name: skeleton.parameters[name] for name in partition.held[number]}
        inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
        self._loose = LooseParameters([p for p in self._parameters.values() if id(p) not in inside])
        layers = [*blocks, ("loose parameters", self._loose)]
        super().__init__(number, layers, skeleton.device, sharded=sharded, blocks=repeated)
        self._skeleton = skeleton
        self._state = [name for name, stage in partition.state.items() if stage == number]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's parameters by their first names in the model."""
        yield from self._parameters.items()

    def live_state(self) -> dict[str, Any]:
        """Return the parameters and buffers themselves of this stage's part of the model's state."""
        whole = self._skeleton.model.state_dict(keep_vars=True)
        return {name: whole[name] for name in self._state}

    def run(
        self, division: Division, data: Data, received: tuple[Tensor, ...], draws: Draws
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the model's outputs as far as they are known here, and what other stages need from this one."""
        result: tuple[Any, tuple[Tensor, ...]]
        result = self._loose(lambda: self._run(division, data, received, draws))
        return result

    def _run(
        self, division: Division, data: Data, received: tuple[Tensor, ...], draws: Draws
    ) -> tuple[Any, tuple[Tensor, ...]]:
        arriving = (route for route in division.routes if route.target == self.number)
        numbers = [division.outputs[route.source][i] for route in arriving for i in route.which]
        known = dict(zip(numbers, received, strict=True))
        draws.begin("")
        names, device = self._skeleton.names, self._skeleton.device
        with Forward(names, device, division, self.number, known, draws) as forward:
            outputs = call(self._skeleton.model, data, first=True)
        forward.check_end()
        wanted = frozenset(division.graph.wanted) if self.number == len(division.outputs) - 1 else frozenset()
        leaves, shape = flatten(outputs)
        leaves = [
            forward.tensor(leaf) if type(leaf) is Value and leaf.number in wanted else leaf for leaf in leaves
        ]
        made = tuple(
            known[number] if number in known else forward.made[number]  # passed on, or made here
            for number in division.outputs[self.number]
        )
        return rebuild(shape, leaves), made
