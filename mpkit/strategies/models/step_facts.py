"""Facts about what forwards, losses and the user's own optimizers do in a step, by which a later step may differ.

A mask that hides nothing, a limit that nothing reaches, a branch that is not taken: they do not show in the steps that
are compared with serial training, and may be wrong later. Each rank notes, operator by operator,

    operators   which ones run
    truths      whether a comparison, or a mask, is true everywhere, nowhere or in a part
    limits      whether a clamp, a maximum or a minimum changes anything
    parts       whether a slice takes all
    divisors    whether the loss divides by as much for each sample as at first

In compared steps it listens to all forwards. Later it listens to losses, to optimizers that are not torch's, and to
forwards that look at values, remember something in Python or reduce over samples: others do the same in each step.

If no compared step has the same facts, the rank notes the step in which one happened first (`FirstTimes`), and the
run's line names it. Two more facts count: which parameters get a gradient, and modules' modes.
"""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.disk import FULL, write_whole
from mpkit.common.torch_private import TorchDispatchMode
from mpkit.strategies.models.heard_draws import draws_numbers

LIMITS = {
    "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh", "threshold", "nan_to_num", "fmod",
}  # fmt: skip
ACROSS = {
    "mean", "sum", "max", "amax", "min", "amin", "aminmax", "var", "std", "var_mean", "norm", "linalg_vector_norm",
    "prod", "logsumexp", "median", "cumsum", "sort", "topk", "argsort", "nonzero", "bincount", "scatter_add",
    "index_add",
}  # fmt: skip
"""Operators that may combine samples."""

IGNORES = ("nll_loss_forward", "nll_loss2d_forward")
SLICES = ("slice", "narrow", "select")
DIVISIONS = ("div", "mean")


class StepFacts:
    """The facts of a rank's current step, in words."""

    def __init__(self) -> None:
        self.facts: set[str] = set()  # so far; `collect` completes them
        self.listeners: list[_Listener] = []  # the contexts that have been entered; the last one listens
        self.may_act_later = False  # a forward did something that may have another effect in later steps
        self._listens = True
        self._pending: list[tuple[str, Tensor, Tensor]] = []
        self._first: dict[tuple[str, int], float] = {}

    def begin_step(self, *, compared: bool) -> None:
        """Forget the step before."""
        self.facts, self._pending = set(), []
        self._listens = compared or self.may_act_later

    def of_forward(self, samples: int) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return _Listener(self, "the forward", samples) if self._listens else nullcontext()

    def of_loss(self, samples: int) -> AbstractContextManager[Any]:
        """Return the context of a loss."""
        return _Listener(self, "the loss", samples)

    def of_optimizer(self) -> AbstractContextManager[Any]:
        """Return the context of an update."""
        return _Listener(self, "the optimizer", 0)

    def collect(self) -> set[str]:
        """Return the facts of the step; called once its results are known."""
        for where, some, every in self._pending:
            truth = "only true" if bool(every) else "true and false" if bool(some) else "only false"
            self.facts.add(f"{where} gives {truth}")
        self._pending = []
        return self.facts

    def note_truths(self, where: str, value: Tensor) -> None:
        """Note whether a mask is true everywhere, nowhere or in a part; `collect` reads its values."""
        if value.numel():
            self._pending.append((where, value.any(), value.all()))

    def note_divisor(self, where: str, number: int, per_sample: float) -> None:
        """Note how much a division divides by, for each sample."""
        first = self._first.setdefault((where, number), per_sample)
        if abs(per_sample - first) > 1e-9 * abs(first):
            self.facts.add(f"{where} divides by another number for each sample than before")


@cache
def _describe(func: Any, where: str) -> tuple[str, str, str, bool]:
    """Return an operator's name, without the underscore of in-place ones, two texts for it, and whether it draws."""
    name = func.overloadpacket.__name__.removesuffix("_")
    return name, f"{where} computes {name}", f"in {where}, {name}", draws_numbers(func)


