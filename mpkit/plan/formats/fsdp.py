"""FSDP2 as Python: the plan as constants at the head of a module, and `shard` and `step`, which apply them.

A script imports the module, or begins with it: `model = shard(model, model.blocks)`.
"""

from __future__ import annotations

from typing import Any

from mpkit.plan.formats.keys import (
    Fields,
    Format,
    FormatKey,
    Values,
    bool_of,
    choice,
    flag,
    number,
    number_of,
)
from mpkit.plan.formats.python_code import assignments, python_code
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.rules import call_of

__all__ = ["FSDP"]

IMPORTS = """\
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
"""

CODE = '''

def shard(model, blocks):
    """Shard each block by itself, then what is left. `blocks` is the model's ModuleList of blocks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"dp_replicate": REPLICATE, "dp_shard": RANKS // REPLICATE} if REPLICATE > 1 else {"dp": RANKS}
    options = {
        "mesh": init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape)),
        "reshard_after_forward": RESHARD_AFTER_FORWARD,
        "mp_policy": MixedPrecisionPolicy(getattr(torch, PARAM_DTYPE), torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if OFFLOAD else OffloadPolicy(),
    }
    for i, block in enumerate(blocks):
        blocks[i] = fully_shard(checkpoint_wrapper(block) if RECOMPUTE else block, **options)
    return fully_shard(model, **options)


def step(model, optimizer, loss_of, batch):
    """Train on this rank's part of a batch, in micro-batches; return its mean loss. `batch` is (inputs, targets)."""
    losses = []
    for inputs, targets in zip(*(part.chunk(MICROBATCHES) for part in batch), strict=True):
        loss = loss_of(model(inputs), targets) / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()'''


def _body(page: Page) -> str:
    return f"{IMPORTS}\n{assignments(page, {})}\n{CODE}"


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    fields["zero"] = 3 if values.get("RESHARD_AFTER_FORWARD", True) else 2
    return fields


def _check(asked: ExportRequest) -> None:
    if asked.plan.zero < 2:
        raise ValueError(
            f"{call_of(asked.plan)}: fully_shard shards gradients at least, and parameters too, so it is ZeRO-2 or "
            f"ZeRO-3: {call_of(asked.plan, {'zero': 3})}. ZeRO-{asked.plan.zero} is plan.to('deepspeed'), or "
            "mk.ddp and mk.zero_optimizer in a loop of your own"
        )


def _reshard(value: Any) -> dict[str, Any]:
    bool_of(value)
    return {}


FSDP = Format(
    "fsdp",
    "FSDP2 in a script (torch.distributed.fsdp.fully_shard)",
    python_code(_body, {}),
    (
        number("RANKS", "dp", "ranks that shard everything, one per GPU"),
        FormatKey("REPLICATE", "groups of ranks that are replicas of each other; each shards everything (HSDP)",
            lambda asked: asked.plan.mesh.dp_replicate, lambda value: {"dp_replicate": number_of(value)},
            ("dp_replicate", "dp_shard")),
        number("MICROBATCHES", "microbatches", "micro-batches per optimizer step"),
        FormatKey("RESHARD_AFTER_FORWARD", "True: ZeRO-3; False: gathered parameters stay until the backward (ZeRO-2)",
            lambda asked: asked.plan.zero == 3, _reshard, ("zero",)),
        choice("PARAM_DTYPE", "precision", {"full": "float32", "bf16": "bfloat16"},
               "what it computes in; gradients are reduced in float32", otherwise="bfloat16"),
        flag("RECOMPUTE", "recompute", "full", "recomputes each block in the backward", always=True),
        flag("OFFLOAD", "offload", "params", "parameters, gradients and optimizer on the host", always=True),
    ),
    _finish,
    {
        "pp": "stages are code of their own: torch.distributed.pipelining; or plan.to('torchtitan')",
        "tp": "which layers are divided is the model's: parallelize_module(model, mesh['tp'], {...})",
        "cp": "sequences are divided in the model's attention; or plan.to('torchtitan')",
        "schedule": "it has no pipeline",
        "precision": "float16 needs a scaled loss: torch.amp.GradScaler, in a loop of your own",
        "offload": "CPUOffloadPolicy offloads all states, with ZeRO-3",
        "recompute": "checkpoint_wrapper is put around every block, or around none",
        "prefetch": "set_modules_to_forward_prefetch names modules, not a number of layers",
        "bucket_mb": "a block is gathered and reduced as one",
        "unused": "parameters without a gradient are none of its business",
    },
    _check,
)  # fmt: skip
