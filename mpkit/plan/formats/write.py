"""A Plan written as a framework's configuration."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

from mpkit.common.tracebacks import level_of_user
from mpkit.plan.config import Config
from mpkit.plan.formats.frameworks import format_of
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.table import Format
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import has_pairs


def write(plan: Plan, name: str, **context: Any) -> Config:
    """Return a plan as a configuration, for `Plan.to`.

    Raises:
        ValueError: there is no such format, or the framework would refuse the plan.
    """
    chosen = format_of(name)
    asked = ExportRequest.from_plan(plan, name, context)
    chosen.check(asked)
    values = chosen.values_of(asked)
    cannot, silent = _cannot_say(plan, chosen, values), _no_effect(plan)
    effects = [
        f"{field}={getattr(plan, field)!r}: {reason}"
        for field, reason in cannot.items()
        if field not in silent
    ]
    header = [f"{chosen.title}, written by mpkit from {plan!r}".replace("\n", " ")]
    if effects:
        header += ["Not said here:", *(f"  {each}" for each in effects)]
        said = "; ".join(effects)
        warnings.warn(f"{chosen.title} cannot say all of {plan!r}. {said}", stacklevel=level_of_user())
    comments = {name: chosen.keys[name].comment for name in values}
    page = Page(asked, values, comments, header)
    config = Config(chosen.syntax.dump(page))
    config.kind, config.annotated = name, chosen.syntax.annotate(page)
    config.comments, config.cannot_say = comments, cannot
    return config


def unsaid(plan: Plan, name: str) -> str:
    """Return why a framework's file cannot say all of a plan; "" if it can.

    >>> unsaid(Plan(dp=8, zero=3), "fsdp"), unsaid(Plan(dp=8, zero=1), "fsdp")[:34]
    ('', 'fully_shard shards gradients at le')
    """
    chosen = format_of(name)
    try:
        asked = ExportRequest.from_plan(plan, name, {})
        chosen.check(asked)
        cannot = _cannot_say(plan, chosen, chosen.values_of(asked))
    except ValueError as error:
        return str(error).removeprefix(f"{plan!r}: ")
    return "; ".join(reason for field, reason in cannot.items() if field not in _no_effect(plan))


def _cannot_say(plan: Plan, chosen: Format, values: dict[str, Any]) -> dict[str, str]:
    """Return the fields that come back with another value, each with the reason."""
    back = Plan(**chosen.fields_of(values, []))
    silent = _no_effect(plan)
    return {
        field.name: silent.get(field.name) or chosen.why_not(field.name)
        for field in fields(plan)
        if getattr(plan, field.name) != getattr(back, field.name)
    }


def _no_effect(plan: Plan) -> dict[str, str]:
    """Return the fields that change nothing in this plan, with the reason."""
    found: dict[str, str] = {}
    if plan.stages == 1 and not has_pairs(plan.schedule):
        found |= dict.fromkeys(("schedule", "virtual_stages", "cut"), "no effect: the model is one stage")
    if plan.dp * plan.cp == 1:
        alone = "no effect: there is one replica"
        found |= dict.fromkeys(("bucket_mb", "batchnorm", "data_parallel"), alone)
        found |= {"zero": alone} if plan.offload == "none" else {}
    if plan.cp == 1:
        found |= dict.fromkeys(("cp_order", "cp_method"), "no effect: sequences are whole")
    if plan.tp == 1:
        found["tensor"] = "no effect: layers are whole"
    if plan.zero != 3:
        found["prefetch"] = "no effect: only ZeRO-3 gathers parameters"
    return found
