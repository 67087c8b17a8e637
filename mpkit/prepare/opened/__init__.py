"""Models that are no chains, made ready to be cut: opened, walked through once, divided among stages.

opening    which modules are opened, and which are blocks that a rank calls as a whole
record     the dry run: blocks, what happens between them, and who uses what
divide     the stage that does each; what goes from stage to stage
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpkit.models.cut import cut
from mpkit.parallel.anymodel.graph import Division, Graph, Opened
from mpkit.parallel.anymodel.walk import prepare_modules
from mpkit.parallel.microbatch import Value, batch_size, map_tensors, part, signature, split
from mpkit.parallel.randomness import may_draw
from mpkit.parallel.stage import PRECISIONS, cast
from mpkit.plan import Plan
from mpkit.prepare.arguments import one_line
from mpkit.prepare.dry_run import narrow_copy, of_wide_outputs
from mpkit.prepare.opened.divide import divide
from mpkit.prepare.opened.opening import Opening, choose
from mpkit.prepare.opened.record import CannotCut, record

__all__ = ["open_for_draws", "open_model"]

Loss = Callable[[Any, Any], Any]


def open_model(model: nn.Module, batches: Iterable[tuple[Value, Value]], plan: Plan, loss: Loss) -> Opened:
    """Open a model and divide it among the plan's stages.

    Raises:
        ValueError: it cannot be cut, or not so; with where, why, and what would work.
    """
    shapes = _by_signature(batches, plan.microbatches)
    whole, dtype = model, PRECISIONS.get(plan.precision)
    if dtype is not None:
        model, loss = narrow_copy(model, dtype), of_wide_outputs(loss)
        shapes = {key: (cast(x, dtype), y) for key, (x, y) in shapes.items()}
    closed: dict[str, str] = {}  # modules that cannot be opened, and why
    opening, graphs = _walk_through(model, shapes, plan, loss, closed)
    starts = _starts(next(iter(graphs.values())), plan, closed)
    divisions = {
        key: divide(graph, _stages_of_blocks(graph, starts), plan.stages) for key, graph in graphs.items()
    }
    return _opened(whole, opening, divisions, plan.stages)


def open_for_draws(
    model: nn.Module, batches: Iterable[tuple[Value, Value]], plan: Plan, loss: Loss
) -> Opened | None:
    """A model that stays whole, opened so that its blocks draw what they would in a pipeline; None if none draws.

    A model that cannot be opened draws as one layer: no pipeline could be compared with it.
    """
    if not model.training or not any(map(may_draw, model.modules())):
        return None
    try:
        opened = open_model(model, batches, plan, loss)
    except Exception:
        return None
    draws = any(node.random for division in opened.divisions.values() for node in division.graph.nodes)
    return opened if draws else None


def _walk_through(
    model: nn.Module,
    shapes: dict[Hashable, tuple[Value, Value]],
    plan: Plan,
    loss: Loss,
    closed: dict[str, str],
) -> tuple[Opening, dict[Hashable, Graph]]:
    """The graph of each shape, and what was opened for it; `closed` tells what could not be."""
    while True:
        opening = choose(model, plan.stages, plan.cut or (), closed)
        dry = _DryRuns(model, opening)
        try:
            return opening, {key: dry.record(x, y, loss) for key, (x, y) in shapes.items()}
        except CannotCut as error:
            if error.scope == "" or error.scope in closed:
                raise ValueError(_explain(model, error)) from None
            closed[error.scope] = str(error)


def _by_signature(batches: Iterable[tuple[Value, Value]], m: int) -> dict[Hashable, tuple[Value, Value]]:
    """A micro-batch of every shape that will come."""
    found: dict[Hashable, tuple[Value, Value]] = {}
    for inputs, targets in batches:
        for start, end in split(batch_size(inputs), m):
            x, y = part(inputs, slice(start, end)), part(targets, slice(start, end))
            found.setdefault(signature(x, y), (x, y))
    return found


class _DryRuns:
    """Copies of the model to walk through: without content, and where that cannot be done, with it."""

    def __init__(self, model: nn.Module, opening: Opening) -> None:
        self._model, self._opening = model, opening
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake: nn.Module | None = None
        self._true: nn.Module | None = None

    def record(self, inputs: Value, targets: Value, loss: Loss) -> Graph:
        cpu = torch.device("cpu")
        try:
            with self._mode:
                if self._fake is None:
                    self._fake = self._copy(self._mode.from_tensor)
                x, y = (map_tensors(self._mode.from_tensor, value) for value in (inputs, targets))
                return record(self._fake, x, y, loss, cpu)
        except CannotCut:
            raise
        except Exception:  # control flow that looks at numbers within a block, or at the inputs'
            if self._true is None:
                self._true = self._copy(torch.clone)
            x, y = (map_tensors(torch.clone, value) for value in (inputs, targets))
            return record(self._true, x, y, loss, cpu)

    def _copy(self, of: Callable[[Tensor], Tensor]) -> nn.Module:
        memo: dict[int, Any] = {}
        for parameter in self._model.parameters():
            memo[id(parameter)] = nn.Parameter(of(parameter.detach()), parameter.requires_grad)
        for buffer in self._model.buffers():
            memo[id(buffer)] = of(buffer.detach())
        made = copy.deepcopy(self._model, memo)
        prepare_modules(made, *self._opening)
        return made


# ---- where it is cut ---------------------------------------------------------------------------------------------

Start = tuple[str, int]
"""The first call of a stage: a block, and which of its calls."""


def _starts(graph: Graph, plan: Plan, closed: dict[str, str]) -> list[Start]:
    """The first call of each stage but stage 0. Calls of one block after each other stay together."""
    calls = _calls(graph)
    groups: list[list[int]] = []
    for i, (name, _) in enumerate(calls):
        if groups and calls[groups[-1][-1]][0] == name:
            groups[-1].append(i)
        else:
            groups.append([i])
    names = [calls[group[0]][0] for group in groups]
    nodes = [graph.nodes[k] for k in graph.blocks]
    costs = [
        sum(nodes[i].flops.forward + sum(prod(graph.specs[n].shape) for n in nodes[i].made) for i in group)
        for group in groups
    ]
    try:
        stages = cut(names, costs, plan.stages, None if plan.cut is None else _points(plan.cut, names))
    except ValueError as error:
        whole = [f"{name} is cut nowhere within: {why}" for name, why in closed.items()]
        raise ValueError(". ".join([str(error).rstrip("."), *whole]) + ".") from None
    return [calls[groups[stage.start][0]] for stage in stages[1:]]


def _points(given: Sequence[int | str], names: list[str]) -> list[int | str]:
    """The user's cut points; one that is no block stands for the first block within."""
    return [
        point if point in names else next((n for n in names if n.startswith(f"{point}.")), point)
        for point in given
    ]


