"""Rules: what the guides say, evaluated with this model's numbers, and what the search says of it.

Source: Hugging Face, "Efficient Training on Multiple GPUs" (perf_train_gpu_many), its decision list.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from mpkit.common.units import memory_share, memory_text, percent, seconds
from mpkit.devices.placement_notes import TP_INSIDE
from mpkit.prediction.advice.search import HEADROOM, FoundLayout
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import most_at_peak
from mpkit.prediction.cost_model.workload import Workload

FAST, FAST_BETWEEN = 50, 20
"""GB/s of a device's link from which on it is called fast: NVLink inside a node, 200 Gb/s between nodes."""
ALIKE = 1.25  # by how much times may differ that the guide calls alike


@dataclass(frozen=True)
class Rule:
    """A rule with its numbers."""

    says: str  # what the guide says, for this model
    agrees: bool  # whether the best plan follows it
    why: str  # the search's numbers

    def __str__(self) -> str:
        return f"{self.says} {'The search agrees' if self.agrees else 'The search disagrees'}: {self.why}"


def rules_of(asked: Workload, found: Sequence[FoundLayout]) -> list[Rule]:
    """Return the rules that apply; the layouts are ordered with the best first."""
    per_parameter = asked.stack.element + asked.stack.gradient + asked.stack.states
    states = per_parameter * asked.model.parameters
    if found:
        rules = [*_of_sizes(asked, found, per_parameter), *_of_one_node(asked, found)]
        return [*rules, *_of_several_nodes(asked, found, states), *_of_parts(found)]
    if not isfinite(asked.available):
        return []
    devices, needed = asked.hardware.devices, -(-states // asked.available)
    says = f"The states of {asked.model.parameters / 1e9:.3g} B parameters take {memory_text(states)} over all ranks."
    have = f"{devices} devices have {memory_text(devices * asked.available)}"
    return [Rule(says, True, f"{have}; the states need {needed:.0f} or more.")]


def _of_sizes(asked: Workload, found: Sequence[FoundLayout], per_parameter: float) -> Iterator[Rule]:
    """Yield whether data parallelism is enough, and if its states do not fit one device, whether one layer does."""
    model, room, best, memory = asked.model, asked.available, found[0].layout, found[0].memory
    if isfinite(room):
        devices = asked.hardware.devices
        plain = Layout(dp=devices, microbatches=max(1, asked.global_batch // devices))
        held = most_at_peak(asked.memory_model.ranks(plain), "none")
        says = f"A replica with its states needs {memory_text(held)} and a device has {memory_text(room)}: "
        divided = best.zero > 0 or best.pp > 1 or best.tp > 1 or best.offload != "none"
        rule = Rule(f"{says}divide states or model.", divided, f"the best plan holds {memory_text(memory)}.")
        if held <= room:
            ddp = _first(found, lambda of: of.pp == of.tp == of.cp == 1 and of.zero == 0) or found[0]
            took = f"DDP takes {seconds(ddp.seconds)} per step, the best plan {seconds(found[0].seconds)}."
            rule = Rule(f"{says}data parallelism is enough.", best.pp == best.tp == best.cp == 1, took)
        yield rule
    if per_parameter * model.parameters <= room:
        return
    held = per_parameter * max(model.layer_parameters(first) for first, _ in model.kinds())
    has = f"the best plan has tp={best.tp}, {{}}ZeRO-{best.zero}."
    if held <= room:
        share = memory_share(held, room)
        says = f"The largest layer with its states takes {share} of a device, so that a pipeline or ZeRO is enough"
        yield Rule(f"{says}, without tensor parallelism.", best.tp == 1, has.format(f"pp={best.pp}, "))
        return
    says = f"The largest layer with its states takes {memory_text(held)} and a device has {memory_text(room)}: divide"
    says = f"{says} the layer itself, by tensor parallelism or ZeRO."
    yield Rule(says, best.tp > 1 or best.zero > 0, has.format(""))


def _of_one_node(asked: Workload, found: Sequence[FoundLayout]) -> Iterator[Rule]:
    """Yield whether links inside the node decide as the guide says, if two ways of dividing fit."""
    speed = asked.hardware.link.bandwidth / 1e9
    ways = {
        "a pipeline": _first(found, lambda of: of.pp > 1 and of.tp == of.cp == 1 and of.zero < 2),
        "ZeRO": _first(found, lambda of: of.zero > 0 and of.pp == of.tp == of.cp == 1),
        "tensor parallelism": _first(found, lambda of: of.tp > 1 and of.pp == of.cp == 1 and of.zero == 0),
    }
    took = {name: way.seconds for name, way in ways.items() if way is not None}
    if asked.hardware.nodes > 1 or len(took) < 2:
        return
    says = f"Links of {speed:.3g} GB/s are slow: a pipeline is faster than tensor parallelism or ZeRO."
    agrees = min(took, key=took.__getitem__) == "a pipeline"
    if speed >= FAST:
        says = f"Links of {speed:.0f} GB/s are fast: a pipeline, ZeRO and tensor parallelism do about alike."
        agrees = max(took.values()) <= ALIKE * min(took.values())
    told = ", ".join(f"{seconds(each)} with {name} alone" for name, each in took.items())
    yield Rule(says, agrees, f"at best {told}.")


def _of_several_nodes(asked: Workload, found: Sequence[FoundLayout], states: float) -> Iterator[Rule]:
    """Yield what is better inside a node than across nodes, and what the links between nodes decide."""
    machine, per_node = asked.hardware, asked.hardware.per_node
    if machine.between is None or machine.nodes == 1:
        return
    told = "with tp={one.tp}, {longer} with tp={other.tp} across nodes."
    inside = _first(found, lambda of: of.tp <= per_node)
    yield from _of_two(TP_INSIDE, inside, _first(found, lambda of: of.tp > per_node), told)
    room = per_node * HEADROOM * asked.available
    if states <= room:
        says = f"The states take {memory_text(states)} and a node has {memory_text(room)}: shard them inside the node."
        inside = _first(found, lambda of: 0 < of.sharded * of.tp <= per_node)
        among = _first(found, lambda of: of.zero > 0 and not of.sharded and of.shards * of.tp > per_node)
        yield from _of_two(says, inside, among, "inside, {longer} among all nodes.")
    alone = _first(found, lambda of: of.zero > 0 and of.pp == of.tp == of.cp == 1)
    several = _first(found, lambda of: of.pp > 1)
    speed = machine.between.bandwidth / 1e9
    told = "with ZeRO alone, {longer} with a pipeline, of pp={other.pp}, tp={other.tp} and ZeRO-{other.zero}."
    says = f"Links of {speed:.0f} GB/s between nodes are fast: ZeRO alone is enough, and needs no new code."
    if speed >= FAST_BETWEEN:
        yield from _of_two(says, alone, several, told, ALIKE)
    elif alone and several:
        says = (
            f"Links of {speed:.3g} GB/s between nodes are slow: a pipeline between nodes, and ZeRO-1 at most."
        )
        agrees = several.seconds <= alone.seconds and several.layout.zero <= 1
        yield from (replace(rule, agrees=agrees) for rule in _of_two(says, alone, several, told))


def _of_parts(found: Sequence[FoundLayout]) -> Iterator[Rule]:
    """Yield whether ZeRO-1 is best for a pipeline, and what the best plan does that one device can do by itself."""
    says = "With a pipeline, ZeRO-2 and -3 communicate for every micro-batch, and the stages have divided gradients"
    less = _first(found, lambda of: of.pp > 1 and of.zero <= 1)
    more = _first(found, lambda of: of.pp > 1 and of.zero >= 2)
    told = "with ZeRO-{one.zero}, {longer} with ZeRO-{other.zero}."
    yield from _of_two(f"{says} and weights already: take ZeRO-1.", less, more, told)
    best = found[0]
    asked = {"recompute": best.layout.recompute, "offload": best.layout.offload}
    measures = [f"{name}={value!r}" for name, value in asked.items() if value != "none"]
    if measures:
        without = _first(found, lambda of: of.recompute == of.offload == "none")
        why = "no plan fits without."
        if without:
            longer = percent(without.seconds / best.seconds - 1)
            why = f"the best plan without takes {seconds(without.seconds)} per step, {longer} longer."
        yield Rule(f"Before more GPUs, try what one can do: {', '.join(measures)}.", True, why)


def _first(found: Sequence[FoundLayout], wanted: Callable[[Layout], bool]) -> FoundLayout | None:
    """Return the fastest layout that meets a condition."""
    return next((each for each in found if wanted(each.layout)), None)


def _of_two(
    says: str, one: FoundLayout | None, other: FoundLayout | None, told: str, alike: float = 1.0
) -> Iterator[Rule]:
    """Yield whether one layout is faster than another, or about as fast, if both fit."""
    if one and other:
        words = told.format(one=one.layout, other=other.layout, longer=seconds(other.seconds))
        why = f"at best {seconds(one.seconds)} per step {words}"
        yield Rule(says, one.seconds <= alike * other.seconds, why)
