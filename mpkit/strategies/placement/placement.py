"""Where a plan would put a model, and where a run has put one: `Placement`s of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpkit.plan.mesh_of_trace import holders_of, mesh_of
from mpkit.strategies.placement.placed_ranks import Parts, Placement, Share, place

if TYPE_CHECKING:
    from torch import nn

    from mpkit.devices.hardware import Hardware
    from mpkit.plan.plan import Plan
    from mpkit.strategies.stage.shard import Shard

__all__ = ["placement", "placement_of", "shard_words", "shards_by", "shares_of"]


def placement(
    plan: Plan,
    model: nn.Module | None = None,
    *,
    shards: Parts | None = None,
    hardware: Hardware | str | None = None,
) -> Placement:
    """Return where a plan puts a model; see `Plan.placement`."""
    holders = plan.build().stage_to_rank if plan.pp > 1 else [0]
    if model is None:
        return place(plan.mesh, (), shards, hardware, holders=holders, zero=plan.zero)
    stages, notes = _stages(plan, model)
    if shards is None and plan.tp > 1:
        shards = shards_by(plan, model)
    shares = shares_of(plan, model) if plan.zero and plan.pp == plan.tp == plan.ep == 1 else ()
    return place(
        plan.mesh, stages, shards, hardware, holders=holders, notes=notes, zero=plan.zero, shares=shares
    )


def shards_by(plan: Plan, model: nn.Module) -> dict[str, list[str]]:
    """Describe what each tp rank holds of a model's parameters, by the parameter's name."""
    from mpkit.strategies.comm.fake_group import FakeGroup
    from mpkit.strategies.tensor.known_plans import find_tensor_plan
    from mpkit.strategies.tensor.resolve import check
    from mpkit.strategies.tensor.shards import shards_of

    tensor = check(model, plan.tp, plan.tensor or find_tensor_plan(model))
    of = [shards_of(model, FakeGroup(plan.tp, index), tensor).found for index in range(plan.tp)]
    return shard_words({name: [words_of[name] for words_of in of] for name in of[0]})


def _stages(plan: Plan, model: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Return the names of a model's layers by stage, and notes on how the stages were balanced."""
    from mpkit.strategies.models.chain import cut

    layers = [
        (f"{name}.{inner}" if inner else name, module)
        for name, child in model.named_children()
        for inner, module in (child.named_children() if _is_list(child) else [("", child)])
    ]
    names = [name for name, _ in layers]
    if plan.stages == 1:
        return [names], []
    sizes = [float(sum(p.numel() for p in layer.parameters()) or 1) for _, layer in layers]
    parts = cut(names, sizes, plan.stages, plan.cut)
    told = [] if plan.cut else ["Stages balanced by their parameters; a run balances them by FLOPs."]
    return [[names[i] for i in part] for part in parts], told


def _is_list(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.Sequential)


def placement_of(
    meta: Mapping[str, Any],
    ranks: int,
    *,
    model: nn.Module | None = None,
    hardware: Hardware | str | None = None,
) -> Placement:
    """Return where a run put its model, according to its trace's meta: "plan", "stages", "shards", "hardware".

    Args:
        meta: the trace's meta.
        ranks: the number of ranks.
        model: the model that was trained, to name its rows and columns; None: only the counts, from the meta.
        hardware: the machine to place the run on; None: the run's own, if it was a catalogued machine with nodes.

    Raises:
        ValueError: the meta has no plan for this many ranks, or the machine has fewer devices.
    """
    from mpkit.plan.plan import Plan

    mesh = mesh_of(meta, ranks)
    if mesh is None:
        raise ValueError("placement_of(meta): it has no plan for so many ranks, so nobody knows their places")
    where = meta.get("hardware", "cpu") if hardware is None else hardware
    machine = None if where == "cpu" else where
    divided = meta.get("shards")
    if model is not None and mesh.tp > 1:
        divided = shards_by(Plan.from_json(meta["plan"]), model)
    plan = Plan.from_json(meta["plan"])
    shares = shares_of(plan, model) if model is not None and plan.zero and plan.pp == plan.tp == 1 else ()
    return place(
        mesh,
        meta.get("stages", ()),
        divided,
        machine,
        holders=holders_of(meta),
        zero=plan.zero,
        shares=shares,
    )


def shard_words(shards: Mapping[str, Sequence[Shard]]) -> dict[str, list[str]]:
    """Describe what each tp rank holds of the divided parameters.

    >>> from mpkit.strategies.stage.shard import Shard
    >>> shard_words({"up.weight": [Shard((8, 4), 0, (range(0, 4),)), Shard((8, 4), 0, (range(4, 8),))]})
    {'up.weight': ['rows 0-3', 'rows 4-7']}

    Args:
        shards: by the parameter's name, one shard per tp rank.
    """
    return {name: [_words(shard) for shard in of] for name, of in shards.items()}


def _words(shard: Shard) -> str:
    return f"{shard.axis_name} " + ", ".join(
        f"{part.start}-{part.stop - 1}" for part in shard.ranges if len(part)
    )


def shares_of(plan: Plan, model: nn.Module) -> tuple[Share, ...]:
    """Return which replica holds which elements of each parameter of a one-stage model, as `mpkit.strategies.replicas`
    does.

    >>> from torch import nn
    >>> from mpkit import Plan
    >>> for share in shares_of(Plan.zero(3, 2), nn.Linear(2, 3)):
    ...     print(share.name, share.parts)
    weight ((0, 5), (5, 6))
    bias ((0, 0), (0, 3))
    """
    import torch

    from mpkit.strategies.models.chain import layers_of
    from mpkit.strategies.replicas.flat import FlatLayout
    from mpkit.strategies.replicas.units import sites_of, units_of
    from mpkit.strategies.stage.stage import Stage

    n = plan.shards
    sites = sites_of({0: Stage(0, layers_of(model), torch.device("cpu"))})
    parts: dict[int, tuple[tuple[int, int], ...]] = {}
    units = units_of(sites, plan.zero, int(plan.bucket_mb * 2**20))
    for unit in units:
        layouts = [FlatLayout(unit.parameters, rank % n, n) for rank in range(plan.dp * plan.cp)]
        for i, parameter in enumerate(unit.parameters):
            parts[id(parameter)] = tuple(layout.own(i) for layout in layouts)
    return tuple(
        Share(name, tuple(parameter.shape), parts[id(parameter)])
        for name, parameter in model.named_parameters()
        if id(parameter) in parts
    )
