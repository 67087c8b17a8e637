"""What real ranks can execute of a strategy, checked before one starts.

machine    as many ranks as the strategy is for
model      the layers that it was found for, none of them tied
layers     of a kind that may be split in the way that was found
data       batches of the size that it was found for
optimizer  one that changes each element by itself, where parameters are divided
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from examples.flexflow.describe import ELEMENTWISE, describe_chain
from examples.flexflow.execute import (
    SHARDED,
    Job,
    LayerRun,
    Loss,
    MakeOptimizer,
    assemble_weights,
    on_a_rank,
)
from examples.flexflow.layer import Split
from mpkit.launch.session.cluster import Cluster
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.models.gpt import Block, Embedding, Head
from mpkit.strategies.prepare.optimizer import create_optimizer, is_elementwise

if TYPE_CHECKING:
    from examples.flexflow.result import LayerStrategies

__all__ = ["run_on"]

POOLING = (nn.MaxPool2d, nn.AvgPool2d)
ABLE: dict[str, tuple[type[nn.Module], ...]] = {
    "S": (
        *SHARDED, *ELEMENTWISE, *POOLING, nn.Flatten, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Embedding,
        Embedding, Block, Head, nn.Softmax, nn.LogSoftmax,
    ),
    "A": (nn.Linear, nn.LayerNorm, *ELEMENTWISE, *POOLING),
    "P": (*SHARDED, *ELEMENTWISE, *POOLING, nn.Flatten),
}  # fmt: skip
"""The kinds of layers that ranks can split by each dimension; those under "S" can be whole as well."""

WORDS = {"S": "samples", "O": "operators", "A": "attribute", "P": "parameters"}


def run_on(
    found: LayerStrategies, cluster: Cluster, model: nn.Module, data: Sequence[tuple[Tensor, Tensor]], loss: Loss,
    optimizer: MakeOptimizer,
) -> LayerRun:  # fmt: skip
    """Train on real ranks; see `LayerStrategies.run`.

    Raises:
        ValueError: ranks cannot execute it.
    """
    # ---- machine
    devices = found.priced.hardware.devices
    if cluster.ranks != devices:
        raise ValueError(
            f"the strategy is for {devices} devices, and the cluster has {cluster.ranks} ranks: "
            f"mk.Cluster(ranks={devices}), or layer_strategies(..., devices={cluster.ranks})"
        )
    # ---- data
    _check_data(data, found.priced.batch)
    # ---- model and its layers
    layers = layers_of(model)
    _check_model(found, model, tuple(data[0][0].shape[1:]))
    splits = [each.split for each in found.choices]
    for (name, module), split in zip(layers, splits, strict=True):
        _check_layer(name, module, split, [module for _, module in layers])
    # ---- optimizer
    made = create_optimizer(optimizer, model, model, scheduled=False, once=False)
    if made is None:
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    if any(split.parameter > 1 for split in splits) and not is_elementwise(made):
        raise ValueError(
            f"{type(made).__name__} is not known to change each element by its own gradient alone, and ranks have "
            "parts of the parameters: optimizer=lambda params: torch.optim.Adam(params), or a strategy without such "
            "parts, layer_strategies(..., dimensions='SA')"
        )
    # ---- loss
    _check_loss(model, data[0], loss)
    # ---- ranks
    kept = [layer.channels == "kept" for layer in found.priced.layers]
    job = Job([(n, copy.deepcopy(m).cpu()) for n, m in layers], splits, kept, list(data), loss, optimizer)
    returned = cluster.run(on_a_rank, job)
    return LayerRun(
        returned[0][0], assemble_weights(job, [weights for _, weights in returned]), cluster.trace
    )


def _check_data(data: Any, batch: int) -> None:
    """Check that data are batches of that size."""
    example = "[(inputs, targets)] with tensors, samples first"
    if not isinstance(data, Sequence) or not data:
        raise ValueError(f"data={data!r}: a batch for each step, {example}")
    for step, pair in enumerate(data):
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)
        ):
            raise ValueError(f"data[{step}] is {type(pair).__name__}: a batch for each step, {example}")
        if len(pair[0]) != batch:
            raise ValueError(
                f"data[{step}] has {len(pair[0])} samples, and the strategy was found for batch={batch}: "
                f"layer_strategies(..., batch={len(pair[0])})"
            )


def _check_model(found: LayerStrategies, model: nn.Module, sample: tuple[int, ...]) -> None:
    """Check that the model is the one that the strategy was found for, and that no layer shares parameters."""
    these, those = describe_chain(model, sample), found.priced.layers
    if [(x.name, x.inputs, x.outputs, x.parameters) for x in these] != [
        (x.name, x.inputs, x.outputs, x.parameters) for x in those
    ]:
        raise ValueError(
            f"the strategy was found for layers {', '.join(x.name for x in those)}, and this model's differ from them "
            f"on samples of shape {sample}: layer_strategies(model, ..., sample={sample})"
        )
    parameters = [id(p) for _, layer in layers_of(model) for p in layer.parameters()]
    if len(parameters) != len(set(parameters)):
        raise ValueError(
            "two layers share a parameter, of which each rank would train copies: give each layer its own, or train "
            "with mk.Plan, which keeps tied weights equal"
        )


def _check_loss(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss) -> None:
    """Check that the loss of the first batch is a scalar."""
    inputs, targets = batch
    with torch.no_grad():
        value: object = loss(copy.deepcopy(model).cpu()(inputs.cpu()), targets.cpu())
    if not isinstance(value, Tensor) or value.numel() != 1:
        told = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise ValueError(
            f"loss(outputs, targets) is {told}, and not a scalar such as that of nn.functional.mse_loss "
            "(a total with its count is for cluster.train)"
        )


def _check_layer(name: str, module: nn.Module, split: Split, modules: list[nn.Module]) -> None:
    """Check that ranks can execute a layer with this split."""
    random = [
        part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    if random and module.training:
        raise ValueError(
            f"layer {name!r} draws random numbers, {random[0]!r}, and ranks would draw others than serial training: "
            "nn.Dropout(0.0), or model.eval()"
        )
    used = [letter for letter, degree in zip("SOAP", split, strict=True) if degree > 1] or ["S"]
    unable = [letter for letter in used if not isinstance(module, ABLE.get(letter, ()))]
    if not unable:
        return
    able = "".join(
        letter for letter, kinds in ABLE.items() if all(isinstance(each, kinds) for each in modules)
    )
    kinds = ", ".join(dict.fromkeys(kind.__name__ for kind in ABLE.get(unable[0], ()))) or "no layer"
    instead = (
        f"layer_strategies(..., dimensions={able!r}) finds a strategy that can be executed"
        if able
        else f"mk.Plan.ddp({split.degree}) trains any model"
    )
    raise ValueError(
        f"layer {name!r}, {type(module).__name__}, cannot be executed as {split}: by {WORDS[unable[0]]} ranks can "
        f"split {kinds}. {instead}."
    )
