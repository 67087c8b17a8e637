"""Evidence: what rules look at: one step as a graph, its machine and its plan."""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import percent, seconds
from mpkit.devices.catalogue import hardware as catalogue
from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.timeline.dependencies.critical_path import CriticalPath
from mpkit.timeline.dependencies.graph import StepGraph
from mpkit.timeline.findings import Finding
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane

WORTH = 0.02
"""The share of a step that a cause must cost to be worth a finding: below that, steps differ from each other anyway."""


class StepWork(NamedTuple):
    """The actions of a step, one row each: (n,) arrays."""

    row: Array  # of its span
    rank: Array
    kind: Array
    stage: Array
    took: Array  # seconds of work, without waits and copies
    flops: Array  # 0 if unknown


@dataclass
class Evidence:
    """One step of a timeline."""

    whole: Timeline
    path: CriticalPath
    given: Hardware | None  # the machine that was named for the diagnosis; None: that of the timeline

    def __post_init__(self) -> None:
        self.graph: StepGraph = self.path.graph
        self.spans: Array = self.path.timeline.spans
        self.step, self.waits = self.path.step, self.path.waiting

    @cached_property
    def one(self) -> Timeline:
        """The timeline of the step alone."""
        timeline = self.path.timeline
        assert isinstance(timeline, Timeline)
        return timeline

    @cached_property
    def machine(self) -> Hardware | None:
        """The machine of the timeline, if it is known."""
        if self.given is not None:
            return self.given
        known, name = catalogue(), str(self.whole.meta.get("hardware"))
        return catalogue(name) if name in known else None

    @cached_property
    def plan(self) -> Plan | None:
        """The plan, if the timeline has one."""
        text = self.whole.meta.get("plan")
        return Plan.from_json(text) if isinstance(text, str) else None

    @cached_property
    def there(self) -> Array:
        """The rows of its operations that take time."""
        return np.array(sorted(self.graph.of_row), int)

    @cached_property
    def work(self) -> StepWork:
        """Its actions."""
        own = self.spans[self.there]
        row = self.there[(own["lane"] == Lane.COMPUTE) & (own["depth"] == 0)]
        took = np.array([self.graph.took[self.graph.of_row[int(r)]].sum() for r in row])
        own = self.spans[row]
        return StepWork(row, own["rank"], own["kind"], own["stage"], took, own["flops"])

    @cached_property
    def stages(self) -> list[frozenset[int]]:
        """The stages that each rank works on."""
        ranks = range(self.graph.world_size)
        return [frozenset(self.work.stage[self.work.rank == rank].tolist()) for rank in ranks]

    def rows(self, *kinds: Kind) -> Array:
        """Return the rows of the step's operations of these kinds that take time."""
        return np.asarray(self.there[np.isin(self.spans["kind"][self.there], kinds)])

    # ---- played again

    def gain(self, took: Array) -> float:
        """Return by how many seconds the step would be shorter with other durations, (n,) by piece of the graph."""
        return self.path.step_time - self.graph.time_with(took)

    def gain_without(self, rows: Array) -> float:
        """Return by how many seconds the step would be shorter without the operations of some spans."""
        return self.gain(self.graph.durations_without(self.graph.nodes_of(rows)))

    def gain_scaled(self, rows: Iterable[int], factors: Iterable[float]) -> float:
        """Return by how many seconds the step would be shorter if operations took `factors` times as long."""
        took: Array = self.graph.took.copy()
        for row, factor in zip(rows, factors, strict=True):
            took[self.graph.of_row.get(int(row), [])] *= factor
        return self.gain(took)

    # ---- in words

    def share(self, time: float) -> str:
        """Return seconds as a percentage of the step."""
        return percent(time / self.path.step_time) if self.path.step_time else "0 %"

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Name ranks as the program numbers them, as in "Ranks 0 and 1"."""
        return list_ranks(self.whole.rank_number(rank) for rank in sorted(ranks))

    def worth(self, gain: float) -> bool:
        """Return whether so many seconds are worth a finding."""
        return gain >= WORTH * self.path.step_time and gain > 0

    def findings(
        self, kind: str, case: str = "", *, gain: float, rows: Iterable[int] = (), ranks: Iterable[int] | None = None,
        by: str = "replay", urgent: bool = False, reason: str = "", **values: object,
    ) -> list[Finding]:  # fmt: skip
        """Return a finding in this step, in the words of `findings.toml`; none if it is not worth one.

        The texts of "kind: case" precede those of the kind, and `reason` precedes both; `values` are what they name in
        braces besides gain, share (of the step), step, ranks and Ranks. `ranks` are by default those of the spans
        `rows`. An urgent finding, about to end the run, needs no gain.
        """
        if not urgent and not self.worth(gain):
            return []
        ops = tuple(int(row) for row in rows)
        where = tuple(sorted({int(self.spans["rank"][row]) for row in ops}) if ranks is None else ranks)
        names = self.name_ranks(where) if where else ""
        known = {
            "gain": seconds(gain), "share": self.share(gain), "step": "" if self.step < 0 else self.step,
            "Ranks": names, "ranks": names[:1].lower() + names[1:], **values,
        }  # fmt: skip
        texts = _texts()[kind] | _texts().get(f"{kind}: {case}", {}) | ({"reason": reason} if reason else {})
        said = {name: text.format_map(known) for name, text in texts.items()}
        whys = said["words"], said["reason"], said["remedy"]
        return [Finding(kind, *whys, gain, by, self.step, where, ops, said["check"], urgent)]


@cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))


Rule = Callable[[Evidence, Sequence[Finding]], list[Finding]]
"""Returns findings of a step, given those of the rules before it."""


def list_ranks(numbers: Iterable[str]) -> str:
    """Name ranks by their numbers in the program.

    >>> list_ranks("3"), list_ranks("01"), list_ranks("01234567"), list_ranks("13?")
    ('Rank 3', 'Ranks 0 and 1', 'Ranks 0 to 7', 'Ranks 1, 3 and ?')
    """
    these = list(numbers)
    if len(these) == 1:
        return f"Rank {these[0]}"
    if len(these) > 2 and these == [str(int(these[0]) + i) for i in range(len(these)) if these[0] != "?"]:
        return f"Ranks {these[0]} to {these[-1]}"
    return f"Ranks {', '.join(map(str, these[:-1]))} and {these[-1]}"
