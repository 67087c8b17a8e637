"""What torch was built for, and which devices it sees."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TorchBuild", "torch_build"]


@dataclass(frozen=True)
class TorchBuild:
    """torch as it is installed.

    Attributes:
        version: such as "2.13.0+cpu".
        cuda: the CUDA version it was built with, such as "12.8"; "" for a build without CUDA.
        hip: the ROCm version, likewise.
        gpus: how many GPUs it sees.
        nccl: whether it has the nccl backend.
        error: what it says where counting GPUs fails.
    """

    version: str
    cuda: str = ""
    hip: str = ""
    gpus: int = 0
    nccl: bool = False
    error: str = ""


def torch_build() -> TorchBuild:
    """Ask torch; this starts no CUDA context."""
    import warnings

    import torch
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count()
    return TorchBuild(
        torch.__version__,
        torch.version.cuda or "",
        torch.version.hip or "",
        gpus,
        dist.is_available() and dist.is_nccl_available(),
        "; ".join(str(each.message).splitlines()[0] for each in said),
    )
