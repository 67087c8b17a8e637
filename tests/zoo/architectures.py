"""Small random models of transformers' architectures: nothing is downloaded, and each has a few thousand weights.

architectures.toml has their settings. Dropout is 0 in all of them.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk

VOCABULARY, WIDTH, HEADS, LENGTH, CLASSES, BATCH = 40, 32, 4, 8, 5, 4

Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and what it is trained on.

    Attributes:
        name: in the table.
        model: its class in transformers; the config's class is `config`.
        task: what the inputs and the loss are.
        settings: of the config.
        decoder: whether it counts as a decoder of transformers for tensor parallelism.
        division: whether tensor parallelism is tried.
    """

    name: str
    model: str
    config: str
    task: str
    settings: dict[str, Any] = field(default_factory=dict)
    decoder: bool = False
    division: bool = True


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHARED: dict[str, dict[str, Any]] = TABLE.pop("shared")
BEGINS: dict[str, tuple[str, ...]] = {
    "ForCausalLM": ("tokens", "sizes", "llama"), "ForMaskedLM": ("tokens", "sizes", "bert"),
    "ForConditionalGeneration": ("tokens", "seq2seq"), "ForImageClassification": ("sizes", "pixels", "classes"),
    "ForSequenceClassification": ("tokens", "sizes", "bert"), "Model": (),
}  # fmt: skip
"""By the ending of a class: the shared settings that its rows begin with, where they name no others."""


def _shared(*names: str) -> dict[str, Any]:
    return {name: value for each in names for name, value in SHARED[each].items()}


def _architecture(name: str, ending: str, task: str, row: dict[str, Any]) -> Architecture:
    kind, begins = row.pop("of"), row.pop("begins", BEGINS[ending])
    model, config = row.pop("model", kind + ending), row.pop("config", f"{kind}Config")
    task, division = row.pop("task", task), row.pop("division", True)
    settings = _shared(*begins, *row.pop("more", ())) | dict.fromkeys(row.pop("without", ())) | row
    if kind == "CLIP":
        parts = {"text_config": ("tokens", "sizes", "bert"), "vision_config": ("sizes", "pixels")}
        settings = {part: _shared(*names) | {"projection_dim": 16} for part, names in parts.items()}
        settings["projection_dim"] = 16
    return Architecture(name, model, config, task, settings, ending == "ForCausalLM", division)


ARCHITECTURES = tuple(
    _architecture(name, ending, task, row)
    for ending, tasks in TABLE.items()
    for task, rows in tasks.items()
    for name, row in rows.items()
)


def build(architecture: Architecture) -> nn.Module:
    """The model: random, in float64, in training mode.

    Every weight is moved by some noise, so that biases and normalizations are not at the 0 and 1 where mistakes cancel.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, architecture.config)(**architecture.settings)
    inner = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    for one in [config, *(found for found in inner if found is not None)]:
        for name, value in one.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(one, name, 0.0)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, architecture.model)(config).double().train()
    if "expert" in " ".join(name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped_mm knows no float64
    if architecture.task == "captions+whole":
        model.logit_scale.requires_grad_(False)  # not a sample's, and so not an output
        model = Embeddings(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


class Embeddings(nn.Module):
    """Of CLIP what each sample has by itself, and not the logits of all samples against all."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        output = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        return output.image_embeds, output.text_embeds


# ---- tasks --------------------------------------------------------------------------------------------------


def batch_of(task: str, size: int = BATCH) -> Batch:
    """Inputs by name, and targets."""
    words = torch.randint(1, VOCABULARY, (size, LENGTH))
    pictures = torch.randn(size, 3, 16, 16, dtype=torch.float64)
    classes = torch.randint(CLASSES, (size,))
    next_words = {"input_ids": words}, torch.randint(1, VOCABULARY, (size, LENGTH))
    return {
        "words": next_words,
        "states": next_words,
        "pairs": ({"input_ids": words, "decoder_input_ids": words.flip(1)}, words),
        "speech": (
            {
                "input_features": torch.randn(size, 8, 2 * LENGTH, dtype=torch.float64),
                "decoder_input_ids": words,
            },
            words,
        ),
        "pictures": ({"pixel_values": pictures}, classes),
        "masks": ({"pixel_values": pictures}, torch.randint(CLASSES, (size, 8, 8))),
        "sound": ({"input_values": torch.randn(size, 64, dtype=torch.float64)}, classes),
        task if "captions" in task else "captions": (
            {"input_ids": words, "pixel_values": pictures},
            torch.arange(size),
        ),
    }[task]


def loss_of(task: str) -> Callable[[Any, Any], Any]:
    """The loss, a mean over samples but for captions, each of which is compared with all."""
    return {
        "pictures": _of_classes, "masks": _of_classes, "sound": _of_classes, "states": _of_states,
        "captions": _of_captions, "captions+whole": mk.whole_batch_loss(_of_embeddings),
    }.get(task, _of_words)  # fmt: skip


def _of_words(output: Any, targets: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _of_embeddings(output: Any, targets: Tensor) -> Tensor:
    """The same, of what each sample has by itself."""
    pictures, captions = output
    logits = 10 * pictures @ captions.t()
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def _of_states(output: Any, targets: Tensor) -> Tensor:
    """With the hidden states, as in distillation."""
    return _of_words(output, targets) + torch.stack([h.square().mean() for h in output.hidden_states]).sum()


def _of_classes(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets)


def _of_captions(output: Any, targets: Tensor) -> Tensor:
    """CLIP's: each caption against all pictures of the batch."""
    logits = output.logits_per_image
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2
