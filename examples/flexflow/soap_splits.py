"""SOAP: one layer split by samples, operators, attribute and parameters, on two real ranks.

FlexFlow searches for a strategy among all ways to divide each operator of a model. There are four kinds:

    O    operator     different operators on different ranks                              pipelines
    S    sample       other samples on each rank                                          data parallelism
    A    attribute    other positions of each sample: no parameter is divided             sequence, context, spatial
    P    parameter    a dimension whose division divides the parameters                   tensor parallelism

FlexFlow's A and P divide dimensions of the output. The rows of a matrix are not among these (they are summed over), so
`P rows` is Megatron-LM's addition to the list. Operators within a layer can be on different ranks too: see
`operators_at_once`. `strategies` chooses a split for each layer of a chain.

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.flexflow.soap_found import RANKS, PhaseTraffic, Soap, Way, count_exchanged
from examples.flexflow.soap_operator import AlgebraicOperator, Box, Pieces, whole
from examples.flexflow.soap_ranks import WAYS, on_a_rank
from mpkit.common.tracebacks import public
from mpkit.launch.session.cluster import Cluster, borrow_cluster

__all__ = ["PhaseTraffic", "Soap", "Way", "soap"]

ABOUT = {
    "O": ("operators", "pipeline parallelism", "This operator on rank 0, the next one, Z = Y C, on rank 1. While "
          "that works on one micro-batch, this works on another."),
    "S": ("samples", "data parallelism", "Each rank computes other samples, with all of the parameters."),
    "A": ("attribute", "sequence, context and spatial parallelism", "Each rank computes other positions of every "
          "sample, with all of the parameters."),
    "P columns": ("parameters: columns", "tensor parallelism, column-parallel", "A = [A₀ A₁]. Y stays divided, as "
                  "an elementwise function or a row-parallel layer can take it."),
    "P columns, gathered": ("parameters: columns, gathered", "tensor parallelism, column-parallel", "A = [A₀ A₁]. "
                            "Every rank gets all of Y, as any layer can take it."),
    "P rows": ("parameters: rows", "tensor parallelism, row-parallel", "X = [X₀ X₁], A = [A₀ ; A₁]: "
               "Y = X₀A₀ + X₁A₁ is summed over ranks."),
    "P": ("parameters", "tensor parallelism of the normalized dimension", "μ and σ² are over the whole row, of which "
          "each rank has half: two sums a row are exchanged, forward and backward."),
}  # fmt: skip


@public
def soap(
    layer: str | nn.Module = "linear",
    *,
    samples: int = 2,
    length: int = 4,
    seed: int = 0,
    cluster: Cluster | None = None,
) -> Soap:
    """Split one layer over two ranks in each of SOAP's ways, run each, and show that it equals the whole layer.

    >>> found = soap("linear")
    >>> [(way.name, way.payload("forward"), way.payload("backward")) for way in found.ways[:3]]
    [('O', 512, 512), ('S', 0, 448), ('A', 0, 448)]
    >>> found["P rows"].sent
    [PhaseTraffic(phase='forward', kind='all_reduce', what='Y', payload=512, times=1)]
    >>> max(way.difference for way in found.ways) < 1e-12
    True

    Args:
        layer: "linear", "layer_norm", or an nn.Linear or nn.LayerNorm of your own (over the last dimension); it is
            computed in float64.
        samples: B, the samples of the batch; even, like everything that is divided.
        length: L, the positions of a sample.
        seed: the seed of the layer, the batch, and the incoming gradient.
        cluster: a cluster of two ranks; None: start one, which takes a few seconds.

    Raises:
        ValueError: there is no such layer, or something to be divided is not even.
    """
    # ---- the whole layer
    generator = torch.Generator().manual_seed(seed)
    operator, name = _operator(layer, generator)
    features, out = _sizes(operator)
    _check(samples, length, features, out, cluster)
    shapes = {
        "X": (samples, length, features),
        "∂Y": (samples, length, out),
        "C": (out, out),
        "∂Z": (samples, length, out),
    }
    given = {
        key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()
    }
    alone = _alone(operator, given)
    # ---- its parts
    with borrow_cluster(cluster, RANKS) as used:
        by_rank: list[dict[str, Pieces]] = used.run(on_a_rank, operator, given)
        trace = used.trace
    sent = count_exchanged(trace)
    ways = [
        _way(one, [parts[one] for parts in by_rank], sent.get(one, []), alone["O" if one == "O" else ""])
        for one in WAYS[operator.kind]
    ]
    sizes = {"X": given["X"], **operator.parameters, "Y": given["∂Y"], "C": given["C"], "Z": given["∂Z"]}
    return Soap(name, operator.kind, {key: tuple(value.shape) for key, value in sizes.items()}, ways, trace)


def _operator(layer: Any, generator: torch.Generator) -> tuple[AlgebraicOperator, str]:
    """Return the layer as an operator, and its name."""
    if isinstance(layer, str) and layer in WAYS:
        layer = nn.Linear(6, 8) if layer == "linear" else nn.LayerNorm(8)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
    if isinstance(layer, nn.Linear):
        held = {"A": layer.weight.t(), "b": layer.bias}
        kind, eps = "linear", 0.0
    elif isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1 and layer.elementwise_affine:
        held = {"γ": layer.weight, "β": layer.bias}
        kind, eps = "layer_norm", layer.eps
    else:
        raise ValueError(
            f"soap({layer!r}): give 'linear', 'layer_norm', or a layer of your own, an nn.Linear or an nn.LayerNorm "
            "over one dimension that has parameters: soap(torch.nn.Linear(6, 8))"
        )
    there: dict[str, Tensor | None] = {**held}  # torch's types do not allow for a layer without a bias
    parameters = {
        key: value.detach().to("cpu", torch.float64, copy=True).contiguous()
        for key, value in there.items()
        if value is not None
    }
    return AlgebraicOperator(kind, parameters, eps), repr(layer)


def _sizes(operator: AlgebraicOperator) -> tuple[int, int]:
    """Return the numbers of input and output features."""
    first = next(iter(operator.parameters.values())).shape
    return first[0], first[-1]


def _check(samples: Any, length: Any, features: int, out: int, cluster: Any) -> None:
    sizes = {"samples": samples, "length": length, "the layer's inputs": features, "the layer's outputs": out}
    for what, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < RANKS or size % RANKS:
            raise ValueError(
                f"{what}: {size!r} cannot be divided between {RANKS} ranks: each is to get half, so it has to be an "
                f"even number, such as {2 * (size // 2) + 2 if isinstance(size, int) and size > 0 else 2}"
            )
    if cluster is not None and cluster.ranks != RANKS:
        raise ValueError(f"soap(cluster=...) has {cluster.ranks} ranks: give mk.Cluster(ranks={RANKS})")


def _alone(operator: AlgebraicOperator, given: dict[str, Tensor]) -> dict[str, Pieces]:
    """Compute outputs and gradients without splitting: "" for the layer, "O" for it and the next operator."""
    pieces = {}
    for name in ("", "O"):
        x, c = given["X"].clone().requires_grad_(), given["C"].clone().requires_grad_()
        held = {key: value.clone().requires_grad_() for key, value in operator.parameters.items()}
        y = operator(x, held)
        z = y @ c
        if name:
            z.backward(given["∂Z"])
        else:
            y.backward(given["∂Y"])
        values = {"Y": y.detach(), "Z": z.detach()}
        leaves = {"X": x, "C": c, **held}
        gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
        pieces[name] = Pieces({key: whole(value) for key, value in values.items()}, values, gradients)
    return pieces


def _way(name: str, by_rank: list[Pieces], sent: list[PhaseTraffic], alone: Pieces) -> Way:
    def largest_error(what: str, mine: Tensor, box: Box, all_of_it: Tensor) -> float:
        there = all_of_it[tuple(slice(*edge) for edge in box)]
        assert mine.shape == there.shape, f"{name}: {what} is {mine.shape}, not {there.shape}"
        return float((mine - there).abs().max())

    outputs, gradients = [0.0], [0.0]
    for has in by_rank:
        for what in ("Y", "Z"):
            if what in has.values:
                outputs.append(largest_error(what, has.values[what], has.boxes[what], alone.values[what]))
        gradients += [
            largest_error(f"∂{k}", v, has.boxes[k], alone.gradients[k]) for k, v in has.gradients.items()
        ]
    tensors = dict.fromkeys(key for has in by_rank for key in has.boxes)
    held = {key: [has.boxes.get(key) for has in by_rank] for key in tensors}
    return Way(name, *ABOUT[name], held, sent, max(outputs), max(gradients))
