"""Experts divided over ranks: each rank holds E/n of a layer's experts, and two all-to-alls carry the tokens.

    permute     a row per token and choice, sorted by expert, so that those for one rank are side by side
    count       an all-to-all of E numbers: how many rows each rank sends to each expert
    dispatch    an all-to-all with uneven parts brings each row to the rank of its expert
    experts     the layer's own forward computes them, with the experts that are here
    return      the same all-to-all the other way
    combine     weighted, and summed over each token's choices

The gradients take both all-to-alls the other way. Every rank takes part in each of them, with however few tokens, so
that none waits in vain: a rank that receives no row computes one of zeros, and drops the result.

With `etp = tp` a rank has a part of each of its experts, as tp divides MLPs (`mpkit.strategies.tensor.region`). Then
the layer returns a partial sum, weights included, which is summed over tp.

No rank drops rows, whatever the routing, so the result is that of the whole layer.
`mpkit.strategies.reference.experts.expert_parallel` is the algorithm.

Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR 2021,
section 3.2; Liu et al., "MoE Parallel Folding", arXiv 2504.14960, section 3, for the ranks that divide them.

Experts are modules whose forward(x, chosen, weights) returns the weighted sum, as in `mpkit.models.MixtureOfExperts`
and the models of transformers, and whose parameters are all [E, ...].
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpkit.common.torch_private import FakeTensor, _DropoutNd
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.experts import MixtureOfExperts, count_rows
from mpkit.strategies.stage.shard import Shard
from mpkit.strategies.tensor.operators import conjugate

# Names of a forward's arguments with each token's experts, [T, k], and with their weights, [T, k].
CHOSEN = ("chosen", "top_k_index", "router_indices", "topk_indices", "selected_experts")
WEIGHTS = ("weights", "top_k_weights", "routing_weights", "topk_weights")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose experts can be divided, by name.

    >>> from mpkit.models import GPT
    >>> list(find_experts(GPT(layers=2, experts=4))), list(find_experts(GPT(layers=2)))
    (['block0.mlp.experts', 'block1.mlp.experts'], [])
    """
    return {name: module for name, module in model.named_modules() if _is_of_experts(module)}


def find_balanced(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the layers whose routing depends on the whole batch in training, by name."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)}
    return {name: each for name, each in layers.items() if each.balance_options}


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
    """Return each token's experts, [T, k], from the arguments of a call of experts."""
    return next((kwargs[name] for name in CHOSEN if name in kwargs), None) if len(args) < 2 else args[1]


def number_of_experts(module: nn.Module) -> int:
    """Return E."""
    return next(module.parameters()).shape[0]


def check_experts_of(model: nn.Module, plan: Any) -> None:
    """Check that a plan's ep can divide the experts of each layer."""
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


def divide_experts(
    model: nn.Module, group: Communicator, parts: Mapping[str, Shard] | None = None
) -> dict[str, Shard]:
    """Leave this rank its part of each layer's experts, in place, and let their forwards exchange tokens.

    >>> from mpkit.models import GPT
    >>> from mpkit.strategies.comm.fake_group import FakeGroup
    >>> model = GPT(layers=1, width=8, heads=2, experts=4)
    >>> divide_experts(model, FakeGroup(2, 1))["block0.mlp.experts.up"].ranges, model.block0.mlp.experts.up.shape
    ((range(2, 4),), torch.Size([2, 32, 8]))

    Return the shards of the experts' parameters, by every name that they have. `parts` has the shards of the parameters
    that tp has divided before.
    """
    shards: dict[str, Shard] = {}
    aliases: dict[int, list[str]] = {}  # of parameters that have several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    local: dict[int, nn.Parameter] = {}
    for name, module in find_experts(model).items() if group.size > 1 else ():
        experts = number_of_experts(module)
        here = experts // group.size
        held = range(group.index * here, (group.index + 1) * here)
        for inner, parameter in list(module.named_parameters(name)):
            part = (parts or {}).get(inner)
            shard = Shard(tuple(parameter.shape) if part is None else part.whole, 0, (held,), part)
            shards |= dict.fromkeys(aliases[id(parameter)], shard)
            if id(parameter) not in local:
                mine = replace(shard, across=None).take(parameter.detach())
                local[id(parameter)] = nn.Parameter(mine, parameter.requires_grad)
            owner, _, key = inner.removeprefix(f"{name}.").rpartition(".")
            module.get_submodule(owner)._parameters[key] = local[id(parameter)]
        if hasattr(module, "num_experts"):
            setattr(module, "num_experts", here)  # noqa: B010 (nn.Module's stubs allow tensors and modules only)
        compute, names = module.forward, inspect.signature(module.forward)
        exchanging: Any = partial(_forward, compute, names, experts, group)
        exchanging.__signature__ = names
        module.forward = exchanging
    return shards


def _forward(
    compute: Callable[..., Tensor], names: inspect.Signature, experts: int, group: Communicator,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return the whole layer's outputs for this rank's tokens.

    Args:
        compute: the layer's own forward, with this rank's experts.
        experts: their number on all ranks.
        args, kwargs: x [T, h], chosen [T, k] and weights [T, k].
    """
    x, chosen, weights = names.bind(*args, **kwargs).args[:3]
    here = experts // group.size
    # ---- permute
    order = chosen.flatten().argsort(stable=True)
    # ---- count
    sends, receives = _exchange_counts(chosen, here, group)
    to, of = (list(map(sum, counts)) for counts in (sends, receives))
    token = order // chosen.shape[1]
    # ---- dispatch
    there, back = (partial(_exchange_rows, sends=a, receives=b) for a, b in ((to, of), (of, to)))
    rows = conjugate(group, x.index_select(0, token), there, back)
    # ---- experts
    places = [place for counts in receives for place, count in enumerate(counts) for _ in range(count)]
    padded = F.pad(rows, (0, 0, 0, 0 if len(rows) else 1))  # without rows, experts compute one of zeros
    expert = torch.tensor(places or [0], dtype=chosen.dtype, device=rows.device)[:, None]
    made = compute(padded, expert, torch.ones_like(expert, dtype=weights.dtype))[: len(rows)]
    # ---- return
    returned = conjugate(group, made, back, there)
    # ---- combine
    weighted = returned * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def _exchange_rows(group: Communicator, rows: Tensor, *, sends: list[int], receives: list[int]) -> Tensor:
    return group.all_to_all(rows.contiguous(), sends=sends, receives=receives)


def _exchange_counts(
    chosen: Tensor, here: int, group: Communicator
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the numbers of rows for each rank's experts, and from each rank for this rank's own."""
    n = group.size
    rows = count_rows(chosen, n * here)
    sends = torch.tensor(rows, device=chosen.device)
    receives = group.all_to_all(sends)
    if isinstance(chosen, FakeTensor) or chosen.is_meta:  # without values: as if routing were uniform
        even = [rows[i * here : (i + 1) * here] for i in range(n)]
        return even, even
    return sends.view(n, here).tolist(), receives.view(n, here).tolist()
