"""Where to cut a model into stages: by the measured time of its blocks on this machine, or by FLOPs.

    blocks     found in the model as it is (`mpkit.strategies.prepare.partition`)
    cost       of each block: measured or counted
    balance    contiguous stages, the most expensive of which is as cheap as possible (`mpkit.models.balance`)
    crossing   the tensors that then cross from stage to stage

A Plan without `cut` balances FLOPs. This module looks more closely and reports what it found.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mpkit.common.table import table_text
from mpkit.common.tracebacks import public
from mpkit.plan.balance import balance
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import batch_size, map_tensors, one_of_each_shape, part, split
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.loss.counted import Quotient
from mpkit.strategies.models.chain import cut, is_chain, layers_of
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.partition.walk import ForwardWalk, OriginalForward, prepare_modules
from mpkit.strategies.prepare.arguments import check_loss, check_model
from mpkit.strategies.prepare.batches import check_split, take_batches
from mpkit.strategies.prepare.blocks import groups_of
from mpkit.strategies.prepare.isolation import on_threads, quiet
from mpkit.strategies.prepare.observe import observe
from mpkit.strategies.prepare.partition import partition_model
from mpkit.strategies.stage.stage import call


@public
def find_cut(
    model: nn.Module,
    batch: tuple[Any, Any],
    stages: int,
    *,
    loss: Callable[[Any, Any], Any],
    by: str = "time",
    microbatches: int = 1,
) -> Cut:
    """Find where a model is best cut into stages.

    Args:
        model: any module; it is left unchanged.
        batch: (inputs, targets), as training takes them.
        stages: the number of stages.
        loss: loss(outputs, targets) -> scalar, or (total, count).
        by: what is balanced: "time" (measured here, on the CPU) or "flops".
        microbatches: the number of parts that the batch is split into; a block is measured on one of them.

    >>> import torch
    >>> from mpkit.models import UNet
    >>> data = torch.zeros(2, 1, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    >>> print(find_cut(UNet(1, 2), data, 3, loss=torch.nn.functional.cross_entropy, by="flops"))
    balanced by flops (FLOPs of the forward); cut=...
    stage  share  parameters  keeps    sends to              blocks
    0      ...
    1      ...
    2      ...

    Raises:
        ValueError: the model cannot be cut into this many stages; the message says where and why.
    """
    if by not in BY:
        raise ValueError(f"find_cut(by={by!r}): there are {', '.join(map(repr, BY))}, such as by='flops'")
    check_model(model)
    check_loss(loss)
    return _find(model, batch, Plan(pp=stages, microbatches=microbatches), Quotient(loss), by)


def _find(
    model: nn.Module, batch: tuple[Any, Any], plan: Plan, loss: Callable[[Any, Any], Any], by: str
) -> Cut:
    with quiet():
        batches = take_batches([batch], 1)
        assert isinstance(batches, WholeBatches)
        check_split(batches, plan.__str__, plan.microbatches)
        shapes = one_of_each_shape(batches, plan.microbatches, 1)
        observe(model, shapes, loss, plan, counts=False)  # refuses what the model or the loss refuses
        partition = partition_model(model, shapes, plan, loss)
        graph = next(iter(partition.divisions.values())).graph
        # ---- cost: of each call of a block, on one thread, since idle threads would spin
        first = split(batch_size(batches[0][0]), plan.microbatches)[0]
        held = copy.deepcopy(model)
        prepare_modules(held, partition.modules, partition.blocks)
        with on_threads(1), torch.no_grad(), Timing() as timing:
            call(held, map_tensors(torch.clone, part(batches[0][0], slice(*first))), first=True)
        blocks, groups = [graph.nodes[k] for k in graph.blocks], groups_of(graph)
        names = [blocks[group[0]].name for group in groups]
        modules, taken = dict(model.named_modules()), [cost for _, cost in timing.calls]
        each = [block.flops.forward for block in blocks]
        each = each if by == "flops" else [cost.forward + cost.backward for cost in taken]
        costs = [sum(each[i] for i in group) for group in groups]
        sizes = [sum(p.numel() for p in modules[name].parameters()) for name in names]
        kept = [sum(taken[i].kept for i in group) for group in groups]
        # ---- balance
        cut(names, costs, plan.stages, None)  # raises if there are too few
        balanced = balance(costs, plan.stages)
        starts = [stage.start for stage in balanced[1:]]
        # ---- crossing
        partition = partition_model(model, shapes, replace(plan, cut=starts), loss)
    division = next(iter(partition.divisions.values()))
    whole = sum(costs) or 1.0
    stages_found = [
        StageFound(
            [names[i] for i in stage], cost := sum(costs[i] for i in stage), cost / whole,
            sum(sizes[i] for i in stage), sum(kept[i] for i in stage),
        )
        for stage in balanced
    ]  # fmt: skip
    sends = {
        (route.source, route.target): sum(prod(spec.shape) * spec.dtype.itemsize for spec in route.specs)
        for route in division.routes
    }
    tied = {next(iter(shared.names.values())): list(shared.names) for shared in partition.shared_weights}
    return Cut(_points(model, names, starts), by, stages_found, sends, tied)


def _points(model: nn.Module, names: list[str], at: list[int]) -> list[int | str]:
    """Return cut points in the form of `Plan.cut`: names where they are unambiguous, otherwise numbers."""
    if is_chain(model):
        layers = [name for name, _ in layers_of(model)]
        return [next(n for n in layers if n == names[i] or n.startswith(f"{names[i]}.")) for i in at]
    return [names[i] if names.index(names[i]) == i else i for i in at]


BY = {"time": "measured seconds of forward and backward", "flops": "FLOPs of the forward"}


@dataclass(frozen=True)
class StageFound:
    """A stage that a cut would create.

    Attributes:
        blocks: the names of its blocks, in order.
        cost: its cost in the unit of `Cut.by`.
        share: its share of the total cost.
        parameters: its number of parameters.
        kept: bytes that a micro-batch keeps for its backward.
    """

    blocks: list[str]
    cost: float
    share: float
    parameters: int
    kept: int


@dataclass(frozen=True)
class Cut:
    """Where to cut a model, and why. Use it as `Plan(cut=found.points, ...)`; `print` shows it.

    Attributes:
        points: the first block of each stage but stage 0, in the form of `Plan.cut`.
        by: the quantity that was balanced, a key of `BY`.
        stages: the resulting stages.
        sends: bytes per micro-batch sent forward between stages, by (source, target).
        tied: the weights that several stages would compute with, and those stages.
    """

    points: list[int | str]
    by: str
    stages: list[StageFound]
    sends: dict[tuple[int, int], int]
    tied: dict[str, list[int]]

    def __str__(self) -> str:
        rows = [("stage", "share", "parameters", "keeps", "sends to", "blocks")]
        for number, stage in enumerate(self.stages):
            sends = [f"{to}: {_bytes(n)}" for (source, to), n in self.sends.items() if source == number]
            first, last = stage.blocks[0], stage.blocks[-1]
            blocks = first if first == last else f"{first} to {last}"
            kept, share = _bytes(stage.kept), f"{stage.share:.0%}"
            rows.append((str(number), share, f"{stage.parameters:,}", kept, ", ".join(sends) or "-", blocks))
        lines = table_text(rows, left=range(len(rows[0])))
        tied = [f"tied: {name}, in stages {', '.join(map(str, at))}" for name, at in self.tied.items()]
        return "\n".join([f"balanced by {self.by} ({BY[self.by]}); cut={self.points}", *lines, *tied])


def _bytes(n: int) -> str:
    """Format a number of bytes for a table, such as "1.5 kB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


# ---- measured ------------------------------------------------------------------------------------------------


TIMES = 3  # how often each block is run


class CallCost(NamedTuple):
    """The cost of one call of a block."""

    forward: float  # seconds
    backward: float  # seconds
    kept: int  # bytes that autograd saves, besides the block's parameters


class Timing(ForwardWalk):
    """A walk that computes everything and times each call of a block."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls: list[tuple[str, CallCost]] = []  # names and costs, in order

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Time the call of a block; operations between blocks are not seen, since there are no values here."""
        assert isinstance(func, OriginalForward)
        runs = [_once(func, args, kwargs) for _ in range(TIMES)]
        forwards, backwards, kept = zip(*runs, strict=True)
        self.calls.append((name, CallCost(min(forwards), min(backwards), max(kept))))
        with torch.no_grad():
            return func(*args, **kwargs)


def _once(block: OriginalForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallCost:
    leaves, shape = flatten((args, kwargs))
    # Objects are copied too, so that a cache that a block writes into starts the same in each run.
    copies = [_leaf(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    own = {parameter.untyped_storage()._cdata for parameter in block.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    again_args, again_kwargs = rebuild(shape, copies)
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        begun = time.thread_time()
        made, _ = flatten(block(*again_args, **again_kwargs))
        between = time.thread_time()
    ends = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
    wanted = [t for t in (*copies, *block.module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    middle = time.thread_time()
    if ends and wanted:
        torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return CallCost(between - begun, time.thread_time() - middle, sum(kept.values()))


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that a block may write into, and that has a gradient, as in the middle of a model, if it can."""
    copied = tensor.detach().clone()
    return copied.requires_grad_().clone() if copied.is_floating_point() else copied
