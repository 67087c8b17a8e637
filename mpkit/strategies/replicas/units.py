"""Units: which parameters share a flat tensor, and the layers that use them.

    DDP          up to `bucket_mb`, the last layer's first, as in PyTorch (`fill_buckets`)
    P_os, P_os+g one layer, so that its gradients are reduced, and possibly freed, while the next layer's arrive; small
                 layers are merged, up to 1 MiB, and large ones split into parts of at most `bucket_mb` (`units_of`);
                 by owner, one stage
    P_os+g+p     one layer or one repeated block, so that its parameters are whole only while it computes

A parameter that several layers share belongs to the first of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import torch
from torch import nn

from mpkit.strategies.stage.partitioned_stage import LooseParameters
from mpkit.strategies.stage.stage import Stage

FIRST_BYTES = 2**20  # of the first bucket, so that communication begins early, as in PyTorch's DDP

NO_KINDS: Mapping[nn.Parameter, str] = MappingProxyType({})


@dataclass(eq=False)
class Site:
    """A module whose parameters must be whole before its forward and its backward."""

    stage: int
    module: nn.Module  # a repeated block of the model, a layer outside of blocks, or a module around such
    own: list[nn.Parameter]  # which are in no earlier site
    uses: list[nn.Parameter]  # which its own computation may use
    around: bool = False  # whether it contains other sites


def sites_of(stages: dict[int, Stage]) -> list[Site]:
    """Return the sites of a model, in the order in which modules are registered.

    Sites are what FSDP users wrap: each repeated block (`mpkit.strategies.models.chain`), and each module beside the
    blocks, such as embeddings and head. A layer of a chain is a site, unless there are blocks within it. A module
    around others is a site too, for its own parameters, and for those that are used outside of their module's call.
    """
    found: dict[nn.Module, Site] = {}  # a module that is registered twice is one site
    for number, stage in stages.items():
        for name, layer in zip(stage.names, stage.layers, strict=True):
            if isinstance(layer, LooseParameters):
                sites = [Site(number, layer, [], list(layer.parameters()), around=True)]
            else:
                sites = _sites(number, layer, stage.blocks, is_model=not name)
            for site in sites:
                found.setdefault(site.module, site)
    seen: set[nn.Parameter] = set()
    for site in found.values():
        site.own = [parameter for parameter in site.uses if parameter not in seen]
        seen.update(site.own)
    return list(found.values())


def _sites(
    number: int, module: nn.Module, blocks: Collection[nn.Module], *, is_model: bool = False
) -> list[Site]:
    """Return the sites of a module of a stage: the module itself, and those within it."""
    inner: list[Site] = []
    if is_model or (module not in blocks and any(each in blocks for each in module.modules())):
        inner = [site for child in _children(module, blocks) for site in _sites(number, child, blocks)]
    within = {parameter for site in inner for parameter in site.uses}
    uses = [parameter for parameter in module.parameters() if parameter not in within]
    if not (uses or inner):
        return []
    return [Site(number, module, [], uses, around=bool(inner)), *inner]


def _children(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module's children, with containers replaced by their own children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and child not in blocks:
            yield from _children(child, blocks)
        else:
            yield child


@dataclass(eq=False)
class Unit:
    """Parameters that lie in one flat tensor."""

    parameters: list[nn.Parameter]  # of one dtype, all trained or all frozen
    stage: int | None  # the model's stage whose backwards produce the gradients; None if several do


def units_of(
    sites: list[Site], zero: int, bucket_bytes: float, tied: Collection[nn.Parameter] = (),
    apart: Mapping[nn.Parameter, str] = NO_KINDS, *, by_owner: bool = False,
) -> list[Unit]:  # fmt: skip
    """Group the sites' own parameters as a stage of ZeRO does, the last used first.

    Stages 1 and 2 leave frozen parameters whole: they have no gradient and are in no optimizer.

    A tied parameter, which several stages of the model use, has a unit of its own: its gradient is complete only when
    they are all done, and ranks that hold different layers beside it still divide it in the same way.
    Kinds of parameters stay `apart`: beside tp's shards of different sizes each rank would divide unsharded parameters
    in its own way, and add up their gradients in another order; experts are on fewer ranks.

    Args:
        bucket_bytes: the most bytes in a unit of stages 1 and 2.

    >>> from mpkit.models import chain
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> sites = sites_of({0: Stage(0, chain(model), torch.device("cpu"))})
    >>> [[len(unit.parameters) for unit in units_of(sites, zero, 10**6)] for zero in (1, 3)]
    [[4], [2, 2]]
    """
    # A layer is a unit; stages 1 and 2 merge those that have fewer bytes than `least`.
    least, most = (inf, inf) if by_owner else (FIRST_BYTES, bucket_bytes)
    least, most = (0, inf) if zero == 3 else (least, most)
    tied = set(tied)  # compares identity, where a list would compare values
    found: list[Unit] = []
    alone: list[Unit] = []
    filling: dict[tuple[str, torch.dtype, bool, int], list[nn.Parameter]] = {}
    for site in reversed(sites):
        for parameter in site.own:
            if not (parameter.requires_grad or zero == 3):
                continue
            if parameter in tied:
                alone.append(Unit([parameter], None))
                continue
            key = apart.get(parameter, ""), parameter.dtype, parameter.requires_grad, site.stage
            now = filling.setdefault(key, [])
            if now and _nbytes(now) + parameter.nbytes > most:
                found.append(Unit(now, site.stage))
                now = filling[key] = []
            now.append(parameter)
        for key, now in list(filling.items()):  # the end of a layer
            if now and _nbytes(now) >= least:
                found.append(Unit(filling.pop(key), key[-1]))
    return found + [Unit(now, key[-1]) for key, now in filling.items() if now] + alone


def _nbytes(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def fill_buckets(
    parameters: Iterable[nn.Parameter], nbytes: int, apart: Mapping[nn.Parameter, str] = NO_KINDS
) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of `nbytes`, the first of each dtype of 1 MiB, as in PyTorch's DDP.

    A kind of parameters (`apart`) shares no bucket with another. So unsharded ones, which other ranks hold beside
    shards of other sizes, are summed in the same order everywhere, and agree to the last bit.

    >>> layers = [nn.Parameter(torch.empty(n)) for n in (100_000, 200_000, 300_000, 500_000, 1)]
    >>> [len(bucket) for bucket in fill_buckets(layers, nbytes=3_000_000)]
    [2, 2, 1]
    """
    buckets: list[list[nn.Parameter]] = []
    # Each with the size at which it is full.
    filling: dict[tuple[torch.dtype, str], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, apart.get(parameter, "")
        bucket, limit = filling.get(kind, ([], min(FIRST_BYTES, nbytes)))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = ([], nbytes) if _nbytes(bucket) >= limit else (bucket, limit)
    return buckets
