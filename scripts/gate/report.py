"""The last lines of the gate, 60 at most: each failed test by name, what was not run, the slowest, the machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.gate.steps import Ended

__all__ = ["Report", "Test", "read"]

LINES = 60
WIDTH = 200


@dataclass
class Test:
    """What the records say of one test."""

    id: str
    where: str = ""
    seconds: float = 0.0
    outcome: str = "running"
    error: list[str] = field(default_factory=list)


def read(*paths: Path) -> dict[str, Test]:
    """Return all tests of these records by id: the outcome is "running" for one that never ended."""
    tests: dict[str, Test] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            event: dict[str, Any] = json.loads(line)
            test = tests.setdefault(event["id"], Test(event["id"]))
            if event["event"] == "start":
                test.where, test.outcome = f"{event['file']}:{event['line']}", "running"
            elif event["event"] == "report":
                test.seconds += event["seconds"]
                if event["outcome"] == "failed":
                    test.outcome, test.error = "failed", test.error or event["error"]
                elif test.outcome == "running" and event["outcome"] == "skipped":
                    test.outcome = "skipped"
            elif event["event"] == "finish" and test.outcome == "running":
                test.outcome = "passed"
    return {name: test for name, test in tests.items() if test.where or test.outcome == "failed"}


class Report:
    """Collects what the steps leave, and says it in `LINES` lines."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.steps: list[Ended] = []
        self.not_run: list[str] = []
        self._step_errors: dict[str, list[str]] = {}

    def records(self) -> dict[str, Test]:
        """Return the tests of all steps but those that were run again."""
        return read(*sorted(path for path in self.out.glob("*.jsonl") if not path.name.startswith("again")))

    def failures(self) -> list[Test]:
        """Return what failed, or was running when its time was over."""
        return [test for test in self.records().values() if test.outcome in ("failed", "running")]

    def failed_step(self, name: str, log: Path) -> None:
        """Keep what a step that is no pytest said last."""
        said = log.read_text(encoding="utf-8").strip().splitlines()
        errors = [line for line in said if "error" in line.lower() or line.startswith("FAILED")]
        self._step_errors[name] = (errors or said)[-5:]

    @property
    def flaky(self) -> set[str]:
        """The ids of failed tests that passed alone, both times."""
        again = [read(self.out / f"again-{attempt}.jsonl") for attempt in (1, 2)]
        passed = [{name for name, test in tests.items() if test.outcome == "passed"} for tests in again]
        return {test.id for test in self.failures()} & passed[0] & passed[1]

    @property
    def holds(self) -> bool:
        """Whether everything passed that was run: no test failed both ways, no step ended otherwise than it should."""
        return not (self._broken_steps() or {test.id for test in self.failures()} - self.flaky)

    def _broken_steps(self) -> list[Ended]:
        """Return steps whose end no test explains: pytest ends with 1 for failed tests and with 5 for none."""
        return [
            step
            for step in self.steps
            if step.over or step.status not in (0, 1, 5) or (step.status == 1 and not self._explained(step))
        ]

    def _explained(self, step: Ended) -> bool:
        record = self.out / f"{step.name.replace(' ', '-')}.jsonl"
        return any(test.outcome == "failed" for test in read(record).values())

    def lines(self, machine: str) -> list[str]:
        """Return the report."""
        tests, flaky = self.records(), self.flaky
        failures = sorted(self.failures(), key=lambda test: test.id in flaky)
        passed = sum(test.outcome == "passed" for test in tests.values())
        body: list[str] = []
        for test in failures:
            body += self._failure(test, test.id in flaky)
        for step in self._broken_steps():
            late = "its time was over" if step.seconds else "not begun, since the gate's time was over"
            body.append(f"STEP {step.name}: {late if step.over else f'ended with {step.status}'}")
            body += ["  " + line for line in self._step_errors.get(step.name, [])]
        body += [f"NOT RUN {words}" for words in self.not_run]
        tail = [
            "steps: " + ", ".join(f"{s.name} {s.seconds:.0f} s" for s in self.steps if s.name[:5] != "again")
        ]
        slowest = sorted(tests.values(), key=lambda test: -test.seconds)[:10]
        tail += [
            "slowest: " + ", ".join(f"{test.id.rpartition('/')[2]} {test.seconds:.0f} s" for test in slowest)
        ]
        tail += [f"machine: {machine}", *self._stray_warnings()]
        verdict = "all passed" if self.holds else "failed"
        tail += [f"{verdict}; flaky: {len(flaky)}, not run: {len(self.not_run)}"]
        room = LINES - len(tail) - 2
        if len(body) > room:
            body = [*body[: room - 1], f"... and {len(body) - room + 1} lines more: {self.out}"]
        told = [f"ci: {line}"[:WIDTH] for line in [*body, *tail[:1]]] + [f"ci: {line}" for line in tail[1:]]
        return [*told, f"{passed} passed, {len(failures) - len(flaky)} failed"]

    def _failure(self, test: Test, flaky: bool) -> list[str]:
        word = (
            "FLAKY" if flaky else "RUNNING WHEN ITS TIME WAS OVER" if test.outcome == "running" else "FAILED"
        )
        again = [read(self.out / f"again-{attempt}.jsonl").get(test.id) for attempt in (1, 2)]
        alone = [one.outcome for one in again if one is not None]
        lines = [f"{word} {test.where} {test.id}", *(f"  {line}" for line in test.error[:3])]
        return [*lines, f"  again, alone: {', '.join(alone)}"] if alone else lines

    def _stray_warnings(self) -> list[str]:
        found = [
            event
            for path in self.out.glob("*.jsonl")
            for event in map(json.loads, path.read_text(encoding="utf-8").splitlines())
            if event["event"] == "warning"
        ]
        return (
            [f"warnings of the garbage collector: {len(found)}, last in {found[-1]['id']}"] if found else []
        )
