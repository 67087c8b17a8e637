"""What `layer_strategies` returns: the strategy of each layer, why, and what can be done with it.

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from examples.flexflow.chain_search import Choice, fastest, least_memory, price_choice
from examples.flexflow.executable import run_on
from examples.flexflow.execute import LayerRun
from examples.flexflow.layer import Layer, Split
from examples.flexflow.metropolis import MarkovWalk, metropolis
from examples.flexflow.price import ChainPrices
from examples.flexflow.table import layers_html, layers_text
from mpkit.common.display import data_frame
from mpkit.common.units import bytes_text
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster
from mpkit.plan.kinds import real, whole

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LayerChoice", "LayerStrategies", "search_chain"]


@dataclass(frozen=True)
class LayerChoice:
    """What was chosen for a layer.

    Attributes:
        layer: the layer.
        split: the degrees of its split.
        seconds: by what they are spent on: compute, inside, gradients; and resharding, from the layer before.
        memory: bytes per device.
    """

    layer: Layer
    split: Split
    seconds: dict[str, float]
    memory: float


@dataclass(frozen=True, repr=False)
class LayerStrategies:
    """The fastest strategy for each layer that fits; prints as a table.

    Attributes:
        priced: the layers, the machine, and the prices.
        choice: the strategy.
        limit: bytes per device that it had to fit.
    """

    priced: ChainPrices
    choice: Choice
    limit: float

    @property
    def time(self) -> float:
        """Seconds per step: forward and backward of all layers, with what they send; without the update."""
        return self.choice.time

    @property
    def memory(self) -> float:
        """Bytes per device: model states, and the layers' inputs for the backward."""
        return self.choice.memory

    @cached_property
    def choices(self) -> list[LayerChoice]:
        """What was chosen, layer by layer."""
        priced, made = self.priced, list[LayerChoice]()
        for i, layer in enumerate(priced.layers):
            split = priced.splits[i][self.choice.splits[i]]
            seconds = {**priced.parts(layer, split), "resharding": 0.0}
            if made:
                seconds["resharding"] = priced.resharding_seconds(
                    made[-1].layer, made[-1].split, layer, split
                )
            made.append(LayerChoice(layer, split, seconds, priced.memory(layer, split)))
        return made

    @cached_property
    def because(self) -> dict[str, float]:
        """The seconds by what they are spent on, the largest first."""
        total: dict[str, float] = {}
        for each in self.choices:
            for name, seconds in each.seconds.items():
                total[name] = total.get(name, 0.0) + seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @cached_property
    def uniform(self) -> dict[str, Choice]:
        """What one dimension for all layers would take: each layer split as far as it can be in that dimension only."""
        names = ("sample", "attribute", "parameter")
        return {name: price_choice(self.priced.costs, self._only(name)) for name in names}

    def _only(self, dimension: str) -> tuple[int, ...]:
        """Return the splits in one dimension only, by their places."""
        places = []
        for splits in self.priced.splits:
            only = [i for i, split in enumerate(splits) if split.degree == getattr(split, dimension)]
            places.append(max(only, key=lambda i: splits[i].degree))
        return tuple(places)

    def by_mcmc(self, budget: int = 10_000, seed: int = 0, beta: float | None = None) -> MarkovWalk:
        """Return what FlexFlow's Markov chain finds within a number of proposals, to compare.

        It starts at data parallelism, or where that does not fit, at the least memory.

        >>> from examples.flexflow import Layer, layer_strategies
        >>> found = layer_strategies([Layer("fc", 8, 8, 128, 72, parameter=8)] * 3, "4x-a100-nvlink", batch=8)
        >>> found.by_mcmc(budget=500).time >= found.time
        True

        Args:
            budget: the number of proposals.
            seed: of its random numbers.
            beta: see `examples.flexflow.metropolis`.

        Raises:
            ValueError: the budget is no number of proposals.
        """
        if (whole(budget) or 0) < 1:
            raise ValueError(f"by_mcmc(budget={budget!r}): the number of proposals, 1 or more")
        costs, start = self.priced.costs, self.uniform["sample"]
        if start.memory > self.limit:
            start = least_memory(costs)
        return metropolis(costs, start.splits, budget, seed, self.limit, beta)

    def again(
        self, *, hardware: Hardware | str | None = None, memory: float | None = None
    ) -> LayerStrategies:
        """Return the strategies for the same layers and batch on other hardware, or with other memory.

        Raises:
            ValueError: there is no machine of that name, or nothing fits it.
        """
        priced = self.priced
        if hardware is None:
            return search_chain(priced, memory)
        return search_chain(ChainPrices(priced.layers, find(hardware), priced.batch, priced.dtype), memory)

    def run(
        self, cluster: Cluster, model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], *,
        loss: Callable[[Any, Any], Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> LayerRun:  # fmt: skip
        """Train a model with this strategy on real ranks: the losses and weights are those of serial training.

        >>> import mpkit as mk
        >>> from examples.flexflow import layer_strategies
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        >>> found = layer_strategies(model, "2x-titan-rtx", batch=4)
        >>> data = [(torch.randn(4, 8), torch.randn(4, 4))] * 3
        >>> with mk.Cluster(2, device="cpu") as cluster:
        ...     run = found.run(cluster, model, data, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
        >>> len(run.losses), sorted(run.state_dict)
        (3, ['0.bias', '0.weight', '2.bias', '2.weight'])

        Args:
            cluster: as many ranks as the strategy has devices.
            model: what it was found for; its weights are read and not changed.
            data: (inputs, targets) for each step, whole batches.
            loss: loss(outputs, targets) of a whole batch -> a scalar.
            optimizer: optimizer(params) -> a torch.optim.Optimizer.

        Raises:
            ValueError: ranks cannot execute it; the message says what they could.
        """
        return run_on(self, cluster, model, data, loss, optimizer)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per layer: its name, the degrees, the seconds by what they are spent on, and memory in bytes."""
        return data_frame(
            {"layer": each.layer.name, **each.split._asdict(), **each.seconds, "memory": each.memory}
            for each in self.choices
        )

    def __str__(self) -> str:
        return layers_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return layers_html(self)


def search_chain(priced: ChainPrices, memory: float | None) -> LayerStrategies:
    """Return the fastest strategy for what was priced.

    Raises:
        ValueError: none fits.
    """
    if memory is not None and not (real(memory) or 0.0) > 0:
        raise ValueError(f"layer_strategies(memory={memory!r}): bytes per device, more than 0, or None")
    limit = float(priced.hardware.device.memory or inf) if memory is None else float(memory)
    choice = fastest(priced.costs, limit)
    if choice is None:
        least = least_memory(priced.costs).memory
        raise ValueError(
            f"no strategy fits: the layers need {bytes_text(least)} per device at least on {priced.hardware.devices} "
            f"devices, and there are {bytes_text(limit)}. More devices, a smaller batch than {priced.batch}, or "
            f"memory={ceil(least)} to see what it would take (a pipeline with recomputation takes less: mk.advise)."
        )
    return LayerStrategies(priced, choice, limit)
