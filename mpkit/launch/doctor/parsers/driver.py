"""The head of `nvidia-smi`: the driver's version, and the newest CUDA it can run."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Driver", "parse_driver", "version"]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        release: its version, such as "535.104.05".
        cuda: the newest CUDA version whose programs it runs, such as (12, 2); None where it is not said.
    """

    release: str
    cuda: tuple[int, int] | None


def version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version.

    >>> version("12.8"), version("")
    ((12, 8), None)
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def parse_driver(text: str) -> Driver:
    """Read the box that nvidia-smi prints.

    >>> parse_driver("| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |")
    Driver(release='535.104.05', cuda=(12, 2))

    Raises:
        ValueError: the text does not name the driver's version.
    """
    release = re.search(r"(?:Driver Version|KMD Version): *([\d.]+)", text)
    if release is None:
        raise ValueError("nvidia-smi named no driver version")
    cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", text)
    return Driver(release[1], version(cuda[1]) if cuda else None)