def _calls(graph: Graph) -> list[Start]:
    seen: dict[str, int] = {}
    found = []
    for k in graph.blocks:
        name = graph.nodes[k].name
        found.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return found


def _stages_of_blocks(graph: Graph, starts: list[Start]) -> list[int]:
    calls = _calls(graph)
    at = [calls.index(start) if start in calls else -1 for start in starts]
    if at != sorted(at) or -1 in at:
        raise ValueError(
            "The model calls its blocks in another order for micro-batches of another shape, so that it cannot be cut "
            f"before {', '.join(name for name, _ in starts)} for all. Batches of one shape can be trained on, or "
            "Plan.serial() with these."
        )
    return [sum(i >= first for first in at) for i in range(len(calls))]


# ---- what ranks need to know -------------------------------------------------------------------------------------


def _opened(model: nn.Module, opening: Opening, divisions: dict[Hashable, Division], stages: int) -> Opened:
    modules = dict(model.named_modules())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: list[dict[str, None]] = [{} for _ in range(stages)]
    placed: list[dict[str, None]] = [{} for _ in range(stages)]
    for division in divisions.values():
        for node, s in zip(division.graph.nodes, division.stage_of, strict=True):
            held[s].update(dict.fromkeys(node.parameters))
            if node.block:
                placed[s][node.name] = None
                held[s].update(dict.fromkeys(names[id(p)] for p in modules[node.name].parameters()))
    _check_buffers(modules, placed)
    used = {name for stage in held for name in stage}
    held[0].update(dict.fromkeys(name for name in names.values() if name not in used))
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in names:
            state[key] = next(s for s in range(stages) if names[id(value)] in held[s])
        else:
            inside = (s for s in range(stages) for block in placed[s] if key.startswith(f"{block}."))
            state[key] = max(inside, default=0)
    return Opened(
        opening.modules,
        opening.blocks,
        divisions,
        [tuple(stage) for stage in held],
        [tuple(stage) for stage in placed],
        state,
    )


def _check_buffers(modules: dict[str, nn.Module], placed: list[dict[str, None]]) -> None:
    """No block that keeps statistics in two stages: each would take statistics of its own."""
    for name in dict.fromkeys(name for stage in placed for name in stage):
        stages = [s for s, blocks in enumerate(placed) if name in blocks]
        keeps = [key for key, _ in modules[name].named_buffers() if modules[name].training]
        if len(stages) > 1 and keeps:
            raise ValueError(
                f"{name} is called in the stages {', '.join(map(str, stages))}, and keeps {keeps[0]}, of which each "
                "stage would change a copy of its own. What works: a cut that leaves its calls in one stage, a block "
                "of its own for each call, model.eval() if it is not to change, or Plan.serial(). (Shared weights may "
                "be anywhere.)"
            )


def _explain(model: nn.Module, error: CannotCut) -> str:
    where = f"{error.scope} ({type(model.get_submodule(error.scope)).__name__})"
    if error.scope == "":
        where = f"The model ({type(model).__name__})"
    return (
        f"{where} cannot be cut: between its blocks, {one_line(error).partition(': ')[2]}. What happens between blocks "
        "is done on every rank, on tensors that only one of them has. What works: put it into a module of its own, "
        "which one rank calls as a whole; or a plan that does not cut the model: Plan.serial(), Plan.ddp(2), "
        "Plan.zero(3, 2)."
    )
