"""An exercise, as its author writes it: the task, the cases in which an answer is tried, and what students get wrong.

Case       one set of hidden inputs: the number of ranks, a seed, sizes
Seen       what an answer did in a case; budgets measure it, and mistakes are recognized in it
Budget     the most that an answer may use: bytes, messages, seconds on the virtual clock
Mistake    a misconception: a wrong answer that has it, how to recognize it, and hints, each more specific
Exercise   all of these together; kinds of exercises differ in how an answer is examined
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpkit.trace import Trace

if TYPE_CHECKING:
    import torch

    from mpkit.course.framework.room import PackedAnswer, Room
    from mpkit.plan.schedule import Schedule
    from mpkit.timeline.timeline import Timeline


HOME = "mpkit.course.exercises"
"""The package of the exercises."""

UNFORESEEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What looking at results raises where they have another form than the exercise asks for, such as None or a tensor of
another shape. Anything else is an error of the exercise, or of a class that the student wrote, and is raised."""

Answer = Callable[..., Any]
"""A student's function or class."""


@dataclass(frozen=True)
class Case:
    """One set of inputs that the student has not seen.

    Attributes:
        ranks: the number of ranks that run the answer.
        seed: the seed of the inputs and of the delays.
        sizes: all other parameters of the case, by name: `case["microbatches"]`.
    """

    ranks: int
    seed: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.sizes[name]

    def __str__(self) -> str:
        """Describe the case in words.

        >>> print(Case(2, sizes={"microbatches": 6, "max_norm": 0.3, "steps": 1}))
        2 ranks, 6 micro-batches, max norm 0.3, 1 step
        """
        return ", ".join(_words(name, value) for name, value in {"ranks": self.ranks, **self.sizes}.items())

    def generator(self, rank: int = 0) -> torch.Generator:
        """Return a rank's random number generator, the same in every process.

        >>> import torch
        >>> torch.randint(100, (3,), generator=Case(2, seed=1).generator(0)).tolist()
        [7, 79, 47]
        """
        import torch

        return torch.Generator().manual_seed(1000 * self.seed + rank)


def _words(name: str, value: Any) -> str:
    """Return a size in words, with what is counted after its number: "4 steps", but "length 4"."""
    name = name.replace("_", " ").replace("microbatch", "micro-batch").replace("gpus", "GPUs")
    if isinstance(value, int) and name.endswith("s") and not name.endswith("bytes"):
        return f"{value} {name}" if value != 1 else f"1 {name.removesuffix('s').replace('batche', 'batch')}"
    return f"{name} {value}"


MACHINE = "8x-a100-nvlink"
"""The machine on whose virtual clock answers are timed: the same for everybody."""


