"""Known models: architectures by name, from a config of transformers, from a model, or from numbers.

The sizes are those of the papers and of the published configs; `known_models.csv` lists them.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json, read_text
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.configs import WIDTHS, NoArchitecture, read_config

__all__ = ["NoArchitecture", "architecture_of", "known_models"]


ENDING = r"-(instruct|chat|base|hf|uncased|cased|it|v\d+(\.\d+)?)$"
"""What ids on the Hub add to the name of an architecture."""
SAME = 0.05
"""How far a model's number of parameters may be from what its config describes: for heads, poolers and biases."""


@cache
def known_models() -> Mapping[str, Architecture]:
    """Return the architectures that have a name.

    >>> round(known_models()["llama3-70b"].parameters / 1e9, 1)
    70.6
    """
    flags = {"gated", "causal", "tied", "bias", "qk_norm"}
    found = {}
    with files("mpkit.prediction.cost_model").joinpath("known_models.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes: dict[str, Any] = {
                key: bool(int(value or 0)) if key in flags else int(value or 0)
                for key, value in row.items()
                if key != "name"
            }
            found[row["name"]] = Architecture(**sizes, name=row["name"])
    return found


def architecture_of(model: object, *, trainable: float = 1.0) -> Architecture:
    """Return the architecture of whatever describes one.

    Args:
        model: an `Architecture`; the name of a known one; a mapping of its numbers or of a config.json; the path of a
            config.json; a config of transformers; or a model that has one, such as mpkit's GPT. A model's parameters
            are counted, and compared with what its config describes.
        trainable: the share of the parameters that is trained, as the caller has it.

    Raises:
        ValueError: nothing of that name is known, the numbers do not describe a transformer, or a model has another
            number of parameters than its config describes, or frozen ones of which `trainable` does not know.

    >>> architecture_of({"layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 50257}).ffn
    4096
    """
    if isinstance(model, Architecture):
        return model
    if isinstance(model, Mapping):
        return _of_mapping(model)
    if isinstance(model, str | Path) and str(model).endswith(".json"):
        try:
            sizes = read_json(read_text(Path(model)))
            if not isinstance(sizes, dict):
                raise ValueError("names and values are wanted")
            return _of_mapping(sizes)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(model)!r} cannot be read as the config.json of a model: {error}"
            ) from None
    if isinstance(model, str):
        return _of_name(model)
    config = getattr(model, "config", model)
    sizes = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", None)
    if not sizes and hasattr(config, "__dataclass_fields__"):
        sizes = {name: getattr(config, name) for name in config.__dataclass_fields__}
    if isinstance(sizes, Mapping) and ({*WIDTHS, "width"} & set(sizes)):
        counted = callable(getattr(model, "parameters", None))
        found = replace(_of_mapping(sizes, counted=counted), name=type(model).__name__)
        if counted:
            _compare_counts(model, found, trainable)
        return found
    raise NoArchitecture(
        f"model={type(model).__name__} has no config from which its layers, hidden size and heads follow. Give them: "
        "{'layers': 32, 'hidden': 4096, 'heads': 32, 'vocabulary': 32000}. Any other module: mk.profile(model, data, "
        "loss=..., optimizer=...).predict(plan) measures it here; mk.Timeline.of(mk.trace_fake(lambda: model, plan, "
        "batch=batch, loss=..., optimizer=..., hardware='8x-a100-nvlink')) has time and memory of its own code, which "
        "is played on tensors without content"
    )


def _of_name(model: str) -> Architecture:
    """Return the architecture of a known name, or of an id on the Hub whose config.json this machine has cached.

    >>> [_of_name(name).name for name in ("llama-3_8B", "meta-llama/Meta-Llama-3-8B", "openai-community/gpt2-xl")]
    ['llama3-8b', 'llama3-8b', 'gpt2-xl']
    """
    known = known_models()
    cached = _cached_config(model) if "/" in model else None
    if cached is not None:
        return replace(_of_mapping(cached), name=model)
    name = model.lower().split("/")[-1].replace("_", "-").replace("llama-", "llama").removeprefix("meta-")
    while name not in known and (shorter := re.sub(ENDING, "", name)) != name:
        name = shorter
    if name in known:
        return known[name]
    near = get_close_matches(name, known, 3, 0.5) or ["llama3-8b", "gpt2"]
    cache = f" (`hf download {model} config.json` puts it where mpkit looks)" if "/" in model else ""
    raise ValueError(
        f"model={model!r} is no known model. The nearest: {', '.join(map(repr, near))}. Or give the path of a "
        f"config.json{cache}, or numbers: {{'layers': 32, 'hidden': 4096, 'heads': 32, 'vocabulary': 32000}}"
    )


def _cached_config(name: str) -> dict[str, Any] | None:
    """Return the config.json of a model on the Hub, if it is in the Hub's cache on this machine."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    folder = (
        Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        / f"models--{name.replace('/', '--')}"
        / "snapshots"
    )
    found = max(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    sizes = None if found is None else read_json(read_text(found))
    return sizes if isinstance(sizes, dict) else None


def _of_mapping(sizes: Mapping[str, Any], *, counted: bool = False) -> Architecture:
    """Return the architecture of numbers by this kit's names, or by those of a config of transformers."""
    known = {field.name for field in fields(Architecture)}
    if {"layers", "hidden", "heads"} <= set(sizes):
        unknown = [key for key in sizes if key not in known]
        if unknown:
            near = get_close_matches(unknown[0], known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It has {', '.join(sorted(known))}."
            raise ValueError(f"an Architecture has no {unknown[0]!r}.{hint}")
        return Architecture(**sizes)
    if {"width", "heads", "layers", "vocab", "length"} <= set(sizes):  # mpkit.models.GPTConfig
        return Architecture(
            sizes["layers"], sizes["width"], sizes["heads"], vocabulary=sizes["vocab"], positions=sizes["length"],
            bias=True, experts=sizes.get("experts", 0), top_k=sizes.get("top_k", 0) if sizes.get("experts") else 0,
            shared_ffn=4 * sizes["width"] * sizes.get("shared_experts", 0), name="GPT",
        )  # fmt: skip
    return read_config(sizes, counted=counted)


def _compare_counts(model: Any, found: Architecture, trainable: float) -> None:
    """Raise if the model has other parameters than its config describes, or frozen ones that nothing accounts for."""
    name, psi = type(model).__name__, sum(p.numel() for p in model.parameters())
    if abs(found.parameters - psi) > SAME * psi:
        raise NoArchitecture(
            f"model={name} has {psi / 1e6:,.1f}M parameters, and what follows from its config "
            f"{found.parameters / 1e6:,.1f}M: layers that are not an attention and an MLP each, weights that are "
            "shared, or parts that the config leaves out. Time and memory of this one, from its own operators: "
            "mk.trace_fake(model, plan, ...), or from a measurement here: mk.profile(model, data)"
        )
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / psi
    if share < 1.0 and trainable == 1.0:
        raise ValueError(
            f"{1 - share:.1%} of the parameters of model={name} are frozen, and everything would be counted as if it "
            f"were trained. mk.estimate and mk.fits take the share that is trained: trainable={share:.3g}"
        )
