"""Summary: an advice in words, and what changed since the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import memory_share, memory_text, percent, seconds
from mpkit.prediction.advice.search import figures_of

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice

__all__ = ["change_since", "summary_of"]


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
            f"{memory_share(advice.found[0].memory, hardware.device.memory)}; {counted}",
        ]
        if advice.objective.by != "time":
            lines.append(f"  {advice.objective.words(advice.found[0], hardware.devices)}")
        lines += [f"  {what}: {words}." for what, words in best.assumptions.items()]
        within = int((figures_of(advice.found)[0] <= high).sum())
        lines.append(f"  {within:,} plans are within the band: measure the best few before you choose.")
        lines += _memory_left(advice)
        lines += _simpler(advice)
        lines.append(_frameworks(advice))
    lines += [f"- {rule}" for rule in advice.rules]
    out = [miss for miss in advice.near_misses if miss.excess > 0][:2]
    others = [miss for miss in advice.near_misses if miss.excess <= 0][:2]
    lines += [f"- Near miss, {miss}." for miss in (*out, *others)]
    if advice.before is not None:
        lines.append(f"- {advice.change}")
    return "\n".join(lines)


def _memory_left(advice: Advice) -> list[str]:
    """Say which plans fill the memory, or that only such plans fit."""
    free = percent(1 - advice.found[0].memory / advice.priced.hardware.device.memory)
    if advice.found[0].memory > advice.priced.room:
        return [f"  It leaves {free} of the memory free, and no plan leaves more than 8 %: measure it first."]
    if not advice.tight or advice.tight[0].seconds >= advice.found[0].seconds:
        return []
    first = advice.tight[0]
    return [
        f"  {len(advice.tight):,} more leave less than 8 % of the memory free; the fastest of them takes "
        f"{seconds(first.seconds)}: {advice.priced.plan_of(first.layout)!r}"
    ]


def _simpler(advice: Advice) -> list[str]:
    """Say what each further part of the best plan gains."""
    return [
        f"  - {family}{', the simplest within 5 %' if family.plan == advice.simplest else ''}"
        for family in advice.families if family.longer > 0
    ]  # fmt: skip


def _frameworks(advice: Advice) -> str:
    """Say which frameworks can run the best plan, or why not."""
    able = [name for name, reason in advice.runs_in.items() if not reason]
    if able:
        return f"  Files for it: {', '.join(f'best.to({name!r})' for name in able)}."
    name, reason = min(advice.runs_in.items(), key=lambda item: len(item[1]))
    return f"  mpkit runs it; no other framework's file says all of it ({name}: {reason})."


def change_since(advice: Advice) -> str:
    """Return what changed since the advice before, and what moving weights and states costs; "" for the first."""
    if advice.before is None:
        return ""
    if not advice.found or not advice.before.found:
        return (
            f"Before, on {advice.before.priced.hardware.name}: {advice.before.best!r}; now: {advice.best!r}."
        )
    old, new = advice.before.found[0], advice.found[0]
    was = f"On {advice.before.priced.hardware.name} it was {advice.before.best!r} with {seconds(old.seconds)} per step"
    moved = advice.moved
    if not any(moved):
        return f"{was}; every rank holds what it needs to go on."
    return (
        f"{was}, now {seconds(new.seconds)}; to go on, ranks fetch {memory_text(sum(moved))} of weights and "
        f"states, {memory_text(max(moved))} at most each."
    )
