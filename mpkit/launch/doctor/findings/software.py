"""The driver and CUDA against those that torch was built for."""

from __future__ import annotations

from collections.abc import Iterator

from mpkit.launch.doctor.findings.finding import CheckupFinding, Level
from mpkit.launch.doctor.parsers.driver import version
from mpkit.launch.doctor.parsers.facts import Facts, Unknown

__all__ = ["software"]


def software(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield whether the driver runs what torch was built for."""
    build = facts.torch
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPUs"
    if isinstance(facts.driver, Unknown):
        if facts.gpu_list or build.cuda:
            yield CheckupFinding(
                "software", Level.UNCHECKED, f"The driver against torch's {kind}.", facts.driver.why
            )
        else:
            yield CheckupFinding(
                "software", Level.FINE, f"torch {build.version}, built for {kind}.", "torch.__version__"
            )
        return
    newest, wanted = facts.driver.cuda, version(build.cuda)
    seen = f"driver {facts.driver.release}" + (f", CUDA up to {newest[0]}.{newest[1]}" if newest else "")
    seen += f"; torch {build.version}"
    topics = ("gpus not found",)
    if newest is None or wanted is None:
        yield CheckupFinding(
            "software", Level.NOTE, f"torch {build.version} is built for {kind}.", seen, topics=topics
        )
    elif newest[0] < wanted[0]:
        yield CheckupFinding(
            "software",
            Level.COSTS,
            f"The driver is too old for torch's CUDA {build.cuda}.",
            seen,
            "torch finds no GPU (`The NVIDIA driver on your system is too old`)",
            f"update the driver; or install torch for CUDA {newest[0]}.{newest[1]} or older (pytorch.org)",
            topics,
        )
    elif newest < wanted:
        yield CheckupFinding(
            "software",
            Level.NOTE,
            f"torch's CUDA {build.cuda} is newer than the driver's {newest[0]}.{newest[1]}.",
            seen,
            "runs, since minor versions are compatible; kernels that are compiled when they are first used may not",
            "update the driver at the next opportunity",
            topics,
        )
    else:
        yield CheckupFinding(
            "software", Level.FINE, f"The driver runs torch's CUDA {build.cuda}.", seen, topics=topics
        )
    if facts.gpu_list and build.cuda and not build.nccl:
        yield CheckupFinding(
            "software",
            Level.COSTS,
            "This torch has no nccl.",
            "torch.distributed.is_nccl_available() is False",
            "ranks on GPUs talk through the host's memory with gloo",
            "use Linux, or WSL, and a CUDA build of torch",
        )
