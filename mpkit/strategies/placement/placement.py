"""Placement: which rank holds which part of which layer, on which node, and which ranks communicate over which link.

    pp   a rank holds the layers of its stages
    dp   replicas hold the same parameters, or under ZeRO a shard of them
    cp   ranks that share a sequence hold the same parameters, too
    tp   a rank holds some rows or columns of a divided layer
    ep   a rank holds some of a layer's experts

Where a plan would put a model, and where a run has put one: both are a `Placement`.

Neighbouring ranks differ in tp first, so that the ranks that communicate most stay within a node (Narayanan et al.
2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from mpkit.common.display import DrawnResult
from mpkit.devices.placement_notes import spans_nodes
from mpkit.plan.mesh import Mesh, long_axes

if TYPE_CHECKING:
    from torch import nn

    from mpkit.devices.hardware import Hardware, Link
    from mpkit.plan.plan import Plan
    from mpkit.strategies.stage.shard import Shard


Parts = Mapping[str, Sequence[str]]
"""What each rank along tp or ep holds of a parameter, such as "rows 0-3"."""

STATES = ("parameters", "gradients", "optimizer states")
"""The model states, in the order of the ZeRO paper's figure 1."""


@dataclass(frozen=True)
class Share:
    """A parameter, and which replica holds which part of it.

    Attributes:
        name: its name in the model.
        shape: the shape of the whole parameter.
        parts: by replica, the first element of its part and the one after its last, in the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


def sharded_states(zero: int) -> dict[str, bool]:
    """Return which model states a ZeRO stage shards; the others are whole on every replica.

    >>> sharded_states(2)
    {'parameters': False, 'gradients': True, 'optimizer states': True}
    """
    return {state: zero >= least for state, least in zip(STATES, (3, 2, 1), strict=True)}


@dataclass(frozen=True)
class Talk:
    """Groups of one axis that communicate over the same link."""

    axis: str
    groups: tuple[tuple[int, ...], ...]  # of ranks; along pp, pairs of neighbours
    link: Link | None  # None if no hardware was given
    crosses: bool  # whether the groups span several nodes


@dataclass(frozen=True, eq=False)
class Placement(DrawnResult):
    """The place of every rank: prints as text, and shows itself as a picture in a notebook.

    Attributes:
        mesh: the mesh of the ranks.
        stages: the names of the layers, by stage; empty if no model is known.
        holders: by stage, the place along pp that holds it.
        shards, experts: what tp and ep divide; see `Parts`.
        hardware: the machine with its nodes and links; None if not given.
        notes: remarks for the reader.
        zero: the ZeRO stage; 0 if all replicas hold the same.
        shares: under ZeRO, which elements of each parameter a replica updates; in stage 3 it holds no others.
    """

    mesh: Mesh
    stages: tuple[tuple[str, ...], ...] = ()
    holders: tuple[int, ...] = ()
    shards: Parts = field(default_factory=dict)
    hardware: Hardware | None = None
    notes: tuple[str, ...] = ()
    zero: int = 0
    shares: tuple[Share, ...] = ()
    experts: Parts = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same part of the model, or would without ZeRO: dp x cp."""
        return self.mesh.dp * self.mesh.cp

    @property
    def shard_count(self) -> int:
        """The number of ranks across which ZeRO shards the states that replicas would otherwise duplicate."""
        return self.mesh.dp_shard * self.mesh.cp

    def stages_of(self, rank: int) -> list[int]:
        """Return the numbers of the stages that a rank holds."""
        place = self.mesh.place(rank).pp
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def layers_of(self, rank: int) -> list[str]:
        """Return the names of the layers that a rank holds in whole or in part."""
        return [name for stage in self.stages_of(rank) for name in self.stages[stage]] if self.stages else []

    def part(self, name: str, rank: int) -> str:
        """Describe which part of a divided parameter a rank holds; "" if the rank does not hold it, or holds all."""
        if self.stages and not any(name.startswith(f"{layer}.") for layer in self.layers_of(rank)):
            return ""
        axes = [(axis, of[name]) for axis, of in (("ep", self.experts), ("tp", self.shards)) if name in of]
        return ", ".join(parts[self.mesh.group(rank, axis).index(rank)] for axis, parts in axes)

    def node_of(self, rank: int) -> int:
        """Return the number of the rank's node; 0 if no hardware was given."""
        return self.hardware.node_of(rank) if self.hardware else 0

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        """The ranks by node."""
        numbers = [self.node_of(rank) for rank in range(self.mesh.size)]
        return [tuple(r for r, n in enumerate(numbers) if n == node) for node in sorted(set(numbers))]

    @property
    def talks(self) -> list[Talk]:
        """The groups that communicate, with their links, by axis, innermost axis first."""
        talks = []
        more = ["ep"] if self.mesh.ep > 1 else []
        for axis in (*reversed(long_axes(self.mesh)), *more):
            groups = self.mesh.groups(axis)
            if axis == "pp":  # a stage communicates with its neighbours only
                groups = [pair for group in groups for pair in pairwise(group)]
            for crosses in (False, True):
                some = tuple(g for g in groups if (len({self.node_of(rank) for rank in g}) > 1) == crosses)
                if some:
                    link = self.hardware.link_of(some[0]) if self.hardware else None
                    talks.append(Talk(axis, some, link, crosses))
        return talks

    def __repr__(self) -> str:
        return f"<Placement of {self.mesh.size} ranks on {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}>"


