"""An exercise, as its author writes it: the task, the cases in which an answer is tried, and what students get wrong.

Case       one set of hidden inputs: the number of ranks, a seed, sizes
Budget     the most that an answer may use: bytes, messages, seconds on the virtual clock
Mistake    a misconception: a wrong answer that has it, how to recognize it, and hints, each more specific
Exercise   all of these together; kinds of exercises differ in how an answer is examined
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mpkit.course.framework.observation import Seen
    from mpkit.course.framework.room import PackedAnswer, Room

__all__ = [
    "HOMES", "SOLUTIONS", "UNFORESEEN", "Answer", "Budget", "Case", "CheckRow", "Exercise", "Mistake", "Recognizer",
]  # fmt: skip

SOLUTIONS = "mpkit_solutions"
"""The package of the distribution mpkit-solutions."""

HOMES = (SOLUTIONS, "mpkit.course.exercises")
"""The packages in which exercises are, with their solutions."""

UNFORESEEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What looking at results raises where they have another form than the exercise asks for, such as None or a tensor of
another shape. Anything else is an error of the exercise, or of a class that the student wrote, and is raised."""

Answer = Callable[..., Any]
"""A student's function or class."""

Recognizer = Callable[["Seen"], Any]
"""Whether what an answer did shows a mistake."""


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


@dataclass(frozen=True)
class Budget:
    """The most that a right answer may use.

    Attributes:
        what: what is limited, in words, such as "bytes that a rank sends".
        measure: the function that measures it in what an answer did.
        limit: the limit, a number or a function of the case.
        unit: "bytes", "seconds", or "" if there is no unit.
        ranked: whether the leaderboard of a class lists right answers by it, the smallest first.
    """

    what: str
    measure: Callable[[Seen], float]
    limit: float | Callable[[Case], float]
    unit: str = ""
    ranked: bool = False

    def limit_for(self, case: Case) -> float:
        """Return the limit in a case."""
        return self.limit(case) if callable(self.limit) else self.limit

    def row(self, seen: Seen) -> CheckRow:
        """Check whether an answer kept to the budget."""
        limit, used = self.limit_for(seen.case), self.measure(seen)
        ok = used <= limit * (1 + 1e-9)
        what, most = f"{self.what}, on {seen.case}", f"at most {self._spell(limit)}"
        return CheckRow(
            what, most, self._spell(used), ok, replace(seen, budget=self.what), used if self.ranked else None
        )

    def _spell(self, amount: float) -> str:
        from mpkit.common.units import bytes_text, seconds

        return {"bytes": bytes_text, "seconds": seconds}.get(self.unit, "{:g}".format)(amount)


@dataclass(frozen=True)
class Mistake:
    """A misconception, and how to recognize it.

    Attributes:
        name: its name, such as "summed-not-averaged".
        hints: two or more, from a question to almost the solution; the student gets the next one each time.
        wrong: the source of an answer that has it; "": `when` recognizes it in any exercise.
        when: whether what the answer did in the case that failed shows the mistake. None: it does if `wrong` does the
            same in that case. (Ranks that hang take seconds, so such mistakes are better recognized by `seen.hang`.)
    """

    name: str
    hints: Sequence[str]
    wrong: str = ""
    when: Recognizer | None = None


@dataclass(frozen=True)
class CheckRow:
    """A line of the table: one thing that was checked.

    Attributes:
        what: what was checked, such as "the sum, on 3 ranks".
        expected: the expected result, in words.
        got: the answer's result, in words.
        ok: whether the check passed.
        seen: what the answer did in the case; None if no rank ran.
        score: the number by which a class's leaderboard ranks the answer; None if it is not ranked.
    """

    what: str
    expected: str
    got: str
    ok: bool
    seen: Seen | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Exercise(ABC):
    """The base of all kinds of exercises.

    The module that defines an exercise has the rest of its code. The module's name is the exercise's name, and the
    code between `# %% answer` and `# %% checks` is the student's cell, in which the student writes the lines between
    `### BEGIN SOLUTION` and `### END SOLUTION`. The text is in the file of the same name that ends in `.md`
    (`mpkit.course.exercise_text`), from which `start`, `mistakes` and `otherwise` are read.

    Attributes:
        solution: the right answer: a function, class or value of that cell.
        when: by name, what recognizes a mistake whose wrong answer need not be run (`Mistake.when`).
        start: the hint for a student who has not written anything yet.
        mistakes: three or more; the first one that shows gives the hint, so special ones come before general ones.
        otherwise: the hints if no mistake shows.
        after: the tutorial notebook that prepares for the exercise, such as "02-data-parallel".
        place: the number by which the exercises of a family are sorted.
        points: the points in grading.
        called: the name that the cell gives to the answer if it is neither a function nor a class.
        predict: the question of `mk.predict` that a student's notebook asks before the answer's cell; "": none.
    """

    solution: Any
    after: str
    place: float
    points: int = 10
    called: str = ""
    predict: str = ""
    when: Mapping[str, Recognizer] = field(default_factory=dict)
    start: str = ""
    mistakes: Sequence[Mistake] = ()
    otherwise: Sequence[str] = ()

    @property
    def name_of_answer(self) -> str:
        """The name that the student's cell gives to the answer."""
        return self.called or str(self.solution.__name__)

    @property
    def needs_ranks(self) -> bool:
        """Whether an answer runs on several ranks; in a browser there are none."""
        return False

    @abstractmethod
    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Try the answer; yield a row for each thing checked, up to the first that is wrong."""

    @abstractmethod
    def try_answer(self, answer: PackedAnswer, room: Room) -> Seen:
        """Run the answer in the first case, without saying whether it is right."""

    def questions_of(self, stub: Any) -> tuple[str, ...]:
        """Return the questions that an answer has to have a value for, by the cell that is handed out."""
        return ()

    def try_again(self, answer: PackedAnswer, seen: Seen, room: Room) -> Seen | None:
        """Return what another answer does in the same case; None if there is nothing to run."""
        return None

    def is_untouched(self, seen: Seen) -> bool:
        """Return whether the student has not written anything yet."""
        return "NotImplementedError" in seen.error

    def same_result(self, seen: Seen, other: Seen) -> bool:
        """Return whether two answers did the same in a case."""
        return seen.matches(other)
