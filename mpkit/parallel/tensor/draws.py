"""Random numbers inside of a region: each rank has other heads and other features there, so it draws its own.

    outside   the ranks' generators are in the same state: what they draw is the same, as what it is drawn for
    begin     a rank's generators go on from a seed that follows from that state, the region's name, the rank's place
    end       they go back to where they were, and one draw further if anything was drawn inside

So a forward that is done again from the same state draws the same again, a region draws something else the next time,
and a region that draws nothing leaves no trace: what is drawn outside is what serial training draws.

Source: Shoeybi et al. 2019, appendix B.2.
"""

from __future__ import annotations

from ctypes import string_at
from hashlib import blake2b

import torch
from torch import Tensor

__all__ = ["OwnDraws"]


class OwnDraws:
    """The random numbers of one region on one rank.

    >>> mine, others = OwnDraws("mlp", 0), OwnDraws("mlp", 1)
    >>> def inside(draws):
    ...     _ = torch.manual_seed(1)
    ...     draws.begin(torch.device("cpu"))
    ...     drawn = torch.rand(()).item()
    ...     draws.end()
    ...     return drawn, torch.rand(()).item()
    >>> a, b = inside(mine), inside(others)
    >>> a[0] == inside(mine)[0] != b[0], a[1] == b[1]
    (True, True)

    Args:
        name: of the region.
        index: the rank's place on the line.
    """

    def __init__(self, name: str, index: int) -> None:
        self._salt = f"{name} on {index}".encode()
        self._away: list[tuple[torch.Generator, Tensor, bytes]] = []

    def begin(self, device: torch.device) -> None:
        """From here on the rank draws its own."""
        self._away.clear()
        for generator in _generators(device):
            outside = generator.get_state()
            said = blake2b(_bytes(outside) + self._salt, digest_size=8).digest()
            generator.manual_seed(int.from_bytes(said, "little") >> 1)
            self._away.append((generator, outside, _bytes(generator.get_state())))

    def end(self) -> None:
        """From here on all draw the same; where nothing had begun, nothing ends."""
        for generator, outside, inside in self._away:
            drawn = _bytes(generator.get_state()) != inside
            generator.set_state(outside)
            if drawn:
                torch.rand((), generator=generator, device=generator.device)
        self._away.clear()


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":  # in a dry run it may not be there
        found += torch.cuda.default_generators[device.index or 0 :][:1]
    return found


def _bytes(state: Tensor) -> bytes:
    return string_at(state.data_ptr(), state.nbytes)  # asks no tensor, which in a dry run is a fake one