@dataclass(frozen=True)
class Seen:
    """What an answer did in one case.

    Attributes:
        case: the case.
        expected: the right results, by rank.
        got: the answer's results, by rank; None if the ranks did not finish.
        error: the error that a rank ended with, such as "IndexError: ..."; "" if there was none.
        where: the line of the answer that raised the error.
        mismatch: the same as `error` if two ranks' calls of one communication do not match; "" otherwise.
        hang: the report of which rank waits where, if the ranks hang; "" otherwise.
        trace: what the ranks recorded.
        printed: the lines that the ranks printed.
        schedule: the answer's schedule, if the answer is one.
        simulated: the schedule's simulated timeline.
        budget: the budget that is exceeded, as `Budget.what`; "" if none is.
        used: by rank, the FLOPs of its matrix products, and the most bytes that its tensors held.
        target: what the solution did in the same case; None if it did not run.
        raced: whether wrong results depend on how fast messages were.
    """

    case: Case
    expected: Sequence[Any] = ()
    got: list[Any] | None = None
    error: str = ""
    where: str = ""
    mismatch: str = ""
    hang: str = ""
    trace: Trace | None = None
    printed: list[str] = field(default_factory=list)
    schedule: Schedule | None = None
    simulated: Timeline | None = None
    budget: str = ""
    used: Sequence[tuple[float, float]] = ()
    target: Seen | None = None
    raced: bool = False

    @property
    def ranks(self) -> Sequence[Any]:
        """What each rank has recorded."""
        assert self.trace is not None, "nothing was recorded"
        return self.trace.ranks

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline on a machine of 8 GPUs, the same for everybody; for a schedule, the simulated one."""
        if self.simulated is not None:
            return self.simulated
        from mpkit.timeline.timeline import Timeline

        assert self.trace is not None, "nothing was recorded"
        return Timeline.of(self.trace, MACHINE)

    @cached_property
    def waits(self) -> Timeline:
        """The timeline of ranks that hang, on their own clock: what they wait in goes on for as long as all before."""
        from mpkit.timeline.timeline import Timeline

        assert self.trace is not None, "nothing was recorded"
        times = np.concatenate([rank.ops[name] for rank in self.trace.ranks for name in ("start", "end")])
        times = times[times > 0]
        last = int(times.max() + max(times.max() - times.min(), 1_000_000))  # ns
        ranks = []
        for rank in self.trace.ranks:
            ops = rank.ops.copy()
            ops["end"][ops["end"] == 0] = last
            ranks.append(replace(rank, ops=ops))
        return Timeline.of(replace(self.trace, ranks=ranks), clock="measured")

    @property
    def is_finished(self) -> bool:
        """Whether all ranks finished without an error."""
        return self.got is not None


@dataclass(frozen=True)
class Budget:
    """The most that a right answer may use.

    Attributes:
        what: what is limited, in words, such as "bytes that a rank sends".
        measure: the function that measures it in what an answer did.
        limit: the limit, a number or a function of the case.
        unit: "bytes", "seconds", or "" if there is no unit.
    """

    what: str
    measure: Callable[[Seen], float]
    limit: float | Callable[[Case], float]
    unit: str = ""

    def limit_for(self, case: Case) -> float:
        """Return the limit in a case."""
        return self.limit(case) if callable(self.limit) else self.limit

    def row(self, seen: Seen) -> CheckRow:
        """Check whether an answer kept to the budget."""
        limit, used = self.limit_for(seen.case), self.measure(seen)
        ok = used <= limit * (1 + 1e-9)
        what, most = f"{self.what}, on {seen.case}", f"at most {self._spell(limit)}"
        return CheckRow(what, most, self._spell(used), ok, replace(seen, budget=self.what))

    def _spell(self, amount: float) -> str:
        from mpkit.common.units import bytes_text, seconds

        return {"bytes": bytes_text, "seconds": seconds}.get(self.unit, "{:g}".format)(amount)


@dataclass(frozen=True)
class Mistake:
    """A misconception, and how to recognize it.

    Attributes:
        name: its name, such as "summed-not-averaged".
        hints: two or more, from a question to almost the solution; the student gets the next one each time.
        wrong: the source of an answer that has it, by whose signature it is recognized (`mpkit.course.signatures`).
    """

    name: str
    hints: Sequence[str]
    wrong: str = ""


@dataclass(frozen=True)
class CheckRow:
    """A line of the table: one thing that was checked.

    Attributes:
        what: what was checked, such as "the sum, on 3 ranks".
        expected: the expected result, in words.
        got: the answer's result, in words.
        ok: whether the check passed.
        seen: what the answer did in the case; None if no rank ran.
    """

    what: str
    expected: str
    got: str
    ok: bool
    seen: Seen | None = None


@dataclass(frozen=True, kw_only=True)
class Exercise(ABC):
    """The base of all kinds of exercises.

    The module that defines an exercise has the rest of its code. The module's name is the exercise's name, and the
    code between `# %% answer` and `# %% checks` is the student's cell, in which the student writes the lines between
    `### BEGIN SOLUTION` and `### END SOLUTION`. The text is in the file of the same name that ends in `.md`.
    `complete` puts all together: only what is special to an exercise is written as an argument.

    Attributes:
        solution: the right answer: the function, class or value that the cell defines last.
        name_of_answer: the name that the cell gives to it.
        start: from the text, as all that follow: the hint for a student who has not written anything yet.
        mistakes: three or more; the one that shows gives the hint.
        otherwise: the hints if no mistake shows.
        after: the tutorial notebook that prepares for the exercise, such as "03-data-parallel".
        place: the number by which the exercises of a family are sorted.
        predict: the question of `mk.predict` that a student's notebook asks before the answer's cell; "": none.
        result: what is compared with what is expected, in words, such as "the sum".
        points: the points in grading.
    """

    solution: Any = None
    name_of_answer: str = ""
    start: str = ""
    mistakes: Sequence[Mistake] = ()
    otherwise: Sequence[str] = ()
    after: str = ""
    place: float = 0.0
    predict: str = ""
    result: str = ""
    points: int = 10

    def complete(self, module: ModuleType, name_of_answer: str, texts: Mapping[str, Any]) -> Self:
        """Return the exercise with its text's parts, and with the functions that its module calls like an attribute."""
        own = {each.name: getattr(module, each.name) for each in fields(self) if hasattr(module, each.name)}
        own |= {"solution": getattr(module, name_of_answer), "name_of_answer": name_of_answer}
        return replace(self, **{**own, **texts})

    @abstractmethod
    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Try the answer; yield a row for each thing checked, up to the first that is wrong."""

    def try_again(self, answer: PackedAnswer, seen: Seen, room: Room) -> Seen | None:
        """Return what another answer does in the same case, such as the solution; None if there is nothing to run."""
        return None

    def is_untouched(self, seen: Seen) -> bool:
        """Return whether the student has not written anything yet."""
        return "NotImplementedError" in seen.error
