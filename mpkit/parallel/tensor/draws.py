"""Random numbers inside of a region, where each rank has other heads and other features, and so draws its own.

    outside   the ranks' generators are in the same state, so they draw the same numbers for the same activations
    begin     a rank's generators continue from a seed made from that state, the region's name and the rank's place
    end       they return to where they were, and one draw further if anything was drawn inside

So a forward that is repeated from the same state draws the same numbers, a region draws others the next time, and a
region that draws nothing leaves no trace: what is drawn outside is what serial training draws.

Source: Shoeybi et al. 2019, appendix B.2.
"""

from __future__ import annotations

from ctypes import string_at
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # private; this module's example guards it

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
        name: the region's name.
        index: the rank's place in the group.
    """

    def __init__(self, name: str, index: int) -> None:
        self._salt = f"{name} on {index}".encode()
        self._away: list[tuple[torch.Generator, Tensor, bytes]] = []

    def begin(self, device: torch.device) -> None:
        """Switch the generators to the rank's own draws."""
        self._away.clear()
        for generator in _generators(device):
            outside = generator.get_state()
            said = blake2b(_bytes(outside) + self._salt, digest_size=8).digest()
            generator.manual_seed(int.from_bytes(said, "little") >> 1)
            self._away.append((generator, outside, _bytes(generator.get_state())))

    def end(self) -> None:
        """Return the generators to the draws that all ranks share; do nothing if nothing has begun."""
        for generator, outside, inside in self._away:
            drawn = _bytes(generator.get_state()) != inside
            generator.set_state(outside)
            if drawn:
                with _disable_current_modes():  # which may be a dry run's, or listen to what the model draws
                    torch.rand((), generator=generator, device=generator.device)
        self._away.clear()


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":  # in a dry run the device may not exist
        generators += torch.cuda.default_generators[device.index or 0 :][:1]
    return generators


def _bytes(state: Tensor) -> bytes:
    return string_at(state.data_ptr(), state.nbytes)  # needs no tensor operation, which a dry run would fake
