"""A framework's configuration read as a Plan; the format is guessed from its keys."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpkit.common.tracebacks import level_of_user
from mpkit.plan.config import Config
from mpkit.plan.formats.keys import Format
from mpkit.plan.formats.python_code import keep_recipe
from mpkit.plan.formats.syntax import JSON, YAML, Syntax, flat, is_json
from mpkit.plan.formats.table import FORMATS, format_of
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Plan

__all__ = ["read"]

SHOWN = 12  # keys in a warning, besides all that look as if they divide work
DEGREE = re.compile(
    r"(?:encoder_|megatron_lm_)?(?:(?:expert_)?(?:tensor|pipe|pipeline|model|context|sequence|expert|data|ulysses)_"
    r"(?:model_|sequence_)?parallel_(?:shard_|replicate_)?(?:size|degree)"
    r"|(?:tp|pp|cp|ep|etp|sp|dp|fsdp|ulysses|ring)_(?:shard_|replicate_)?(?:size|degree))"
)
"""A key that is a degree of parallelism, whatever framework has it."""
ANOTHER_ENGINE = re.compile(r"rollout|vllm|sglang|inference|generat|eval|infer")
"""What the names of degrees begin with that are of an engine beside training."""
DIVIDES = re.compile(
    r"parallel|shard|zero|offload|recompute|checkpoint|fp[48]|[bf][pf]?16|precision|batch|accum|overlap|bucket|expert"
    r"|moe|fsdp|ddp|deepspeed|ds.config|gpus|nodes|processes|machines|world|pipeline|stage|device"
)
"""Keys that a warning names first, and all of them, since they may say how work is divided."""
LONGEST = 2**20  # bytes of a file
MOST_RANKS = 2**20
ENDINGS = {
    ".json": {"JSON"}, ".yaml": {"YAML"}, ".yml": {"YAML"}, ".py": {"Python"}, ".sh": {"a command line"},
    ".toml": {"Python"},
}  # fmt: skip
"""What files with an ending are written in: a YAML with a mistake is not read as something else."""


def read(
    source: str | os.PathLike[str] | Mapping[str, Any], format: str | None = None, ranks: int | None = None,
    recipe: str | None = None,
) -> Plan:  # fmt: skip
    """Return the plan in a file, a text of several lines, or a mapping, for `Plan.read`.

    Raises:
        ValueError: it is of no format that is known, or could be of several; or a value cannot be.
    """
    if isinstance(source, Config):
        format = format or source.kind
    if ranks is not None and (whole(ranks) or 0) < 1:
        raise ValueError(
            f"Plan.read(..., ranks={ranks!r}): ranks are a whole number, 1 or more: Plan.read(..., ranks=8)"
        )
    what = "The text" if isinstance(source, Mapping) or _is_text(source) else str(source)
    if recipe is not None:
        try:
            source = keep_recipe(_text(source), str(recipe)) + "\n"
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    found, faults = _load_formats(source, what)
    chosen = format_of(format) if format is not None else _guess(what, found, faults)
    if chosen.name not in found:
        why = faults.get(chosen.syntax.name, f"it is not {chosen.syntax.name}")
        raise ValueError(f"{what} cannot be read as {chosen.name}: {why}")
    values = found[chosen.name]
    if values and not values.keys() - {*_unknown(chosen, values)}:
        raise ValueError(f"{what} has no key of {chosen.title}, such as {chosen.keys[0].name}")
    notes: list[str] = []
    try:
        fields = chosen.fields_of(values, notes, ranks)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    try:
        plan = Plan(**fields)
    except ValueError as error:
        raise ValueError(f"{what}, read as {chosen.name}, says a plan that cannot work. {error}") from None
    if ranks is not None and plan.ranks != ranks:
        raise ValueError(
            f"{what}, read as {chosen.name}, is of {plan.ranks} ranks, and ranks={ranks} was given: "
            f"Plan.read(..., ranks={plan.ranks})"
        )
    if plan.ranks > MOST_RANKS:
        raise ValueError(
            f"{what}, read as {chosen.name}, is of {plan.ranks:,} ranks: {MOST_RANKS:,} are the most"
        )
    if unknown := _unknown(chosen, values):
        _refuse_degrees(what, chosen, {name: values[name] for name in unknown})
        notes.append(f"not read, since a Plan says nothing of it: {_join_names(unknown)}")
    if notes:
        warnings.warn(f"{what}, read as {chosen.name}: {'; '.join(notes)}", stacklevel=level_of_user())
    return plan


def _is_text(source: Any) -> bool:
    return isinstance(source, Config) or (
        isinstance(source, str)
        and ("\n" in source or " --" in source or source.lstrip("\ufeff \t")[:1] == "{")
    )


def _text(source: Any) -> str:
    """Return the text of a source, without the byte order mark with which editors on Windows begin a file."""
    if _is_text(source):
        if len(source) > LONGEST:
            raise ValueError(
                f"The text has {len(source):,} characters, and a configuration has at most {LONGEST:,}"
            )
        return str(source).removeprefix("\ufeff")
    try:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
    except (FileNotFoundError, TypeError):
        raise ValueError(
            f"Plan.read({str(source)!r:.200}): there is no such file. It takes the path of a configuration, such as "
            "Plan.read('ds_config.json'), or its text"
        ) from None
    except OSError as error:
        raise ValueError(f"{str(source)[:200]} cannot be read ({error.strerror})") from None
    if len(data) > LONGEST:
        raise ValueError(f"{path} has more than {LONGEST:,} bytes, which no configuration has")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8 ({error}), and a configuration is: {', '.join(FORMATS)}"
        ) from None


def _load_formats(source: Any, what: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the values by format, of the formats that can be written like this; and why others cannot, by syntax."""
    if isinstance(source, Mapping):
        try:
            return dict.fromkeys(FORMATS, flat(source)), {}
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    text = _text(source)
    syntaxes = dict.fromkeys(each.syntax for each in map(format_of, FORMATS))
    names = {syntax.name for syntax in syntaxes}
    if is_json(text):
        names = {"JSON"}
    elif not _is_text(source):
        names = ENDINGS.get(Path(source).suffix.lower(), names)
    values: dict[Syntax, dict[str, Any]] = {}
    faults: dict[str, str] = {}
    for syntax in syntaxes:
        if syntax.name in names:
            try:
                values[syntax] = syntax.load(text)
            except ValueError as error:
                faults[syntax.name] = str(error)
    if is_json(text) and JSON in values:
        values[YAML] = values[JSON]  # all JSON is YAML
    return {
        each.name: values[each.syntax] for each in map(format_of, FORMATS) if each.syntax in values
    }, faults


