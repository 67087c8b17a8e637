"""Where a plan puts a model, and where a run put one: `Placement`s of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpkit.places import Parts, Placement, place
from mpkit.tracebacks import public
from mpkit.whereabouts import holders_of, mesh_of
from mpkit.zero_shares import shares_of

if TYPE_CHECKING:
    from torch import nn

    from mpkit.devices import Hardware
    from mpkit.parallel.shard import Shard
    from mpkit.plan import Plan

__all__ = ["placement", "placement_of", "shard_words", "shards_by"]


@public
def placement(
    plan: Plan,
    model: nn.Module | None = None,
    *,
    shards: Parts | None = None,
    hardware: Hardware | str | None = None,
) -> Placement:
    """Where a plan puts a model: on which rank which layers, on which node, and who talks to whom over which link.

    Under ZeRO it shows which model states are sharded, and of a model in one stage who has which elements.

    A run balances its stages by FLOPs, which takes a batch; `placement_of` shows what it really did.

    >>> import mpkit as mk
    >>> from mpkit.models import MLP
    >>> print(mk.placement(mk.Plan.gpipe(2, 4, cut=["hidden2"]), MLP(8, 8), hardware="8x-h100-nvlink"))
    2 ranks, on 1 node of 8 H100 SXM
    <BLANKLINE>
    node 0
      rank 0   pp0   hidden0 to 1
      rank 1   pp1   hidden2 to 3, head
    <BLANKLINE>
    who talks to whom
      pp  (0 1), NVLink 4 within a node, 396 GB/s

    Args:
        plan: whose ranks.
        model: whose layers; None: the mesh and its links only.
        shards: what tp divides, in words by the layer's name; None: as the plan divides the model.
        hardware: a catalogued machine's name (`mpkit.hardware()` lists them), or a `Hardware`; None: no nodes.

    Raises:
        ValueError: a machine with fewer devices than ranks, more stages than layers, or a model of which mpkit does not
            know how to divide it.
    """
    holders = plan.build().stage_to_rank if plan.pp > 1 else [0]
    if model is None:
        return place(plan.mesh, (), shards, hardware, holders=holders, zero=plan.zero)
    stages, notes = _stages(plan, model)
    if shards is None and plan.tp > 1:
        shards = shards_by(plan, model)
    shares = shares_of(plan, model) if plan.zero and plan.pp == plan.tp == 1 else ()
    return place(
        plan.mesh, stages, shards, hardware, holders=holders, notes=notes, zero=plan.zero, shares=shares
    )


def shards_by(plan: Plan, model: nn.Module) -> dict[str, list[str]]:
    """What of a model's parameters each place along tp holds, in words by the parameter's name."""
    from mpkit.parallel.axis import Pretended
    from mpkit.parallel.tensor.finding import find_tensor_plan
    from mpkit.parallel.tensor.resolve import check
    from mpkit.parallel.tensor.shards import shards_of

    tensor = check(model, plan.tp, plan.tensor or find_tensor_plan(model))
    of = [shards_of(model, Pretended(plan.tp, index), tensor).found for index in range(plan.tp)]
    return shard_words({name: [found[name] for found in of] for name in of[0]})


def _stages(plan: Plan, model: nn.Module) -> tuple[list[list[str]], list[str]]:
    """The names of a model's layers by stage, and what to say of them."""
    from mpkit.models.cut import cut

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
    """Where a run put its model, from what its trace's meta says: "plan", "stages", "shards", "hardware".

    Args:
        meta: of the trace.
        ranks: how many there are.
        model: that was trained, for which rows and columns; None: how many of them, as the meta says.
        hardware: where it is thought to be; None: where it was, if that was a machine of the catalogue with nodes.

    Raises:
        ValueError: no plan for so many ranks, or a machine with fewer devices.
    """
    from mpkit.plan import Plan

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
    """What each tp rank holds of divided parameters, in words.

    >>> from mpkit.parallel.shard import Shard
    >>> shard_words({"up.weight": [Shard((8, 4), 0, (range(0, 4),)), Shard((8, 4), 0, (range(4, 8),))]})
    {'up.weight': ['rows 0-3', 'rows 4-7']}

    Args:
        shards: by the parameter's name, one a place along tp.
    """
    return {name: [_words(shard) for shard in of] for name, of in shards.items()}


def _words(shard: Shard) -> str:
    return f"{shard.along} " + ", ".join(
        f"{part.start}-{part.stop - 1}" for part in shard.ranges if len(part)
    )
