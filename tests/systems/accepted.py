"""`python -m tests.systems.accepted`: what `plan.to` writes for 100 random plans, given to each framework's check."""

import logging
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings

from mpkit import Plan
from mpkit.plan.formats.frameworks import FORMATS
from tests.formats.plans import plans
from tests.systems.validators import MISSING, VALIDATORS

PLANS = 100


@dataclass
class Result:
    """What became of the plans: accepted, refused by the exporter with a reason, or wrong."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def accepted(name: str) -> Result:
    """Write random plans in a format, and let the framework check them.

    Raises:
        ImportError: the framework is not installed.
    """
    check, result = VALIDATORS[name][1], Result()

    @settings(max_examples=PLANS, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(plan=plans())
    def each(plan: Plan) -> None:
        try:
            text = str(plan.to(name, micro_batch=2))
        except ValueError as error:
            result.refused[str(error).partition(": ")[2].partition(":")[0]] += 1
            return
        try:
            check(text, plan)
        except ImportError:
            raise
        except Exception as error:  # whatever a framework raises is what is looked for
            result.wrong.append(f"{plan!r}: {type(error).__name__}: {error}")
        else:
            result.accepted += 1

    each()
    return result


def main() -> int:
    """Print a row per format."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failed = 0
    for name in FORMATS:
        if name not in VALIDATORS:
            print(f"{name:12} not checked: {MISSING[name]}")
            continue
        try:
            result = accepted(name)
        except ImportError as error:
            print(f"{name:12} not checked: {error}")
            continue
        failed += len(result.wrong)
        print(f"{name:12} {result.accepted:3} accepted by {VALIDATORS[name][0]}")
        for reason, times in result.refused.items():
            print(f"{'':12} {times:3} not written: {reason}")
        for wrong in result.wrong[:3]:
            print(f"{'':12}     WRONG, one of {len(result.wrong)}: {wrong[:600]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