class _Listener(TorchDispatchMode):
    def __init__(self, into: StepFacts, where: str, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into, self._where, self._samples = into, where, samples
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._into.listeners.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._into.listeners.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        into = self._into
        if into.listeners[-1] is not self:  # a forward ends with the loss
            return made
        name, computes, here, draws = _describe(func, self._where)
        into.facts.add(computes)
        first = args[0] if args else None
        if draws or not isinstance(first, Tensor):
            return made
        if self._where == "the forward" and not into.may_act_later:
            rows = first.shape[0] if first.dim() else 0
            across = name in ACROSS and self._samples > 1 and rows > 0 and rows % self._samples == 0
            into.may_act_later = across or name == "_local_scalar_dense"
        for arg in (made, *args[1:]):
            for each in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(each, Tensor) and each.dtype == torch.bool:
                    into.note_truths(here, each)
        if name in IGNORES:
            into.note_truths(f"{here}, which ignores targets,", args[1] == args[4])
        elif name in DIVISIONS and self._where == "the loss" and self._samples:
            self._note_divisor(name, here, first, args)
        elif name in SLICES and isinstance(made, Tensor):
            into.facts.add(f"{here} takes {'all' if made.shape == first.shape else 'a part'}")
        elif name in LIMITS and isinstance(made, Tensor) and made is not first:
            unchanged = made == first if made.shape == first.shape else made == made
            into.note_truths(f"the limit {here}", unchanged)
        if name.startswith("nan") and first.is_floating_point():
            into.note_truths(f"{here} of NaN", first.isnan())
        return made

    def _note_divisor(self, name: str, here: str, first: Tensor, args: tuple[Any, ...]) -> None:
        divisor: Any = args[1] if len(args) > 1 else first.numel()
        if name == "mean" and len(args) > 1:
            return
        if isinstance(divisor, Tensor):
            divisor = float(divisor) if divisor.numel() == 1 and not divisor.is_complex() else None
        if isinstance(divisor, (int, float)):
            self._counts[name] += 1
            self._into.note_divisor(here, self._counts[name], float(divisor) / self._samples)


FIRST_TIMES = "first-times"
"""The name of a rank's file with what no compared step has had: JSON, {fact: step}."""


class FirstTimes:
    """What happens for the first time in a rank's steps."""

    def __init__(self, path: Path, modules: dict[str, nn.Module]) -> None:
        self._path, self._modules = path, modules
        self._latest: tuple[object, ...] = ()
        self._compared: set[str] = set()
        self._open: dict[str, int] = {}

    def note(
        self, step: int, used: Iterable[str], trained: Iterable[str], others: Iterable[str] = (), *, compared: bool
    ) -> None:  # fmt: skip
        """Note which `trained` parameters have a gradient in a step (`used`), modules' modes, and `others`, in words.

        Steps count from 0; `compared` ones are compared with serial training.
        """
        used, others = frozenset(used), frozenset(others)
        modes = tuple(module.training for module in self._modules.values())
        if (used, modes, others, compared) == self._latest:
            return
        self._latest = used, modes, others, compared
        facts = set(others)
        facts |= {f"{name} gets {'a' if name in used else 'no'} gradient" for name in trained}
        facts |= {
            f"{name or 'the model'} is in {'training' if mode else 'evaluation'} mode"
            for name, mode in zip(self._modules, modes, strict=True)
        }
        if compared:
            self._compared |= facts
            self._open = {fact: first for fact, first in self._open.items() if fact not in facts}
        else:
            self._open |= {fact: step for fact in facts - self._compared if fact not in self._open}
        if self._open or self._path.exists():
            try:
                write_whole(self._path, json.dumps(self._open).encode())
            except OSError as error:
                if error.errno not in FULL:
                    raise


def first_unverified(paths: Iterable[Path]) -> tuple[int, list[str]]:
    """Return the first step, from 0, with facts that no compared step has had, and these; -1 if there is none."""
    happened = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    first = min((step for facts in happened for step in facts.values()), default=-1)
    return first, sorted({fact for facts in happened for fact, step in facts.items() if step == first})
