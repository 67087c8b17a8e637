"""Describe the layers of an nn.Module: sizes on tensors without content, and what each kind of layer may be split by.

    shapes        each layer is called with 2 samples on the meta device
    FLOPs         `mpkit.trace.record.flops`, once for identical layers
    dimensions    by the kind of layer, from a table; a module of another kind may be split by samples only

Dimension 0 is samples. Of images (samples, channels, rows, columns) the attribute is the rows; of anything else with
three dimensions (samples, positions, channels) it is the positions.

Source: Jia, Zaharia, Aiken 2019, table 1 (parallelizable dimensions of operators).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from examples.flexflow.layer import Layer
from mpkit.plan.kinds import whole
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.models.gpt import GPT, Block, Embedding, Head
from mpkit.trace.record.flops import count

SAMPLES = 2
"""Samples that layers are called with: one is too few for BatchNorm."""

ELEMENTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.Mish,
    nn.Identity, nn.Dropout,
)  # fmt: skip

Shape = tuple[int, ...]


def describe_chain(model: nn.Module, sample: Shape | None = None) -> list[Layer]:
    """Return the layers of a chain.

    >>> layers = describe_chain(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    >>> [(each.name, each.flops, each.parameters, each.parameter, each.channels) for each in layers]
    [('0', 512.0, 288, 32, 'gathered'), ('1', 0.0, 0, 32, 'kept'), ('2', 256.0, 132, 4, 'gathered')]

    Args:
        model: a chain of layers (`mpkit.strategies.models.chain`); it may be on the meta device.
        sample: the shape of one sample; None: what the first layer says, an nn.Linear or the kit's GPT.

    Raises:
        ValueError: the model is no chain, its first layer does not say the shape, or a layer does not take it.
    """
    chain = layers_of(model)
    shape = _shape_of(model, chain[0][1]) if sample is None else _check_shape(sample)
    tokens = any(isinstance(module, nn.Embedding) for module in chain[0][1].modules())
    floats = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = torch.long if tokens else (*floats, torch.float32)[0]
    x = torch.zeros(SAMPLES, *shape, dtype=dtype, device="meta")
    flops: dict[object, float] = {}
    described = []
    for name, module in chain:
        # ---- shapes
        y = _call_layer(name, module, x)
        # ---- FLOPs
        key = (_structure(module), x.shape)
        if key not in flops:
            where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
            counted = count(module, torch.empty_like(x, device=where))
            flops[key] = counted.forward / SAMPLES
        # ---- dimensions
        inputs, outputs = tuple(x.shape[1:]), tuple(y.shape[1:])
        parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        dimensions = _split_by(module, inputs, outputs)
        described.append(Layer(name, prod(inputs), prod(outputs), flops[key], parameters, **dimensions))
        x = y
    return described


def _shape_of(model: nn.Module, first: nn.Module) -> Shape:
    """Return the shape of a sample where the model says it."""
    if isinstance(model, GPT):
        return (model.config.length,)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise ValueError(
        f"the first layer, {first!r}, does not say what a sample looks like: give its shape, such as "
        f"sample={(first.in_channels, 32, 32) if isinstance(first, nn.Conv2d) else (128,)}"
    )


def _check_shape(sample: Any) -> Shape:
    """Return a shape that was given."""
    if isinstance(sample, (tuple, list, torch.Size)) and sample and all((whole(n) or 0) > 0 for n in sample):
        return tuple(sample)
    raise ValueError(f"sample={sample!r}: the shape of one sample, without the batch, such as (3, 32, 32)")


def _call_layer(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a layer on tensors without content."""
    state = {
        key: value.detach().to("meta") for key, value in (*module.named_parameters(), *module.named_buffers())
    }
    try:
        with torch.no_grad():
            y = torch.func.functional_call(module, state, (x,))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"layer {name!r}, {type(module).__name__}, does not take samples of shape {tuple(x.shape[1:])}: {error}"
        ) from error
    if not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"layer {name!r}, {type(module).__name__}, does not return one tensor, samples first"
        )
    return y


def _structure(module: nn.Module) -> tuple[object, ...]:
    """Return what two modules agree in that compute the same with other weights."""
    parts: list[object] = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    for name, part in module.named_modules():
        parts.append((name, type(part)))
        for key, value in vars(part).items():
            if not key.startswith("_"):
                parts.append(
                    (key, value if isinstance(value, (int, float, str, tuple, type(None))) else id(value))
                )
    return tuple(parts)


# ---- dimensions, by the kind of layer


def _split_by(module: nn.Module, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    """Return the dimensions that a layer may be split by."""
    for kind, dimensions in KINDS.items():
        if isinstance(module, kind):
            return dimensions(module, inputs, outputs)
    return {}


def _positions(shape: Shape) -> int:
    """Return the size of the attribute: rows of an image, positions of a sequence, else 1."""
    return shape[1] if len(shape) == 3 else shape[0] if len(shape) == 2 else 1


def _linear(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    return {"attribute": _positions(inputs), "parameter": module.out_features}


def _convolution(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    # A device needs the rows around its own: kernel - 1 of them.
    halo = (module.kernel_size[0] - 1) * inputs[0] * inputs[2]
    channels = module.out_channels if module.groups == 1 else 1
    return {"attribute": gcd(inputs[1], outputs[1]), "parameter": channels, "exchanged": halo}


def _kept_axes(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    channels = outputs[0] if len(outputs) == 3 else outputs[-1]
    return {"attribute": _positions(outputs), "parameter": channels, "channels": "kept"}


def _describe_pooling(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    apart = module.kernel_size == module.stride and module.padding in (0, (0, 0))
    rows = gcd(inputs[1], outputs[1]) if apart else 1
    return {"attribute": rows, "parameter": outputs[0], "channels": "kept"}


def _flatten(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    return {"parameter": inputs[0], "channels": "kept"} if len(outputs) == 1 else {}


def _batch_norm(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    return {"sample": False, "parameter": module.num_features, "channels": "kept"}


def _layer_norm(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    return {"attribute": _positions(inputs) if len(module.normalized_shape) == 1 else 1}


def _describe_embedding(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    return {"attribute": inputs[0], "parameter": outputs[-1]} if len(inputs) == 1 else {}


def _block(module: Any, inputs: Shape, outputs: Shape) -> dict[str, Any]:
    # Megatron's two all-reduces; a sequence that is split gathers keys and values. Saved, in units of the input: the
    # outputs of both norms (2), q, k, v (3), attention's output (1), the stream in the middle (1), and the MLP's inner
    # values before and after GELU (8), as if those of norms and stream were divided too (sequence parallelism).
    return {
        "attribute": inputs[0], "parameter": module.attention.heads, "channels": "summed", "sums": 2,
        "exchanged": 2 * prod(inputs), "saved": 15 * prod(inputs),
    }  # fmt: skip


KINDS: dict[type | tuple[type, ...], Callable[[Any, Shape, Shape], dict[str, Any]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    ELEMENTWISE: _kept_axes,
    (nn.MaxPool2d, nn.AvgPool2d): _describe_pooling,
    nn.Flatten: _flatten,
    (nn.BatchNorm1d, nn.BatchNorm2d): _batch_norm,
    nn.LayerNorm: _layer_norm,
    (nn.Embedding, Embedding): _describe_embedding,
    Block: _block,
    Head: lambda module, inputs, outputs: {
        "attribute": inputs[0],
        "parameter": outputs[-1],
        "saved": prod(inputs),
    },
}
"""By kind: a function of the module and the shapes of a sample's input and output."""
