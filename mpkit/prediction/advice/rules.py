"""Rules: what the guides say, evaluated with this model's numbers, and what the search says of it.

    one device     "if the model fits one GPU, use DDP"
    layer          "if the largest layer does not fit one GPU, use tensor parallelism"
    links          "with NVLink pipelines, ZeRO and tensor parallelism are alike; without, pipelines are faster"
    nodes          "tensor parallelism inside the node; pipelines and replicas between nodes"
    one node       states that fit a node are sharded inside it, and nodes are replicas
    between        "with fast links between nodes ZeRO, or all of them; with slow ones a pipeline, and ZeRO-1"
    zero           "with a pipeline, ZeRO-1 rather than -2 or -3"
    single         "first what helps on one GPU: micro-batch, accumulation, recomputation, offload"

Source: Hugging Face, "Efficient Training on Multiple GPUs" (perf_train_gpu_many), its decision list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from mpkit.common.units import memory_share, memory_text, percent, seconds
from mpkit.devices.placement_notes import TP_INSIDE
from mpkit.prediction.advice.search import HEADROOM, FoundLayout
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.workload import Workload

__all__ = ["Rule", "rules_of"]

FAST, FAST_BETWEEN = 50e9, 20e9
"""Bytes per second of a device's link from which on it is called fast: NVLink inside a node, 200 Gb/s between nodes."""
ALIKE = 1.25
"""By how much times may differ that the guide calls alike."""


@dataclass(frozen=True)
class Rule:
    """A rule with its numbers.

    Attributes:
        says: what the guide says, for this model.
        agrees: whether the best plan follows it.
        why: the search's numbers.
    """

    says: str
    agrees: bool
    why: str

    def __str__(self) -> str:
        return f"{self.says} {'The search agrees' if self.agrees else 'The search disagrees'}: {self.why}"


def rules_of(asked: Workload, found: Sequence[FoundLayout]) -> list[Rule]:
    """Return the rules that apply."""
    if not found:
        return [_states(asked)] if isfinite(asked.available) else []
    rules = (
        _one_device(asked, found) if isfinite(asked.available) else None,
        _layer(asked, found),
        _links(asked, found),
        _nodes(asked, found),
        _one_node(asked, found),
        _links_between(asked, found),
        _zero(found),
        _single(asked, found),
    )
    return [rule for rule in rules if rule is not None]


