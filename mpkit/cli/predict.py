"""The commands `mpkit estimate`, `mpkit fits` and `mpkit advise`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from mpkit.plan.kinds import ORDERS

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.architecture import Architecture


SEQUENCE = 4096
NODE = "node"
"""The replicas of a node, until the words have said how many these are."""
WORDS: Mapping[str, dict[str, Any]] = {
    "": {},
    "ddp": {"zero": 0},
    "fsdp": {"zero": 3},
    "hsdp": {"zero": 3, "dp_shard": NODE},
    "sp": {"sequence_parallel": True},
    **{word: {"recompute": word} for word in ("selective", "full")},
    **{word: {"precision": word} for word in ("bf16", "fp16")},
    **{word: {"cp_order": word} for word in ORDERS},
}
"""Words without a number, and the fields of a Plan that they say."""


def advise_plan(options: argparse.Namespace) -> None:
    """Run `mpkit advise`."""
    from mpkit.prediction.advice.advice import advise

    model, sequence = _model_of(options)
    found = advise(
        model,
        options.hardware,
        global_batch=options.global_batch,
        sequence=sequence,
        stack=options.stack,
        by=options.by,
        price=options.price,
        expert_load=options.expert_load,
    )
    if options.to is None:
        print(found)
    elif found.best is None:
        raise SystemExit(f"mpkit: {found}")
    else:
        print(found.best.to(options.to, global_batch=options.global_batch))


def predict(options: argparse.Namespace) -> None:
    """Run `mpkit estimate` or `mpkit fits`; the latter leaves with 1 if the plan does not fit."""
    from mpkit.devices.catalogue import hardware
    from mpkit.prediction.cost_model.estimate import estimate

    machine = hardware(options.hardware)
    plan = plan_of(options.plan, machine.devices, machine.per_node)
    model, sequence = _model_of(options)
    asked = {
        "global_batch": plan.dp * plan.microbatches if options.global_batch is None else options.global_batch,
        "sequence": sequence,
        "stack": options.stack,
        "expert_load": options.expert_load,
    }
    found = estimate(model, plan, machine, **asked)
    print(found)
    if options.command == "fits":
        raise SystemExit(0 if found else 1)


def _model_of(options: argparse.Namespace) -> tuple[Architecture, int]:
    """Return the model, and the tokens per sample.

    By default these are what the model has positions for, and no more than 4096.
    """
    from mpkit.prediction.cost_model.known_models import architecture_of

    model = architecture_of(options.model)
    most = min(SEQUENCE, model.positions or SEQUENCE)
    return model, most if options.sequence is None else options.sequence


def plan_of(words: str, devices: int, per_node: int = 8) -> Any:
    """Return the plan that words describe; replicas take the devices that other axes leave.

    Args:
        words: in any order, such as zero1+tp4; those of other frameworks too: fsdp is zero3, and hsdp shards within a
            node.
        devices: of the machine.
        per_node: of each of its nodes.

    Raises:
        ValueError: a word means nothing, two of them contradict each other, or the devices do not divide.

    >>> plan_of("zero1+tp4+pp2+m8", 16), plan_of("pp4+zb_h1", 4).schedule
    (Plan(pp=2, dp=2, tp=4, schedule='1f1b', microbatches=8, zero=1), 'zb_h1')
    >>> plan_of("tp2+hsdp", 16)
    Plan(dp=8, tp=2, zero=3, dp_shard=4)
    """
    from mpkit.plan.plan import Plan
    from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, ONE_F_ONE_B

    if words.lstrip().startswith("{"):
        return Plan.from_json(words)
    fields: dict[str, Any] = {}
    for word in re.split(r"[+,]", words.lower()):
        for name, value in _fields_of(word, words).items():
            if fields.setdefault(name, value) != value:
                raise ValueError(
                    f"--plan {words}: {name}={fields[name]!r} and {name}={value!r}: say one of them"
                )
    degrees = {name: fields.get(name, 1) for name in ("tp", "pp", "cp")}
    others = prod(max(1, degree) for degree in degrees.values())  # the Plan rejects a degree of 0
    if devices % others and "dp" not in fields:
        raise ValueError(f"--plan {words}: {others} ranks do not divide the {devices} devices of the machine")
    fields.setdefault("dp", devices // others)
    if fields.get("dp_shard") == NODE:
        fields["dp_shard"] = per_node // max(1, degrees["tp"] * degrees["cp"]) or 1
    if degrees["pp"] > 1:
        if fields.setdefault("schedule", ONE_F_ONE_B) == ONE_F_ONE_B and fields.get("virtual_stages", 1) > 1:
            fields["schedule"] = INTERLEAVED_1F1B
        fields.setdefault("microbatches", 4 * degrees["pp"])
    return Plan(**fields)


def _fields_of(word: str, words: str) -> dict[str, Any]:
    """Return the fields of a Plan that a word says.

    Raises:
        ValueError: it means nothing.
    """
    from mpkit.plan.schedule.catalogue import SCHEDULES

    if found := re.fullmatch(r"(zero|tp|pp|cp|dp|ep|m|v|shard)(\d+)", word):
        short = {"m": "microbatches", "v": "virtual_stages", "shard": "dp_shard"}
        return {short.get(found[1], found[1]): int(found[2])}
    if word in SCHEDULES:
        return {"schedule": word}
    if word not in WORDS:
        raise ValueError(
            f"--plan {words}: {word!r} means nothing here. Such as: ddp, zero3+bf16, pp4+zb_h1 or tp8+zero1+m32"
        )
    return WORDS[word]
