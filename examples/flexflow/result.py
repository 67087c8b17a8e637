"""What `layer_strategies` returns: the strategy of each layer, why, and what can be done with it.

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING

from examples.flexflow.chain_search import Choice, fastest, least_memory, price_choice
from examples.flexflow.layer import Layer, Split
from examples.flexflow.price import ChainPrices
from examples.flexflow.table import layers_html, layers_text
from mpkit.common.display import data_frame
from mpkit.common.units import bytes_text
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import real

if TYPE_CHECKING:
    import pandas as pd


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
