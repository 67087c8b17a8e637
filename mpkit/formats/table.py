"""The formats by name."""

from __future__ import annotations

from collections.abc import Mapping

from mpkit.formats.accelerate import ACCELERATE
from mpkit.formats.deepspeed import DEEPSPEED
from mpkit.formats.fsdp import FSDP
from mpkit.formats.keys import Format
from mpkit.formats.megatron import MEGATRON
from mpkit.formats.nanotron import NANOTRON
from mpkit.formats.tf_config import TF_CONFIG
from mpkit.formats.torchrun import SLURM, TORCHRUN
from mpkit.formats.torchtitan import TORCHTITAN
from mpkit.formats.trainer import TRAINER

__all__ = ["FORMATS"]

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        TORCHRUN, DEEPSPEED, ACCELERATE, FSDP, MEGATRON, TORCHTITAN, NANOTRON, TRAINER, SLURM, TF_CONFIG,
    )
}  # fmt: skip
