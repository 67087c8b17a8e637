"""The rows that each expert of a model computed, by layer and step: the joint choice of all ranks' routers."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.common.display import DrawnResult, data_frame
from mpkit.trace.files import RankTrace
from mpkit.trace.validation import check_steps

if TYPE_CHECKING:
    import pandas as pd


Rows = npt.NDArray[np.float64]
ROWS = 2
"""The kind of logged values that are an expert's rows in a step, named by the layer, "[" and the expert's number."""


class ExpertLoad(DrawnResult):
    """The load of experts; it prints as a table of the last step, and is drawn as a picture of all steps.

    >>> load = ExpertLoad({"block0": np.array([[[6.0, 2.0]], [[4.0, 4.0]]])}, first=0)  # two steps of one rank
    >>> load.imbalance("block0").tolist()
    [1.5, 1.0]

    Args:
        sent: by layer [steps, ranks, experts], the rows of each rank's tokens that each expert computed.
        first: the number of the first step.

    Attributes:
        rows: by layer [steps, experts], the rows that each expert computed.
    """

    def __init__(self, sent: dict[str, Rows], first: int) -> None:
        self.sent, self.first = sent, first
        self.rows: dict[str, Rows] = {layer: each.sum(axis=1) for layer, each in sent.items()}

    def imbalance(self, layer: str) -> Rows:
        """Return the rows of a layer's busiest expert divided by the mean, by step: 1 if all are equally busy."""
        rows = self.rows[layer]
        busiest: Rows = rows.max(axis=1) / np.maximum(rows.mean(axis=1), 1e-300)
        return busiest

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per layer, step and expert.

        Raises:
            ImportError: pandas is not installed.
        """
        listed = (
            (layer, self.first + step, expert, rows[step, expert])
            for layer, rows in self.rows.items()
            for step, expert in np.ndindex(rows.shape)
        )
        return data_frame(listed, ["layer", "step", "expert", "rows"])

    def balance(self, replicas: int, gpus: int) -> Any:
        """Return DeepSeek's balanced placement (EPLB) of the experts after the last step, with copies of some.

        >>> load = ExpertLoad({"block0": np.array([[[9.0, 1.0, 1.0, 1.0]]])}, first=0)
        >>> print(load.balance(6, gpus=2).imbalance["block0"])
        (1.6666666666666667, 1.1666666666666667)

        Args:
            replicas: the slots for each layer's experts on all GPUs together: as many as experts, or more for copies.
            gpus: the number of GPUs that divide the experts (`Plan(ep=gpus)`).

        Returns:
            An `ExpertBalance`: `layers` with `phy2log`, `load_before` and `load_after`; `imbalance`, `time_ratio`,
            `moves`. It shows itself as a picture in a notebook.

        Raises:
            ValueError: the numbers do not divide; the message says which would.
        """
        return resolve_name("mpkit.prediction.expert_balance:balance_load")(self, replicas, gpus)

    __repr__ = DrawnResult.__str__


def expert_load_of(ranks: Sequence[RankTrace]) -> ExpertLoad:
    """Return the rows of all ranks, for the steps that every rank has counted."""
    counts: dict[str, dict[tuple[int, int, int], float]] = {}
    latest: list[int] = []
    for number, rank in enumerate(ranks):
        mine = rank.values[rank.values["kind"] == ROWS]
        if len(mine):
            latest.append(int(mine["step"].max()))
        for record in mine:
            layer, _, expert = rank.name(int(record["name"])).rpartition("[")
            if not expert.isdecimal() or len(expert) > 6:
                continue
            place = int(record["step"]), number, int(expert)
            of_layer = counts.setdefault(layer, {})
            of_layer[place] = of_layer.get(place, 0.0) + float(record["value"])
    if not counts:
        raise ValueError(
            "No rows of experts were counted: the model has no experts that mpkit knows (mk.models.MixtureOfExperts, "
            "those of transformers, or modules with their interface), or no step is done"
        )
    first = min(step for of_layer in counts.values() for step, *_ in of_layer)
    steps = min(latest) + 1 - first
    sent: dict[str, Rows] = {}
    for layer, of_layer in counts.items():
        experts = 1 + max(expert for *_, expert in of_layer)
        check_steps(first + steps * experts * len(ranks), first, len(of_layer))
        sent[layer] = np.zeros((steps, len(ranks), experts))
        for (step, number, chosen), count in of_layer.items():
            if step - first < steps:
                sent[layer][step - first, number, chosen] = count
    return ExpertLoad(sent, first)