def _unknown(chosen: Format, values: Mapping[str, Any]) -> list[str]:
    known = {key.name for key in chosen.keys}
    return [name for name, value in values.items() if name not in known and value != {}]


def _refuse_degrees(what: str, chosen: Format, unknown: Mapping[str, Any]) -> None:
    """Refuse a degree of parallelism that this format does not have: without it the plan would be another one."""
    for name, value in unknown.items():
        key = name.lower().lstrip("-").replace("-", "_")
        is_degree = DEGREE.fullmatch(key.rpartition(".")[2]) and not ANOTHER_ENGINE.search(key)
        if is_degree and re.fullmatch(r"[0-9]{1,9}", str(value)) and int(value) > 1:
            raise ValueError(
                f"{what}, read as {chosen.name}: {name} = {value} divides the work too, and is not a key of "
                f"{chosen.title}, so the plan would be another one. mpkit reads the rest of it without {name}"
            )


def _join_names(names: Sequence[str]) -> str:
    """Return names for a warning: first all that may say how work is divided, then some of the others."""
    plain = [name if len(name) <= 60 else f"{name[:60]}..." for name in names]
    first = [name for name in plain if DIVIDES.search(name.lower())]
    rest = [name for name in plain if name not in first]
    shown = first + rest[: max(0, SHOWN - len(first))]
    return ", ".join(shown) + (f" and {len(plain) - len(shown)} more" if len(plain) > len(shown) else "")


def _guess(what: str, found: Mapping[str, Mapping[str, Any]], faults: Mapping[str, str]) -> Format:
    """Return the format that knows the most keys, of those with a key that is not in other programs' files too."""
    known = {name: values.keys() - {*_unknown(format_of(name), values)} for name, values in found.items()}
    own = {name: names - format_of(name).common for name, names in known.items()}
    counts = {name: len(known[name]) for name, names in own.items() if names}
    most = max(counts.values(), default=0)
    best = [name for name, count in counts.items() if count == most]
    keys = {name: {key.name for key in format_of(name).keys} for name in best}
    # Megatron's arguments come after torchrun's: those of torchrun alone are torchrun's.
    best = [name for name in best if not any(keys[other] < keys[name] for other in best)]
    best = [
        name
        for name in best
        if not any(own[name] <= known[other] and own[other] - known[name] for other in best)
    ]
    if not most:
        why = "If it is one of them, say which: Plan.read(path, format='deepspeed')"
        if near := next((name for name, keys in known.items() if keys), ""):
            why = (
                f"Other programs have {', '.join(sorted(known[near]))} too. {why.replace('deepspeed', near)}"
            )
        if not found:
            why = "It cannot be read: " + "; ".join(
                {fault: f"as {name}: {fault}" for name, fault in faults.items()}.values()
            )
        raise ValueError(f"{what} has no key of a format that is known ({', '.join(FORMATS)}). {why}")
    if len(best) > 1:
        raise ValueError(
            f"{what} could be of {' or '.join(best)}: all its keys that are known are in both. Say which: "
            f"Plan.read(path, format={best[0]!r})"
        )
    return format_of(best[0])