def place(
    mesh: Mesh, stages: Sequence[Sequence[str]] = (), shards: Parts | None = None,
    hardware: Hardware | str | None = None, *, holders: Sequence[int] | None = None, notes: Sequence[str] = (),
    zero: int = 0, shares: Sequence[Share] = (), experts: Parts | None = None,
) -> Placement:  # fmt: skip
    """Return the placement of a mesh, and of a model's stages and shards; see `Placement` for the arguments.

    >>> from mpkit.devices.hardware import Device, Hardware, Link
    >>> wires = Link("bus", 1e-6, 80e9), Link("network", 5e-6, 25e9)
    >>> toy = Hardware("toy", Device("d", {"float32": 1e12}, 1e11), *wires, per_node=2, nodes=2)
    >>> [(talk.axis, talk.groups, talk.link.name) for talk in place(Mesh(pp=2, tp=2), hardware=toy).talks]
    [('tp', ((0, 1), (2, 3)), 'bus'), ('pp', ((0, 2), (1, 3)), 'network')]

    Args:
        hardware: a catalogued machine's name, or a `Hardware`.
        holders: by stage, the place along pp that holds it; None: round robin.

    Raises:
        ValueError: the machine has fewer devices than there are ranks.
    """
    from mpkit.devices.catalogue import hardware as find
    from mpkit.devices.catalogue.machines import check_enough

    machine = None if hardware is None else find(hardware)
    if machine is not None:
        check_enough(machine, mesh.size, "placement")
    held = tuple(i % mesh.pp for i in range(len(stages))) if holders is None else tuple(holders)
    groups = mesh.groups("tp") if mesh.tp > 1 else []
    unwise = "" if machine is None else spans_nodes(groups, machine.node_of, machine.per_node)
    told = (*notes, *filter(None, (unwise,)))
    return Placement(
        mesh, tuple(map(tuple, stages)), held, shards or {}, machine, told, zero, tuple(shares), experts or {}
    )


