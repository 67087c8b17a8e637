"""Plan: the one description of a strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from mpkit.mesh import Mesh
from mpkit.plan_checks import call_of, checked_cut, checked_degree, checked_recompute, checked_schedule
from mpkit.schedule import Schedule

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Everything that a strategy can vary. A Plan that cannot work says why at once.

    Attributes:
        pp: pipeline-parallel ranks, each with one stage of the model: p.
        dp: replicas, each with a part of the batch; 1 in this version.
        tp: ranks that share each layer; 1 in this version.
        schedule: "naive" or "gpipe", or a `Schedule` of one's own (or its rows: ["0F0 0B0", "1F0 1B0"]).
        microbatches: the parts that a batch is split into: m.
        virtual_stages: stages a rank; 1 for the schedules of this version.
        recompute: "none", or "full": keep a stage's input only, and compute the rest again before the backward.
        cut: the first layer of each stage but stage 0, by number or name; None balances the stages by FLOPs.

    >>> plan = Plan(pp=4, schedule="gpipe", microbatches=8)
    >>> plan
    Plan(pp=4, schedule='gpipe', microbatches=8)
    >>> plan == Plan.gpipe(4, 8) == Plan.from_json(plan.to_json())
    True
    >>> plan.bubble_in_theory
    Fraction(3, 11)

    Raises:
        ValueError: with what was given, why it cannot work, and a Plan that would.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    schedule: str | Schedule = "gpipe"
    microbatches: int = 1
    virtual_stages: int = 1
    recompute: str = "none"
    cut: Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        # Each check relies on those before it.
        for name in ("pp", "dp", "tp", "microbatches", "virtual_stages"):
            object.__setattr__(self, name, checked_degree(self, name))
        object.__setattr__(self, "schedule", checked_schedule(self))
        object.__setattr__(self, "recompute", checked_recompute(self))
        object.__setattr__(self, "cut", checked_cut(self))

    # ------------------------------------------------------------ the classics by name

    @classmethod
    def serial(cls, microbatches: int = 1) -> Plan:
        """One rank, the whole model; with micro-batches, gradients accumulate over them.

        >>> Plan.serial().ranks
        1
        """
        return cls(schedule="naive", microbatches=microbatches)

    @classmethod
    def naive_mp(cls, stages: int, *, cut: Sequence[int | str] | None = None) -> Plan:
        """Naive model parallelism: cut over ranks, one of which works at a time.

        >>> Plan.naive_mp(4).bubble_in_theory
        Fraction(3, 4)
        """
        return cls(pp=stages, schedule="naive", cut=cut)

    @classmethod
    def gpipe(
        cls,
        stages: int,
        microbatches: int,
        *,
        recompute: str = "none",
        cut: Sequence[int | str] | None = None,
    ) -> Plan:
        """GPipe (Huang et al. 2019): a pipeline over micro-batches.

        >>> Plan.gpipe(4, 8, recompute="full")
        Plan(pp=4, schedule='gpipe', microbatches=8, recompute='full')
        """
        return cls(pp=stages, microbatches=microbatches, recompute=recompute, cut=cut)

    @classmethod
    def from_schedule(cls, schedule: Schedule | Sequence[str], *, recompute: str = "none") -> Plan:
        """A schedule of your own, with the degrees that it has.

        >>> Plan.from_schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]).ranks
        2
        """
        own = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
        return cls(pp=own.ranks, microbatches=own.microbatches, schedule=own, recompute=recompute)

    # ------------------------------------------------------------ what follows from it

    @property
    def ranks(self) -> int:
        """How many ranks it takes: pp x dp x tp."""
        return self.mesh.size

    @property
    def mesh(self) -> Mesh:
        """Which rank has which place."""
        return Mesh(self.pp, self.dp, self.tp)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        own = self.schedule
        return own.stages if isinstance(own, Schedule) else self.pp * self.virtual_stages

    @property
    def bubble_in_theory(self) -> Fraction | None:
        """The idle share of a step's span, averaged over ranks, for equal stages and messages that take no time.

        Naive (p-1)/p; GPipe (p-1)/(m+p-1) (Huang et al. 2019, section 2.3; Megatron divides by the ideal time
        instead). With recomputation a micro-batch takes 4 instead of 3, its backward being twice its forward; all
        but the last stage recompute while they wait for a gradient. None for a schedule of one's own:
        `mpkit.simulate(plan).bubble` says.
        """
        p, m = self.pp, self.microbatches
        if isinstance(self.schedule, Schedule):
            return None
        together = 1 if self.schedule == "naive" else m  # the micro-batches that go through at once
        idle, busy = 3 * (p - 1), (3 if self.recompute == "none" else 4) * together
        return Fraction(idle, idle + busy)

    def describe(self) -> str:
        """The plan in a sentence or two.

        >>> print(Plan.gpipe(4, 8).describe())
        gpipe on 4 ranks: the model in 4 stages, each batch in 8 micro-batches. Bubble in theory 3/11 = 0.273.
        """
        name = self.schedule.name if isinstance(self.schedule, Schedule) else self.schedule
        if self.ranks == 1:
            title, stages = "Serial on 1 rank", "the whole model"
        else:
            title, stages = f"{name} on {self.ranks} ranks", f"the model in {self.stages} stages"
        parts = "whole" if self.microbatches == 1 else f"in {self.microbatches} micro-batches"
        again = "" if self.recompute == "none" else ", activations computed again in the backward"
        bubble = self.bubble_in_theory
        theory = "" if bubble is None else f" Bubble in theory {bubble} = {float(bubble):.3f}."
        return f"{title}: {stages}, each batch {parts}{again}.{theory if self.ranks > 1 else ''}"

    def __repr__(self) -> str:
        return call_of(self)

    # ------------------------------------------------------------ JSON

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        own = self.schedule
        if isinstance(own, Schedule):
            rows = [" ".join(map(str, row)) for row in own.rows]
            values["schedule"] = {"rows": rows, "name": own.name, "stage_to_rank": own.stage_to_rank}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Plan:
        """Read what `to_json` wrote, or the mapping it stands for.

        Raises:
            ValueError: it is no plan, or one that cannot work.
        """
        try:
            values = dict(json.loads(text) if isinstance(text, str) else text)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"This is no plan in JSON ({error}): {str(text)[:80]!r}. "
                f"Plan.to_json writes one, such as {cls.gpipe(4, 8).to_json()}"
            ) from None
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"A plan has no {name!r}.{hint} It has {', '.join(known)}.")
        if isinstance(values.get("schedule"), Mapping):
            values["schedule"] = Schedule(**values["schedule"])
        return cls(**values)
