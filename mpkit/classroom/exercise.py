"""An exercise, as its author writes it: what is asked, in which cases it is tried, and what students get wrong.

Case       one set of hidden inputs: how many ranks, a seed, sizes
Budget     what an answer may use: bytes, messages, seconds on the virtual clock
Mistake    a misconception: a wrong answer that has it, how it shows, and hints, each more specific
Exercise   all of it; kinds of exercises differ in how an answer is examined
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mpkit.classroom.room import Answer, Room
    from mpkit.classroom.seen import Seen

__all__ = ["Budget", "Case", "Exercise", "Mistake", "Row"]


@dataclass(frozen=True)
class Case:
    """One set of inputs that the student has not seen.

    Attributes:
        ranks: how many run the answer.
        seed: of the inputs and of the delays.
        sizes: whatever else makes the case, by name: `case["microbatches"]`.
    """

    ranks: int
    seed: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.sizes[name]

    def __str__(self) -> str:
        """In words.

        >>> print(Case(2, sizes={"microbatches": 6, "max_norm": 0.3, "steps": 1}))
        2 ranks, 6 micro-batches, max norm 0.3, 1 step
        """
        return ", ".join(_words(name, value) for name, value in {"ranks": self.ranks, **self.sizes}.items())

    def generator(self, rank: int = 0) -> torch.Generator:
        """Random numbers of a rank; the same in every process.

        >>> import torch
        >>> torch.randint(100, (3,), generator=Case(2, seed=1).generator(0)).tolist()
        [7, 79, 47]
        """
        import torch

        return torch.Generator().manual_seed(1000 * self.seed + rank)


def _words(name: str, value: Any) -> str:
    """What is counted comes after its number: "4 steps", and "length 4"."""
    name = name.replace("_", " ").replace("microbatch", "micro-batch").replace("gpus", "GPUs")
    if isinstance(value, int) and name.endswith("s") and not name.endswith("bytes"):
        return f"{value} {name}" if value != 1 else f"1 {name.removesuffix('s').replace('batche', 'batch')}"
    return f"{name} {value}"


@dataclass(frozen=True)
class Budget:
    """What an answer that is right may use at most.

    Attributes:
        what: in words, such as "bytes that a rank sends".
        measure: takes what was seen.
        limit: a number, or a function of the case.
        unit: "bytes", "seconds", or none.
    """

    what: str
    measure: Callable[[Seen], float]
    limit: float | Callable[[Case], float]
    unit: str = ""

    def of(self, case: Case) -> float:
        """The limit in a case."""
        return self.limit(case) if callable(self.limit) else self.limit

    def row(self, seen: Seen) -> Row:
        """Whether what was seen keeps to it."""
        limit, used = self.of(seen.case), self.measure(seen)
        ok = used <= limit * (1 + 1e-9)
        what = f"{self.what}, on {seen.case}"
        return Row(
            what, f"at most {self._spell(limit)}", self._spell(used), ok, replace(seen, budget=self.what)
        )

    def _spell(self, amount: float) -> str:
        from mpkit.views.units import bytes_text, seconds

        return {"bytes": bytes_text, "seconds": seconds}.get(self.unit, "{:g}".format)(amount)


@dataclass(frozen=True)
class Mistake:
    """A misconception, and how to tell it.

    Attributes:
        name: such as "summed-not-averaged".
        hints: two or more, from a question to all but the solution: the student gets the next one each time.
        wrong: an answer that has it: (old, new) pairs of text that turn the solution into it, or its whole source.
        when: whether what was seen where a check failed shows it. None: if the wrong answer is seen to do the same
            there. (Ranks that hang take seconds: those mistakes had better be told from the report, `seen.hang`.)
    """

    name: str
    hints: Sequence[str]
    wrong: Sequence[tuple[str, str]] | str
    when: Callable[[Seen], Any] | None = None


@dataclass(frozen=True)
class Row:
    """A line of the table: what was checked.

    Attributes:
        what: such as "the sum, on 3 ranks".
        expected, got: in words.
        ok: whether it holds.
        seen: what it was read from; None where no rank ran.
    """

    what: str
    expected: str
    got: str
    ok: bool
    seen: Seen | None = None


@dataclass(frozen=True, kw_only=True)
class Exercise(ABC):
    """What all kinds of exercises have.

    The module that it is made in says the rest: its name is the exercise's, its docstring the text (a title, then
    Markdown), and what stands between `# %% answer` and `# %% checks` the student's cell, of which the lines between
    `### BEGIN SOLUTION` and `### END SOLUTION` are for the student to write.

    Attributes:
        solution: the answer that is right, a function, class or value of that cell.
        start: the first hint for who has nothing yet.
        mistakes: three or more; the first whose `when` holds gives the hint, so the special come before the general.
        otherwise: hints where none does.
        after: the tutorial notebook that prepares for it, such as "02-data-parallel".
        place: exercises of a family come in this order.
        points: for grading.
        called: the name that the cell gives to an answer that is no function or class.
    """

    solution: Any
    start: str
    mistakes: Sequence[Mistake]
    otherwise: Sequence[str]
    after: str
    place: float
    points: int = 10
    called: str = ""

    @property
    def name_of_answer(self) -> str:
        """The name that the student's cell gives it."""
        return self.called or str(self.solution.__name__)

    @abstractmethod
    def examine(self, answer: Answer, room: Room) -> Iterator[Row]:
        """Try the answer; a row for each thing checked, up to the first that is wrong."""

    def again(self, answer: Answer, seen: Seen, room: Room) -> Seen | None:
        """What another answer does where that was seen; None where there is nothing to see."""
        return None

    def untouched(self, seen: Seen) -> bool:
        """Whether the student has written nothing yet."""
        return "NotImplementedError" in seen.error

    def alike(self, seen: Seen, other: Seen) -> bool:
        """Whether two answers did the same there."""
        return seen.like(other)
