"""Known models: architectures by name, from a config of transformers, from a model, or from numbers.

`known_models.csv` lists the sizes of the papers and of published configs. `configs.toml` lists the kinds of
configurations whose parameters were counted (tests compare each with the module of transformers); one of another kind
describes a model only if the module is there to be counted.
"""

import csv
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json, read_text
from mpkit.prediction.cost_model.architecture import Architecture

ENDING = r"-(instruct|chat|base|hf|uncased|cased|it|v\d+(\.\d+)?)$"  # what ids on the Hub add to a name
SAME = 0.05  # how far parameters may be from what a config describes: for heads, poolers and biases


@cache
def known_models() -> Mapping[str, Architecture]:
    """Return the architectures that have a name."""
    flags = {"gated", "causal", "tied", "bias", "qk_norm"}
    found = {}
    with files("mpkit.prediction.cost_model").joinpath("known_models.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = row.pop("name")
            sizes: dict[str, Any] = {key: int(value or 0) for key, value in row.items()}
            sizes |= {key: bool(sizes[key]) for key in flags}
            found[name] = Architecture(**sizes, name=name)
    return found


def architecture_of(model: object, *, trainable: float = 1.0) -> Architecture:
    """Return the architecture of anything that describes one, as `mk.estimate` takes it.

    A model's parameters are counted and compared with what its config describes; the caller knows that the share
    `trainable` of them is trained.
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
    if isinstance(sizes, Mapping) and ({*SIZES["hidden"], "width"} & set(sizes)):
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
    """Return the config.json of a model if the Hub's cache on this machine has it."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = os.environ.get("HF_HUB_CACHE", home / "hub")
    folder = Path(hub, f"models--{name.replace('/', '--')}", "snapshots")
    found = max(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    sizes = None if found is None else read_json(read_text(found))
    return sizes if isinstance(sizes, dict) else None


def _of_mapping(sizes: Mapping[str, Any], *, counted: bool = False) -> Architecture:
    """Return the architecture of numbers by mpkit's names, or by those of a config of transformers."""
    known = {field.name for field in fields(Architecture)}
    if {"layers", "hidden", "heads"} <= set(sizes):
        if unknown := [key for key in sizes if key not in known]:
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
    """Raise if the model's parameters differ from its config's, or if frozen ones are not accounted for."""
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


# ---- configurations of transformers

_CONFIGS = tomllib.loads(files("mpkit.prediction.cost_model").joinpath("configs.toml").read_text("utf-8"))
TRAITS = {kind: set(traits.split()) for traits, kinds in _CONFIGS["traits"].items() for kind in kinds.split()}
SIZES = {size: names.split() for size, names in _CONFIGS["sizes"].items()}


class NoArchitecture(ValueError):
    """A model has no config from which its sizes follow."""


def read_config(config: Mapping[str, Any], *, counted: bool = False) -> Architecture:
    """Read a configuration of transformers; if the parameters will be `counted`, its kind may lack in `TRAITS`."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), default)

    kind = str(config.get("model_type", ""))
    traits = TRAITS.get(kind, set())
    sizes: dict[str, Any] = {name: number(*spelt) for name, spelt in SIZES.items()}
    sizes["ffn"] = sizes["ffn"] or 4 * sizes["hidden"]
    _check(config, kind, sizes, counted)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        sizes["kv_heads"] = 1  # multi-query attention (Shazeer 2019), which has its own words
    if "positions" not in traits:
        sizes["positions"] = 0
    if sizes["kv_rank"]:
        sizes["head_dim"] = number("qk_nope_head_dim")
    else:
        sizes |= dict.fromkeys(("q_rank", "rope_dim", "v_dim"), 0)
    if sizes["experts"]:
        sizes["shared_ffn"] = sizes["shared_ffn"] or number("n_shared_experts") * sizes["expert_ffn"]
    else:
        sizes |= dict.fromkeys(("top_k", "expert_ffn", "shared_ffn", "dense"), 0)
    if kind == "t5":
        sizes["encoder"] = sizes["layers"]
        sizes["layers"] += number("num_decoder_layers", default=sizes["layers"])
    if kind == "vit":
        patch = number("patch_size", default=16)
        sizes["patch"] = number("num_channels", default=3) * patch**2
        sizes["positions"] = (number("image_size", default=224) // max(1, patch)) ** 2 + 1
        sizes["vocabulary"] = len(config.get("id2label") or {})
    activation = str(config.get("hidden_act", config.get("feed_forward_proj", "")))
    gated = "gated" in traits or "gated" in activation or (kind not in TRAITS and "silu" in activation)
    tied = bool(config.get("tie_word_embeddings", "tied" in traits))
    sizes |= {name: name in traits for name in ("bias", "qk_norm", "whole_experts")}
    return Architecture(**sizes, gated=gated, causal="acausal" not in traits, tied=tied, name=kind)


def _check(config: Mapping[str, Any], kind: str, sizes: Mapping[str, int], counted: bool) -> None:
    """Raise if the configuration describes no transformer, or one that an `Architecture` cannot describe."""
    if missing := [SIZES[name][0] for name in ("hidden", "layers", "heads") if not sizes[name]]:
        raise ValueError(
            f"a config of model_type={kind!r:.60} without {', '.join(missing)}: give numbers instead, "
            "{'layers': 32, 'hidden': 4096, 'heads': 32, 'vocabulary': 32000}"
        )
    numbers = {name: sizes[name] for name in ("layers", "hidden", "heads", "ffn", "vocabulary")}
    if kind not in TRAITS and not counted:
        raise NoArchitecture(
            f"mpkit has not counted the parameters of model_type={kind!r:.60}, so what its layers are made of is not "
            "known. Give the model itself (built under torch.device('meta') it takes no memory); or, if its layers are "
            f"an attention and an MLP, numbers: {numbers!r}, with 'kv_heads', 'gated', 'experts' and 'top_k' as it has"
        )
    if odd := next(_unlike_layers(config), ""):
        raise NoArchitecture(
            f"a config of model_type={kind!r:.60} with {odd:.80}: its layers are not all alike, which an Architecture "
            f"cannot say. The nearest are these numbers: {numbers!r}"
        )


def _unlike_layers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes layers differ from each other, or embeddings from layers in width."""
    for name, usual in (
        ("decoder_sparse_step", 1), ("moe_layer_freq", 1), ("interleave_moe_layer_step", 1), ("num_hidden_groups", 0)
    ):  # fmt: skip
        if config.get(name) not in (None, usual, [usual] * len(config.get("moe_layer_freq") or ())):
            yield f"{name}={config[name]!r}"
    if config.get("mlp_only_layers"):
        yield f"mlp_only_layers={config['mlp_only_layers']!r}"
    width = next((config[name] for name in SIZES["hidden"] if isinstance(config.get(name), int)), None)
    for name in ("embedding_size", "word_embed_proj_dim"):
        if isinstance(config.get(name), int) and config[name] != width:
            yield f"{name}={config[name]}"
    usual_attention = {"full_attention", "sliding_attention"}
    if attention := {str(kind) for kind in config.get("layer_types") or ()} - usual_attention:
        yield f"layer_types={sorted(attention)!r}"
