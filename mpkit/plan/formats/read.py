"""A framework's configuration read as a Plan; the format is guessed from its keys."""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_text
from mpkit.common.tracebacks import level_of_user
from mpkit.plan.formats.frameworks import FORMATS, format_of
from mpkit.plan.formats.syntax import JSON, YAML, flat, is_json
from mpkit.plan.formats.table import Format
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Config, Plan

SHOWN = 12  # keys in a warning, or all that match DIVIDES if these are more
DEGREE = re.compile(
    r"(?:encoder_|megatron_lm_)?(?:(?:expert_)?(?:tensor|pipe|pipeline|model|context|sequence|expert|data|ulysses)_"
    r"(?:model_|sequence_)?parallel_(?:shard_|replicate_)?(?:size|degree)"
    r"|(?:tp|pp|cp|ep|etp|sp|dp|fsdp|ulysses|ring)_(?:shard_|replicate_)?(?:size|degree))"
)
"""A key that is a degree of parallelism, in any framework, but for those of an engine other than training."""
ANOTHER_ENGINE = re.compile(r"rollout|vllm|sglang|inference|generat|eval|infer")
DIVIDES = re.compile(
    r"parallel|shard|zero|offload|recompute|checkpoint|fp[48]|[bf][pf]?16|precision|batch|accum|overlap|bucket|expert"
    r"|moe|fsdp|ddp|deepspeed|ds.config|gpus|nodes|processes|machines|world|pipeline|stage|device"
)
"""Keys that may say how work is divided: a warning names all of them, first."""
LONGEST = 2**18  # bytes of a file
MOST_RANKS = 2**20
ENDINGS = {
    ".json": {"JSON"}, ".yaml": {"YAML"}, ".yml": {"YAML"}, ".py": {"Python"}, ".sh": {"a command line"},
}  # fmt: skip
"""The syntaxes that an ending allows: mpkit does not read a YAML file with a mistake as something else."""


def read(
    source: str | os.PathLike[str] | Mapping[str, Any], format: str | None = None, ranks: int | None = None
) -> Plan:
    """Return the plan in a file, a text of several lines, or a mapping, for `Plan.read`."""
    if isinstance(source, Config):
        format = format or source.kind
    if ranks is not None and (whole(ranks) or 0) < 1:
        raise ValueError(
            f"Plan.read(..., ranks={ranks!r}): ranks are a whole number, 1 or more: Plan.read(..., ranks=8)"
        )
    what = "The text" if isinstance(source, Mapping) or _is_text(source) else str(source)
    found, faults = _load_formats(source)
    chosen = format_of(format) if format is not None else _guess(what, found, faults)
    if chosen.name not in found:
        why = faults.get(chosen.syntax.name, f"it is not {chosen.syntax.name}")
        raise ValueError(f"{what} cannot be read as {chosen.name}: {why}")
    values = found[chosen.name]
    unknown = _unknown(chosen, values)
    if values and len(unknown) == len(values):
        raise ValueError(f"{what} has no key of {chosen.title}, such as {next(iter(chosen.keys))}")
    notes: list[str] = []
    try:
        plan = Plan(**chosen.fields_of(values, notes, ranks))
        _refuse_degrees(chosen, {name: values[name] for name in unknown})
    except ValueError as error:
        raise ValueError(f"{what}, read as {chosen.name}: {error}") from None
    if plan.ranks != (ranks or min(plan.ranks, MOST_RANKS)):
        wanted = f"ranks={ranks} was given" if ranks else f"{MOST_RANKS:,} are the most"
        raise ValueError(
            f"{what}, read as {chosen.name}, is of {plan.ranks:,} ranks, and {wanted}: "
            f"Plan.read(..., ranks={plan.ranks})"
        )
    if unknown:
        notes.append(f"not read, since a Plan says nothing of it: {_join_names(unknown)}")
    if notes:
        warnings.warn(f"{what}, read as {chosen.name}: {'; '.join(notes)}", stacklevel=level_of_user())
    return plan


def _is_text(source: Any) -> bool:
    if not isinstance(source, str) or isinstance(source, Config):
        return isinstance(source, Config)
    return "\n" in source or " --" in source or source.lstrip("\ufeff \t")[:1] == "{"


