"""The formats by name."""

from __future__ import annotations

from collections.abc import Mapping

from mpkit.plan.formats.accelerate import ACCELERATE
from mpkit.plan.formats.deepspeed import DEEPSPEED
from mpkit.plan.formats.fsdp import FSDP
from mpkit.plan.formats.keys import Format
from mpkit.plan.formats.megatron import MEGATRON
from mpkit.plan.formats.tf_config import TF_CONFIG
from mpkit.plan.formats.torchrun import SLURM, TORCHRUN
from mpkit.plan.formats.torchtitan import TORCHTITAN
from mpkit.plan.formats.trainer import TRAINER

__all__ = ["FORMATS"]

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        TORCHRUN, DEEPSPEED, ACCELERATE, FSDP, MEGATRON, TORCHTITAN, TRAINER, SLURM, TF_CONFIG,
    )
}  # fmt: skip
