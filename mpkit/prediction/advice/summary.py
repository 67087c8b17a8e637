"""Summary: an advice in words: the best plan, the simplest one near it, what each further part gains, the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import percent, seconds
from mpkit.prediction.advice.search import figures_of

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice

__all__ = ["summary_of"]

UNEVEN = {
    "megatron": "--pipeline-model-parallel-layout",
    "torchtitan": "module_fqns_per_model_part",
    "torchtitan-compile": "module_fqns_per_model_part",
}
"""How a stack is told the layers of each stage, by its name."""


def summary_of(advice: Advice) -> str:
    """Return the best plan with its reasons, a sentence per line."""
    asked, hardware = advice.priced.asked, advice.priced.hardware
    name = asked.model.name or "the model"
    what = f"{name} on {hardware.name}, {asked.global_batch} samples of {asked.sequence} tokens"
    counted = f"{advice.considered:,} plans considered, {len(advice.found):,} fit"
    if advice.best is None:
        lines = [f"{what}: no plan fits; {counted}."]
    else:
        best = advice.estimate(advice.best)
        low, high = best.band
        lines = [
            f"{what}: {advice.best!r}",
            f"  {seconds(best.step_time)} per step ({seconds(low)} to {seconds(high)}), "
            f"{best.tokens_per_second:,.0f} tokens/s, MFU {percent(best.mfu)}, "
            f"{best.share_words.removesuffix(',')}; {counted}",
        ]
        if advice.objective.by != "time":
            lines.append(f"  {advice.objective.words(advice.found[0], hardware.devices)}")
        lines += _families(advice)
        lines.append(_frameworks(advice))
        if uneven := _uneven(advice):
            lines.append(uneven)
        lines += [f"  {what}: {words}." for what, words in best.assumptions.items()]
        within = int((figures_of(advice.found)[0] <= high).sum())
        lines.append(f"  {within:,} plans are within the band: measure the best few before you choose.")
        lines += _memory_left(advice)
    lines += [f"- {rule}" for rule in advice.rules]
    return "\n".join(lines)


def _memory_left(advice: Advice) -> list[str]:
    """Say which plans fill the memory, or that only such plans fit."""
    free = percent(1 - advice.found[0].memory / advice.priced.whole)
    if advice.found[0].memory > advice.priced.room:
        return [f"  It leaves {free} of the memory free, and no plan leaves more than 8 %: measure it first."]
    if not advice.tight or advice.tight[0].seconds >= advice.found[0].seconds:
        return []
    first = advice.tight[0]
    return [
        f"  {len(advice.tight):,} more leave less than 8 % of the memory free; the fastest of them takes "
        f"{seconds(first.seconds)}: {advice.priced.plan_of(first.layout)!r}"
    ]


def _families(advice: Advice) -> list[str]:
    """Say what each further part of the best plan gains: the best plan of each family, the simplest first."""
    rows = [(seconds(each.seconds), percent(each.longer), each) for each in advice.families]
    lines = ["  The best plan of each family, the simplest first:"]
    for took, longer, family in rows:
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        more = f"{longer} longer" if family.longer > 0 else "the best"
        lines.append(f"    {took:>9}  {more:>14}  {family.words}{simplest}\n{' ' * 29}{family.plan!r}")
    return lines


def _uneven(advice: Advice) -> str:
    """Say which switch of the framework cuts stages of unlike numbers of layers; "" if they are alike."""
    best, layers = advice.found[0].layout, advice.priced.asked.model.layers
    stages = best.pp * best.virtual_stages
    if best.pp == 1 or layers % stages == 0:
        return ""
    switch = UNEVEN.get(advice.priced.stack.name, "the model's cut")
    return f"  {layers} layers are not a multiple of {stages} stages: {switch} says which stage has how many."


def _frameworks(advice: Advice) -> str:
    """Say which frameworks can run the best plan, or why not."""
    able = [name for name, reason in advice.runs_in.items() if not reason]
    if able:
        return f"  Files for it: {', '.join(f'best.to({name!r})' for name in able)}."
    name, reason = min(advice.runs_in.items(), key=lambda item: len(item[1]))
    return f"  mpkit runs it; no other framework's file says all of it ({name}: {reason})."