def _text(source: Any) -> str:
    """Return the text of a source, without the byte order mark of editors on Windows."""
    if _is_text(source):
        if len(source) > LONGEST:
            raise ValueError(
                f"The text has {len(source):,} characters, and a configuration at most {LONGEST:,}"
            )
        return str(source).removeprefix("\ufeff")
    try:
        return read_text(Path(source), LONGEST)
    except (FileNotFoundError, TypeError):
        raise ValueError(
            f"Plan.read({str(source)!r:.200}): there is no such file. It takes the path of a configuration, such as "
            "Plan.read('ds_config.json'), or its text"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(source)[:200]} cannot be read: {error!s:.200}") from None


def _load_formats(source: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the values, by format whose syntax the source has, and what is wrong with it, by other syntax."""
    if isinstance(source, Mapping):
        return dict.fromkeys(FORMATS, flat(source)), {}
    text = _text(source)
    every = {each.syntax.name for each in FORMATS.values()}
    names = every if _is_text(source) else ENDINGS.get(Path(source).suffix.lower(), every)
    names = {"JSON"} if is_json(text) else names
    values: dict[str, dict[str, Any]] = {}
    faults: dict[str, str] = {}
    for each in FORMATS.values():
        if each.syntax.name in names:
            try:
                values[each.name] = each.syntax.load(text)
            except ValueError as error:
                faults[each.syntax.name] = str(error)
        elif each.syntax is YAML and is_json(text) and JSON.name not in faults:
            values[each.name] = JSON.load(text)  # all JSON is YAML
    return values, faults


def _unknown(chosen: Format, values: Mapping[str, Any]) -> list[str]:
    return [name for name, value in values.items() if name not in chosen.keys and value != {}]


def _refuse_degrees(chosen: Format, unknown: Mapping[str, Any]) -> None:
    """Reject a degree of parallelism that this format does not have: without it the plan would be another one."""
    for name, value in unknown.items():
        key = name.lower().lstrip("-").replace("-", "_")
        is_degree = DEGREE.fullmatch(key.rpartition(".")[2]) and not ANOTHER_ENGINE.search(key)
        if is_degree and re.fullmatch(r"[0-9]{1,9}", str(value)) and int(value) > 1:
            raise ValueError(
                f"{name} = {value} divides the work too, and is not a key of {chosen.title}, so the plan would be "
                f"another one. mpkit reads the rest of it without {name}"
            )


def _join_names(names: Sequence[str]) -> str:
    """Return names for a warning: first all that may say how work is divided, then some of the others."""
    plain = [name if len(name) <= 60 else f"{name[:60]}..." for name in names]
    divide = [name for name in plain if DIVIDES.search(name.lower())]
    ordered, shown = [*divide, *(name for name in plain if name not in divide)], max(SHOWN, len(divide))
    return ", ".join(ordered[:shown]) + (f" and {len(plain) - shown} more" if len(plain) > shown else "")


def _guess(what: str, found: Mapping[str, Mapping[str, Any]], faults: Mapping[str, str]) -> Format:
    """Return the format that knows the most keys, among those with a key that no other program has."""
    known = {name: values.keys() - {*_unknown(FORMATS[name], values)} for name, values in found.items()}
    own = {name: names - FORMATS[name].common for name, names in known.items()}
    most = max((len(known[name]) for name, names in own.items() if names), default=0)
    best = [name for name, names in own.items() if names and len(known[name]) == most]
    if len(best) == 1:
        return FORMATS[best[0]]
    if best:
        raise ValueError(
            f"{what} could be of {' or '.join(best)}: all its keys that are known are in both. Say which: "
            f"Plan.read(path, format={best[0]!r})"
        )
    near = next((name for name, keys in known.items() if keys), "")
    why = f"If it is one of them, say which: Plan.read(path, format={near or 'deepspeed'!r})"
    if near:
        why = f"Other programs have {', '.join(sorted(known[near]))} too. {why}"
    if not found:
        why = "It cannot be read: " + "; ".join(f"as {name}: {fault}" for name, fault in faults.items())
    raise ValueError(f"{what} has no key of a format that is known ({', '.join(FORMATS)}). {why}")
