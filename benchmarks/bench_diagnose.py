"""Diagnoses held to truth: 12 planted causes of 5 sizes each, and which finding comes first; and how long one takes.

The cases are those of `tests/diagnosis/planted.py`: played runs whose operations vary by 2 %, with one cause each. They
show that a cause alone is told from all others; runs with several causes are ordered by what each costs.
"""

from __future__ import annotations

import time
from typing import Any

import mpkit as mk
from tests.diagnosis.planted import CASES, first_finding

LARGE = mk.Plan.pipeline("1f1b", 64, 256)


def measure() -> list[dict[str, Any]]:
    """Return a row for each kind of cause, one for all, and the time of large diagnoses."""
    right: dict[str, list[str]] = {}
    for case in CASES:
        found = first_finding(case)
        right.setdefault(case.kind, []).append(found)
        print(
            f"{case.kind:<24} {case.size:<56} -> {found or 'nothing'}{'' if found == case.kind else '   <-- wrong'}"
        )
    rows = [
        {
            "name": f"diagnosis: {kind}",
            "value": sum(each == kind for each in found),
            "unit": f"of {len(found)} first",
        }
        for kind, found in right.items()
    ]
    whole = sum(each == kind for kind, found in right.items() for each in found)
    rows.append({"name": "diagnosis: all planted causes", "value": whole, "unit": f"of {len(CASES)} first"})
    timeline = mk.simulate(LARGE)
    operations = len(timeline.spans)
    for name, call in (("critical path", timeline.critical_path), ("diagnosis", timeline.diagnose)):
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        rows.append({"name": f"{name} of {operations:,} operations, 64 ranks", "value": took, "unit": "s"})
    return rows
