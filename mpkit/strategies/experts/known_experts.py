"""Which modules of a model are experts that ranks can divide.

interface    forward(x, chosen, weights) -> the weighted sum, as `mpkit.models.MixtureOfExperts` has it, and the
             models of transformers
parameters   all of them [E, ...], of as many experts
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mpkit.common.torch_private import _DropoutNd
from mpkit.strategies.models.experts import MixtureOfExperts, order_of_experts

__all__ = ["check_experts_of", "chosen_experts", "find_balanced", "find_experts", "number_of_experts"]

CHOSEN = ("chosen", "top_k_index", "router_indices", "topk_indices", "selected_experts")
"""Names of a forward's argument with each token's experts, [T, k]."""
WEIGHTS = ("weights", "top_k_weights", "routing_weights", "topk_weights")
"""Names of its argument with their weights, [T, k]."""


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose experts can be divided, by name.

    >>> from mpkit.models import GPT
    >>> list(find_experts(GPT(layers=2, experts=4))), list(find_experts(GPT(layers=2)))
    (['block0.mlp.experts', 'block1.mlp.experts'], [])
    """
    return {name: module for name, module in model.named_modules() if _is_of_experts(module)}


def find_balanced(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the layers whose routing depends on the whole batch in training, by name.

    >>> from mpkit.models import GPT
    >>> list(find_balanced(GPT(layers=1, experts=4, aux_loss=0.01))), list(find_balanced(GPT(layers=1, experts=4)))
    (['block0.mlp'], [])
    """
    layers = model.named_modules()
    return {
        name: each for name, each in layers if isinstance(each, MixtureOfExperts) and each.balance_options
    }


def _is_of_experts(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    if not parameters or any(p.dim() < 2 or p.shape[0] != parameters[0].shape[0] for p in parameters):
        return False
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward without a signature
        return False
    return len(names) > 2 and names[1] in CHOSEN and names[2] in WEIGHTS


def chosen_experts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return each token's experts, [T, k], out of the arguments of a call of experts."""
    return next((kwargs[name] for name in CHOSEN if name in kwargs), None) if len(args) < 2 else args[1]


def number_of_experts(module: nn.Module) -> int:
    """Return E."""
    return next(module.parameters()).shape[0]


def check_experts_of(model: nn.Module, plan: Any) -> None:
    """Check that a plan's ep divides the experts of each layer.

    Args:
        model: the whole model.
        plan: the plan, of which ep is read.

    Raises:
        ValueError: there are no experts, a layer's number of them is not a multiple of ep, or layers that share weights
            place them differently.
    """
    if plan.ep == 1:
        return
    layers = find_experts(model)
    if not layers:
        raise ValueError(
            f"Plan(ep={plan.ep}) divides the experts of each layer, and {type(model).__name__} has none that mpkit "
            "knows: modules whose parameters are all [E, ...] and whose forward takes (x, chosen, weights), such as "
            f"those of mk.models.GPT(experts=8, top_k=2), or Mixtral's in transformers. Without experts: ep=1"
        )
    for name, module in layers.items():
        experts = number_of_experts(module)
        if experts % plan.ep:
            fits = [n for n in range(1, experts + 1) if experts % n == 0 and plan.mesh.edp * plan.ep % n == 0]
            raise ValueError(
                f"Plan(ep={plan.ep}): {plan.ep} ranks cannot hold equally many of the {experts} experts of {name}: "
                f"ep={max(n for n in fits if n <= plan.ep)} can"
            )
        if any(isinstance(inner, _DropoutNd) and inner.p > 0 for inner in module.modules()):
            raise ValueError(
                f"Plan(ep={plan.ep}): {name} has a dropout, which draws for the rows of its experts, and these are on "
                "other ranks in another order. Dropout after the experts works, as "
                "mk.models.MixtureOfExperts(dropout=0.1) has it; or ep=1"
            )
    _check_shared(layers, plan.ep)


def _check_shared(layers: Mapping[str, nn.Module], ep: int) -> None:
    """Check that experts of several layers that share weights are in one order."""
    first: dict[int, str] = {}
    for name, module in layers.items():
        experts = number_of_experts(module)
        order = order_of_experts(module, experts)
        for parameter in module.parameters():
            other = first.setdefault(id(parameter), name)
            if order_of_experts(layers[other], experts) != order:
                raise ValueError(
                    f"Plan(ep={ep}): {other} and {name} share weights, which can be in one order only: "
                    f"mk.models.place_experts(model, {{{name!r}: {[*order_of_experts(layers[other], experts)]}}})"
                )
