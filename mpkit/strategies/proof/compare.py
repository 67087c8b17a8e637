"""Are two tensors the same, but for rounding? If they differ by more than a little, the computation is repeated.

Both proofs compare in this way: a run's, whose computation is a step of serial training (`attempt`), and a loop's,
whose computation is a forward of the plain module, or the backwards of a step (`plain_module`). A computation is a
function `repeat(seed)` that returns its results by name, with other roundings if there is a seed.
"""

import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.exceptions import one_line
from mpkit.strategies.models.heard_draws import CannotReplay
from mpkit.strategies.proof.draws import SharedDraws
from mpkit.strategies.proof.rounding import SPREADS, distance, largest

Results = Mapping[str, Tensor | None]
"""The results of a computation: gradients by the parameter's name, "buffer NAME", "output NUMBER", the loss by ""."""

SHADOWS = 4.0
"""How many times as far as a step in 16 bits is from the same in 32 bits two results in 16 bits may be apart: kernels
sum up in 16 bits inside, as long as the batch is, which nobody can perturb from outside."""

REPETITIONS = 3  # how often a computation is repeated to find out what rounding does to it
CEILING = 3.0  # square roots of a rounding by which repetitions may differ: 1e-3 in float32, 4e-8 in float64
SMALL = 0.03  # the share of the largest gradient below which a gradient may be nothing but rounding


class Noise:
    """What rounding does to results.

    Args:
        repeat: repeat(seed) -> the results, with other roundings; those as they are for None.
        dtype: the coarsest one in the computation.
        widen: returns the results in 32 bits of a computation in 16 bits; nothing for any other.

    >>> Noise(lambda seed: {"": torch.tensor(1.0 + (seed or 0))}, torch.float64).spread("")
    32.0
    """

    def __init__(
        self, repeat: Callable[[int | None], Results], dtype: torch.dtype,
        widen: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:  # fmt: skip
        self._repeat, self._widen = repeat, widen
        self.repeats_differ = False  # by more than the ceiling, and as much as what was compared
        self._spread: dict[str, float] = {}
        self._scales: dict[str, float] = {}
        # The largest difference that rounding explains, relative to what is compared: about 1e-3 in float32.
        self.ceiling = CEILING * float(torch.finfo(dtype).eps) ** 0.5

    def spread(self, name: str) -> float:
        """Return how far two correct results of this name may be apart."""
        if not self._spread:
            self._spread = self._spreads()
        return self._spread.get(name, 0.0)

    def explains(self, by: float, name: str) -> bool:
        """Return whether rounding explains a difference of a result.

        Raises:
            CannotReplay: repetitions differ as much, by more than rounding explains; or they fail.
        """
        bound, scale = self.spread(name), self._scales[name]
        if self.ceiling * scale < by <= bound:
            self.repeats_differ = True
            what = f"the gradient of {name}" if name else "the loss"
            what = name if name.startswith(("buffer ", "output ")) else what
            raise CannotReplay(
                f"repeats of the step differ by {bound / SPREADS / scale if scale else inf:.0e} in {what}, so "
                "something in it is not the same each time: random numbers that mpkit does not hear (os.urandom, a "
                "generator of another library), the clock, or what a module keeps outside of itself"
            )
        return by <= bound

    def _spreads(self) -> dict[str, float]:
        base = self._repeat(None)
        spread = dict.fromkeys(base, 0.0)
        for seed in range(REPETITIONS):
            for name, result in self._repeat(seed).items():
                known = base.get(name)
                if result is not None and known is not None and result.shape == known.shape:
                    spread[name] = max(spread[name], distance(result, known))
        found = {name: SPREADS * by for name, by in spread.items()}
        for name, wide in self._widen().items():
            known = base[name]
            found[name] += 0.0 if known is None else SHADOWS * distance(known, wide)
        # A gradient that is zero but for rounding has that of the others.
        sizes = {name: largest(value) for name, value in base.items() if value is not None}
        gradients = [name for name in found if name and not name.startswith(("buffer ", "output "))]
        least = SMALL * max((sizes.get(name, 0.0) for name in gradients), default=0.0)
        self._scales = sizes | {name: max(sizes.get(name, 0.0), least) for name in gradients}
        return found


@dataclass
class Difference(Exception):
    """Something differs: what, with both values, and why."""

    says: str
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.says}. {self.cause}"


def same(
    what: str, got: Tensor, wanted: Tensor, few: float, noise: Noise | None = None, name: str = ""
) -> None:
    """Raise a Difference unless two tensors, the ranks' and the serial one, are the same.

    Args:
        few: a difference without further questions.
        noise: says what may be added to it, under `name`; None: nothing.

    Raises:
        CannotReplay: nobody knows, since the step cannot be repeated, or its repetitions differ as well.
    """
    got = got.to(wanted.device)
    by = distance(got, wanted)
    if by <= few:
        return
    cause = ""
    if noise is not None:
        try:
            if noise.explains(by - few, name):
                return
        except (CannotReplay, SharedDraws, MemoryError, torch.OutOfMemoryError) as error:
            if noise.repeats_differ or by <= noise.ceiling * largest(wanted):
                raise
            why = f"since the step cannot be repeated to look for it: {one_line(error)}"
            cause = f"The cause is unknown, {why}."
    raise Difference(f"{what} is {difference_in_words(got, wanted)}", cause)


@cache
def _sentences() -> dict[str, str]:
    return tomllib.loads(Path(__file__).with_name("causes.toml").read_text("utf-8"))


def say(cause: str, **values: Any) -> str:
    """Return the sentence of a cause, and of what works, with the values of the step (`causes.toml`).

    >>> say("mode", mode="evaluation")
    'The ranks computed in evaluation mode, in which serial training is not.'
    """
    return _sentences()[cause].format_map(values)


def difference_in_words(got: Tensor, wanted: Tensor) -> str:
    """Return the elements at which two tensors differ most.

    >>> difference_in_words(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    '2 and not 2.5'
    """
    wide = torch.promote_types(wanted.dtype, torch.float64)  # complex stays complex
    a, b = (each.detach().reshape(-1).to(wide) for each in (got, wanted))
    at = int(torch.nan_to_num((a - b).abs(), nan=inf).argmax())
    return f"{a[at].item():.6g} and not {b[at].item():.6g}"


@contextmanager
def run_user_code(what: str) -> Iterator[None]:
    """Run the user's code; what it or an operator raises becomes CannotReplay, but mpkit's own errors stay."""
    try:
        yield
    except (CannotReplay, SharedDraws):
        raise
    except Exception as error:
        modules = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_tb(error.__traceback__)]
        if modules[-1].startswith(("mpkit.strategies.proof.", "mpkit.strategies.wrappers.")):
            raise
        raise CannotReplay(f"{what} fails in plain PyTorch: {one_line(error)}") from error
