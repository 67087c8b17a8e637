"""The scripts of examples/systems, their variants, and what the papers say that a step of each sends.

A formula gives the payload by kind of communication, in bytes per rank and step; P are the bytes of the parameters,
x those of the activations between two blocks (of the whole batch), n the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """What formulas are about: bytes of all parameters, of the blocks' parameters, of activations; numbers of blocks, parameters."""

    P: int
    in_blocks: int
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
        model: which model `serial.py` trains.
        rtol: how far losses may be from serial training's.
        memory: how far torch.profiler's peak may be, where that is more than 3 %; `why` says what is not seen.
    """

    script: str
    variant: str = ""
    words: str = ""
    formula: Formula | None = None
    ranks: int = 2
    needs: tuple[str, ...] = ()
    model: str = "tiny"
    rtol: float = 1e-5
    memory: float = 0.0
    why: str = ""

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


def _pipeline(boundaries: int) -> Formula:
    """Messages of a rank with two ranks: at each boundary x is sent or received in the forward, and in the backward."""
    return lambda s: {"send": boundaries * s.x, "recv": boundaries * s.x}


DDP = ("P", _ddp)
ZERO3 = ("2P gathered, P reduced", _zero3)
ONCE = ("P gathered, P reduced", _gathered_once)

SYSTEMS = (
    System("ddp", "", *DDP),
    System("ddp", "static", *DDP),
    System(
        "ddp", "unused", "P, 4 per parameter", lambda s: {"all_reduce": s.P + 4 * s.parameters}, model="unused"
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
    System("tensor_parallel", ""),
    System("tensor_parallel", "whole", "4x a block", lambda s: {"all_reduce": 4 * s.x * s.blocks}),
    System("pipelining", "gpipe", "x each way", _pipeline(1)),
    System("pipelining", "1f1b", "x each way", _pipeline(1)),
    System("pipelining", "interleaved", "3x each way", _pipeline(3)),
    System("pipelining", "zbv", "2x each way", _pipeline(2)),
    System("fsdp2_tensor_parallel", "", ranks=4),
    System("checkpoint", "", *ZERO3),
    System("ring", "", "2P(n-1)/n", lambda s: {"send": s.P, "recv": s.P}),
    System("accelerated", "", *DDP, needs=("accelerate",)),
    System("trainer", "", *DDP, needs=("transformers", "accelerate"), model="transformers"),
    System("lightning_ddp", "", *DDP, needs=("pytorch_lightning",)),
)