def _states(asked: Workload) -> Rule:
    """Say what the states alone take where no plan fits."""
    model, device = asked.model, asked.hardware.device
    states = (asked.stack.element + asked.stack.gradient + asked.stack.states) * model.parameters
    needed = -(-states // device.memory)
    have = memory_text(asked.hardware.devices * device.memory)
    return Rule(
        f"The states of {model.parameters / 1e9:.3g} B parameters take {memory_text(states)} over all ranks.",
        True,
        f"{asked.hardware.devices} devices have {have}; the states need {needed:.0f} or more.",
    )


def _one_device(asked: Workload, found: Sequence[FoundLayout]) -> Rule:
    """Return whether a replica fits one device, so that data parallelism is enough."""
    n, batch = asked.hardware.devices, asked.global_batch
    best, room = found[0], asked.available
    plain = Layout(dp=n, microbatches=max(1, batch // n))
    held = float(asked.memory_model.of(plain).peak("none"))
    if held > room:
        return Rule(
            f"A replica with its states needs {memory_text(held)} and a device has {memory_text(room)}: divide states "
            "or model.",
            best.layout.zero > 0 or best.layout.pp > 1 or best.layout.tp > 1 or best.layout.offload != "none",
            f"the best plan holds {memory_text(best.memory)}.",
        )
    only = best.layout.pp == best.layout.tp == best.layout.cp == 1
    took = min((each.seconds for each in found if _is_plain(each.layout)), default=best.seconds)
    return Rule(
        f"A replica with its states needs {memory_text(held)} and a device has {memory_text(room)}: data parallelism "
        "is enough.",
        only,
        f"DDP takes {seconds(took)} per step, the best plan {seconds(best.seconds)}.",
    )


def _layer(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether one layer with its states fits a device; None where a whole replica does."""
    model, room, stack = asked.model, asked.available, asked.stack
    states = stack.element + stack.gradient + stack.states
    if states * model.parameters <= room:
        return None
    held = states * max(model.layer_parameters(first) for first, _ in model.kinds())
    best = found[0].layout
    if held <= room:
        return Rule(
            f"The largest layer with its states takes {memory_share(held, room)} of a device, so that a pipeline or "
            "ZeRO is enough, without tensor parallelism.",
            best.tp == 1,
            f"the best plan has tp={best.tp}, pp={best.pp}, ZeRO-{best.zero}.",
        )
    return Rule(
        f"The largest layer with its states takes {memory_text(held)} and a device has {memory_text(room)}: divide the "
        "layer itself, by tensor parallelism or ZeRO.",
        best.tp > 1 or best.zero > 0,
        f"the best plan has tp={best.tp}, ZeRO-{best.zero}.",
    )


def _is_plain(layout: Layout) -> bool:
    return layout.pp == layout.tp == layout.cp == 1 and layout.zero == 0


def _nodes(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether tensor parallelism stays inside the node; None on one node, or where nothing else fits."""
    per_node = asked.hardware.per_node
    inside = _first(found, lambda layout: layout.tp <= per_node)
    across = _first(found, lambda layout: layout.tp > per_node)
    if asked.hardware.nodes == 1 or inside is None or across is None:
        return None
    return Rule(
        TP_INSIDE,
        inside.seconds <= across.seconds,
        f"at best {seconds(inside.seconds)} per step with tp={inside.layout.tp}, "
        f"{seconds(across.seconds)} with tp={across.layout.tp} across nodes.",
    )


def _links(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether links inside the node decide as the guide says; None where there is nothing to compare."""
    speed = asked.hardware.link.bandwidth
    ways = {
        "a pipeline": _first(found, lambda of: of.pp > 1 and of.tp == of.cp == 1 and of.zero < 2),
        "ZeRO": _first(found, lambda of: of.zero > 0 and of.pp == of.tp == of.cp == 1),
        "tensor parallelism": _first(found, lambda of: of.tp > 1 and of.pp == of.cp == 1 and of.zero == 0),
    }
    took = {name: way.seconds for name, way in ways.items() if way is not None}
    if asked.hardware.nodes > 1 or len(took) < 2:
        return None
    words = ", ".join(f"{seconds(each)} with {name} alone" for name, each in took.items())
    if speed >= FAST:
        says = f"Links of {speed / 1e9:.0f} GB/s are fast: a pipeline, ZeRO and tensor parallelism do about alike."
        return Rule(says, max(took.values()) <= ALIKE * min(took.values()), f"at best {words}.")
    says = f"Links of {speed / 1e9:.3g} GB/s are slow: a pipeline is faster than tensor parallelism or ZeRO."
    return Rule(says, min(took, key=took.__getitem__) == "a pipeline", f"at best {words}.")


def _one_node(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether states that fit one node are better sharded inside it; None where they do not, or on one node."""
    machine, stack = asked.hardware, asked.stack
    states = (stack.element + stack.gradient + stack.states) * asked.model.parameters
    room = machine.per_node * HEADROOM * asked.available
    inside = _first(found, lambda of: 0 < of.sharded * of.tp <= machine.per_node)
    across = _first(found, lambda of: of.zero > 0 and not of.sharded and of.shards * of.tp > machine.per_node)
    if machine.nodes == 1 or states > room or inside is None or across is None:
        return None
    return Rule(
        f"The states take {memory_text(states)} and a node has {memory_text(room)}: shard them inside the node.",
        inside.seconds <= across.seconds,
        f"at best {seconds(inside.seconds)} per step inside, {seconds(across.seconds)} among all nodes.",
    )


def _links_between(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether links between nodes decide as the guide says; None on one node, or where one way fits only."""
    machine = asked.hardware
    alone = _first(found, lambda of: of.zero > 0 and of.pp == of.tp == of.cp == 1)
    several = _first(found, lambda of: of.pp > 1)
    if machine.between is None or machine.nodes == 1 or alone is None or several is None:
        return None
    speed = machine.between.bandwidth
    why = (
        f"at best {seconds(alone.seconds)} per step with ZeRO alone, {seconds(several.seconds)} with a pipeline, of "
        f"pp={several.layout.pp}, tp={several.layout.tp} and ZeRO-{several.layout.zero}."
    )
    if speed >= FAST_BETWEEN:
        says = f"Links of {speed / 1e9:.0f} GB/s between nodes are fast: ZeRO alone is enough, and needs no new code."
        return Rule(says, alone.seconds <= ALIKE * several.seconds, why)
    says = f"Links of {speed / 1e9:.3g} GB/s between nodes are slow: a pipeline between nodes, and ZeRO-1 at most."
    return Rule(says, several.seconds <= alone.seconds and several.layout.zero <= 1, why)


def _zero(found: Sequence[FoundLayout]) -> Rule | None:
    """Return whether a pipeline is better with ZeRO-1 than with ZeRO-2 or -3; None where there is no such pair."""
    low = _first(found, lambda layout: layout.pp > 1 and layout.zero <= 1)
    high = _first(found, lambda layout: layout.pp > 1 and layout.zero >= 2)
    if low is None or high is None:
        return None
    return Rule(
        "With a pipeline, ZeRO-2 and -3 communicate for every micro-batch, and the stages have divided gradients and "
        "weights already: take ZeRO-1.",
        low.seconds <= high.seconds,
        f"at best {seconds(low.seconds)} per step with ZeRO-{low.layout.zero}, {seconds(high.seconds)} with "
        f"ZeRO-{high.layout.zero}.",
    )


def _single(asked: Workload, found: Sequence[FoundLayout]) -> Rule | None:
    """Return what recomputation or offload buys, which one device can do by itself; None where the best has none."""
    best = found[0]
    if best.layout.recompute == "none" and best.layout.offload == "none":
        return None
    without = _first(found, lambda layout: layout.recompute == "none" and layout.offload == "none")
    measures = [f"recompute={best.layout.recompute!r}"] * (best.layout.recompute != "none")
    measures += [f"offload={best.layout.offload!r}"] * (best.layout.offload != "none")
    why = (
        "no plan fits without."
        if without is None
        else f"the best plan without takes {seconds(without.seconds)} per step, "
        f"{percent(without.seconds / best.seconds - 1)} longer."
    )
    return Rule(f"Before more GPUs, try what one can do: {', '.join(measures)}.", True, why)


def _first(found: Sequence[FoundLayout], wanted: Callable[[Layout], bool]) -> FoundLayout | None:
    """Return the fastest layout that is as wanted."""
    return next((each for each in found if wanted(each.layout)), None)
