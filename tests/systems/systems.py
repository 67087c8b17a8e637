"""The scripts of examples/systems, their variants, and what the papers say that a step of each sends.

A formula gives the payload by kind of communication, in bytes per rank and step; P are the bytes of the parameters,
x those of the activations between two blocks (of the whole batch), n the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """What formulas are about.

    Attributes:
        P: bytes of all parameters.
        matrices: bytes of the matrices in blocks, which tensor parallelism divides.
        x: bytes of the activations of the whole batch between two blocks.
        blocks: the number of blocks.
        parameters: the number of parameter tensors.
    """

    P: int
    matrices: int
    x: int
    blocks: int
    parameters: int


Formula = Callable[[Sizes], Mapping[str, float]]


class System(NamedTuple):
    """A script and a variant of it.

    Attributes:
        script: its name in examples/systems.
        variant: its argument, "" for none.
        words: the formula as the papers write it.
        formula: the formula, None where no paper has one.
        ranks: on how many ranks it runs.
        needs: packages that it imports besides torch.
        model: what it is compared with: the model that `serial.py` trains, or the kit's own `Plan.ddp`.
        rtol: how far losses may be from serial training's.
        allocates: whether torch allocates its memory.
    """

    script: str
    variant: str = ""
    words: str = ""
    formula: Formula | None = None
    ranks: int = 2
    needs: tuple[str, ...] = ()
    model: str = "tiny"
    rtol: float = 1e-5
    allocates: bool = True

    @property
    def name(self) -> str:
        """Such as "ddp static"."""
        return f"{self.script} {self.variant}".strip()


def _ddp(s: Sizes) -> dict[str, float]:
    return {"all_reduce": s.P}


def _zero3(s: Sizes) -> dict[str, float]:
    return {"all_gather": 2 * s.P, "reduce_scatter": s.P}


def _gathered_once(s: Sizes) -> dict[str, float]:
    return {"all_gather": s.P, "reduce_scatter": s.P}


def _megatron(s: Sizes) -> dict[str, float]:
    """Two all-reduces in a block's forward, two in its backward."""
    return {"all_reduce": 4 * s.x * s.blocks}


def _sequence(s: Sizes) -> dict[str, float]:
    """Each all-reduce in two halves; x is gathered for the head, as logits, and where the embedding ends (backward)."""
    return {"all_gather": (4 * s.blocks + 3) * s.x, "reduce_scatter": (4 * s.blocks + 1) * s.x}


def _two_dimensions(s: Sizes) -> dict[str, float]:
    """Over tp Megatron's, of half of the batch; over dp ZeRO-3's, of the parameters that a tp rank has."""
    held = s.P - s.matrices / 2
    return {"all_reduce": 4 * s.x / 2 * s.blocks, "all_gather": 2 * held, "reduce_scatter": held}


def _pipeline(boundaries: int) -> Formula:
    """Messages of a rank with two ranks: at each boundary x is sent or received in the forward, and in the backward."""
    return lambda s: {"send": boundaries * s.x, "recv": boundaries * s.x}


DDP = ("P", _ddp)
ZERO3 = ("2P gathered, P reduced", _zero3)
MEGATRON = ("4x a block", _megatron)
SEQUENCE = ("(4 blocks + 3)x gathered, (4 blocks + 1)x scattered", _sequence)
TWO_DIMENSIONS = ("4x/2 a block reduced over tp, 2P' and P' over dp", _two_dimensions)
ZERO1 = ("P reduced, P gathered", lambda s: {"all_reduce": s.P, "all_gather": s.P})
ONCE = ("P gathered, P reduced", _gathered_once)

SYSTEMS = (
    System("ddp", "", *DDP),
    System("ddp", "static", *DDP),
    System(
        "ddp",
        "unused",
        "P, 4 per parameter",
        lambda s: {"all_reduce": s.P + 4 * s.parameters},
        model="unused",
    ),
    System("ddp", "hook", *DDP),
    System("ddp", "fp16", "P/2", lambda s: {"all_reduce": s.P / 2}, rtol=1e-3),
    System("ddp", "compiled", *DDP),
    System("fsdp1", "", *ZERO3),
    System("fsdp1", "zero2", *ONCE),
    System("fsdp2", "", *ZERO3),
    System("fsdp2", "keep", *ONCE),
    System("fsdp2", "offload", *ZERO3),
    System("zero_optimizer", "", "P reduced, P sent", lambda s: {"all_reduce": s.P, "broadcast": s.P}),
    System("tensor_parallel", "", *SEQUENCE),
    System("tensor_parallel", "whole", *MEGATRON),
    System("pipelining", "gpipe", "x each way", _pipeline(1)),
    System("pipelining", "1f1b", "x each way", _pipeline(1)),
    System("pipelining", "interleaved", "3x each way", _pipeline(3)),
    System("pipelining", "zbv", "2x each way", _pipeline(2)),
    System("fsdp2_tensor_parallel", "", *TWO_DIMENSIONS, ranks=4),
    System("checkpoint", "", *ZERO3),
    System("ring", "", "2P(n-1)/n", lambda s: {"send": s.P, "recv": s.P}),
    System("accelerated", "", *DDP, needs=("accelerate",)),
    System("trainer", "", *DDP, needs=("transformers", "accelerate"), model="transformers"),
    System("deepspeed_zero", "1", *ZERO1, needs=("deepspeed",)),
    System("deepspeed_zero", "2", *ZERO1, needs=("deepspeed",)),
    System("deepspeed_zero", "3", *ZERO3, needs=("deepspeed",)),
    System("lightning_ddp", "", *DDP, needs=("pytorch_lightning",)),
    System("mirrored", "", *DDP, ranks=1, needs=("tensorflow",), model="Plan.ddp", allocates=False),
)