def brief(names: Sequence[str]) -> str:
    """Join names into one text, with names that have consecutive numbers put together.

    >>> brief(["embed", "layers.0", "layers.1", "layers.2", "layers.5", "norm"])
    'embed, layers.0 to 2, layers.5, norm'
    """
    runs: list[list[str]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        number = name.removeprefix(stem)
        if number and runs and runs[-1][-1] == f"{stem}{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    lasts = [run[-1].removeprefix(run[0].rstrip("0123456789")) if run[1:] else "" for run in runs]
    return ", ".join(f"{run[0]} to {last}" if last else run[0] for run, last in zip(runs, lasts, strict=True))


# ---- of a plan, and of a run


def placement(
    plan: Plan, model: nn.Module | None = None, *, hardware: Hardware | str | None = None,
    stages: Sequence[Sequence[str]] | None = None,
) -> Placement:  # fmt: skip
    """Return where a plan puts a model (see `Plan.placement`), or has put it.

    `stages` has the names of each stage's layers, as a run has them; None: they are balanced here.
    """
    holders = plan.build().stage_to_rank if plan.pp > 1 else [0]
    if model is None:
        return place(plan.mesh, (), None, hardware, holders=holders, zero=plan.zero)
    notes: list[str] = []
    if stages is None:
        stages, notes = _stages(plan, model)
    shards = shards_by(plan, model) if plan.tp > 1 else None
    experts = experts_by(plan, model) if plan.ep > 1 else None
    shares = shares_of(plan, model) if plan.zero and plan.pp == plan.tp == plan.ep == 1 else ()
    return place(
        plan.mesh, stages, shards, hardware,
        holders=holders, notes=notes, zero=plan.zero, shares=shares, experts=experts,
    )  # fmt: skip


def shards_by(plan: Plan, model: nn.Module) -> dict[str, list[str]]:
    """Describe what each tp rank holds of a model's parameters, such as "rows 0-3", by the parameter's name."""
    from mpkit.strategies.comm.fake_group import FakeGroup
    from mpkit.strategies.experts.divide import find_experts
    from mpkit.strategies.tensor.known_plans import find_tensor_plan
    from mpkit.strategies.tensor.resolve import check
    from mpkit.strategies.tensor.shards import shards_of

    tensor = check(model, plan.tp, plan.tensor or find_tensor_plan(model))
    of = [shards_of(model, FakeGroup(plan.tp, index), tensor).found for index in range(plan.tp)]
    whole = find_experts(model) if plan.ep > 1 and plan.etp != plan.tp else {}
    found = [name for name in of[0] if not any(name.startswith(f"{experts}.") for experts in whole)]
    return {name: [_words(shards[name]) for shards in of] for name in found}


def experts_by(plan: Plan, model: nn.Module) -> dict[str, list[str]]:
    """Describe which experts each rank along ep holds, such as "experts 0-3", by the parameter's name."""
    from mpkit.strategies.experts.divide import check_experts_of, find_experts, number_of_experts

    check_experts_of(model, plan)
    parts: dict[str, list[str]] = {}
    for name, module in find_experts(model).items():
        n = number_of_experts(module) // plan.ep
        held = [f"experts {i * n}-{i * n + n - 1}" if n > 1 else f"expert {i}" for i in range(plan.ep)]
        parts |= {parameter: held for parameter, _ in module.named_parameters(name)}
    return parts


def _stages(plan: Plan, model: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Return the names of a model's layers by stage, and notes on how the stages were balanced."""
    from torch import nn

    from mpkit.strategies.models.chain import cut

    layers = []
    for name, child in model.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential)
        inner = child.named_children() if is_list else [("", child)]
        layers += [(f"{name}.{key}" if key else name, module) for key, module in inner]
    names = [name for name, _ in layers]
    if plan.stages == 1:
        return [names], []
    sizes = [float(sum(p.numel() for p in layer.parameters()) or 1) for _, layer in layers]
    parts = cut(names, sizes, plan.stages, plan.cut)
    told = [] if plan.cut else ["Stages balanced by their parameters; a run balances them by FLOPs."]
    return [[names[i] for i in part] for part in parts], told


def _words(shard: Shard) -> str:
    ranges = [f"{part.start}-{part.stop - 1}" for part in shard.ranges if len(part)]
    return f"{shard.axis_name} {', '.join(ranges)}"


def shares_of(plan: Plan, model: nn.Module) -> tuple[Share, ...]:
    """Return which replica holds which elements of each parameter of a one-stage model (`mpkit.strategies.replicas`).

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
    divided = [(name, p) for name, p in model.named_parameters() if id(p) in parts]
    return tuple(Share(name, tuple(p.shape), parts[id(p)]) for name, p in divided)
