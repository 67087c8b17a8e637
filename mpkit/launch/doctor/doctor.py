"""`mk.doctor()`: probe, measure, judge, report."""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING

from mpkit.common.calls import answers
from mpkit.common.tracebacks import public
from mpkit.errors import MpkitError
from mpkit.launch.doctor.measure import RankMeasurements, measure
from mpkit.launch.doctor.probe import Facts, probe, torch_build
from mpkit.launch.doctor.report import CheckupReport, Topic, find_topic
from mpkit.launch.doctor.rules import findings
from mpkit.launch.doctor.variables import table

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster

__all__ = ["doctor", "judge"]


@public
@answers('mk.doctor("slow scaling")', {"fast": "To leave out what is measured: quick=True."})
def doctor(topic: str | None = None, *, quick: bool = False) -> CheckupReport:
    """Examine this machine: devices, links, host, variables, and what two ranks measure.

    Nothing is changed, and nothing is sent anywhere. It takes some seconds; what cannot be asked is listed as not
    checked.

    Args:
        topic: a common issue: "gpus not found", "gpu 0 busier", "out of memory", "slow scaling", "nccl time-outs"; the
            report then has its steps and the findings that belong to it. "variables" explains those of nccl one by one.
        quick: leave out what is measured on ranks.

    Raises:
        ValueError: there is no such topic.
    """
    begin = monotonic()
    asked = None if topic is None else find_topic(topic)
    if asked is not None and asked.name == "variables":
        quick = True
    with ExitStack() as stack:
        # The cluster's helper process imports torch while commands are asked.
        cluster = "left out (quick)" if quick else _cluster(stack)
        facts = probe()
        found = cluster if isinstance(cluster, str) else _measure_on_ranks(cluster)
    return judge(facts, found, asked, seconds=monotonic() - begin)


def judge(
    facts: Facts, measured: RankMeasurements | str, topic: Topic | None = None, *, seconds: float = 0.0
) -> CheckupReport:
    """Return the report that follows from facts, and from what ranks measured, or why they did not."""
    found = findings(facts, measured)
    if topic is not None:
        wanted = "variables" if topic.name == "variables" else None
        found = [each for each in found if topic.name in each.topics or each.subject == wanted]
    explained = [each for each in table().values() if each.meaning and topic and topic.name == "variables"]
    return CheckupReport(tuple(found), topic, tuple(explained), facts["composed"], seconds)


def _cluster(stack: ExitStack) -> Cluster | str:
    """Make one rank per GPU, or two on CPUs; the stack closes it. Where there can be none, say why."""
    from mpkit.launch.session.cluster import Cluster

    gpus = torch_build()["gpus"]
    try:
        return stack.enter_context(Cluster(ranks=gpus) if gpus > 1 else Cluster(ranks=2, device="cpu"))
    except ValueError as error:
        return f"no ranks can be started here: {_first_line(error)}"


def _measure_on_ranks(cluster: Cluster) -> RankMeasurements | str:
    """Measure on ranks. What fails there is a finding, not the end of the report."""
    try:
        return measure(cluster)
    except MpkitError as error:
        return f"measuring on ranks failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
