"""The list of a notebook's runs: what a row says, sorted, and two compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.common.display import draw
from mpkit.launch.session.run import Run
from mpkit.launch.session.run_list import RunList, keep
from mpkit.models import MLP


@pytest.fixture(scope="module")
def found(train: Callable[..., Run], clusters: Callable[[int], mk.Cluster]) -> RunList:
    """The rows of a pipeline, of DDP, and of a run that failed in its second step."""
    torch.manual_seed(0)
    model = MLP(2, 3)
    data = [(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))]
    how = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD, "steps": 3}
    runs = [train(model, data, plan, **how) for plan in (mk.Plan.gpipe(2, 4), mk.Plan.ddp(2))]
    wrong = [*data, (torch.ones(8, 2), torch.full((8,), 99))]  # no such class
    failed = clusters(2).train(model, wrong, mk.Plan.ddp(2), **how)
    failed._over.wait()
    return RunList([keep(run) for run in (*runs, failed)])


def test_a_row_says_what_came_out(found: RunList) -> None:
    pipeline, ddp, _ = found
    assert [row.status for row in found] == ["finished", "finished", "failed"]
    assert pipeline.plan == mk.Plan.gpipe(2, 4)
    for row in (pipeline, ddp):
        assert row.timeline is not None and row.bubble == row.timeline.bubble
        assert row.step_time is not None and row.step_time == row.timeline.step_time
    assert ddp.memory > pipeline.memory > 0  # replicas hold the whole model
    assert ddp.memory >= max(sum(held.values()) for held in ddp.timeline.memory)
    assert ddp.memory < 2 * max(held["total"] for held in ddp.timeline.peak_memory)  # its last step's
    assert ddp.loss == pytest.approx(pipeline.loss, rel=1e-5)
    assert [row.number for row in found] == [pipeline.number + i for i in range(3)]
    assert mk.runs()[-3:].to_dataframe()["status"].tolist() == ["finished", "finished", "failed"]
    assert "Plan(dp=2)" in str(found) and str(RunList([])) == "No run has ended yet in this notebook."


def test_two_runs_are_compared(found: RunList) -> None:
    pipeline, ddp, _ = found
    rows = found.compare(ddp.number, pipeline.number).rows
    assert [row.name for row in rows] == [
        f"run {ddp.number}: Plan(dp=2)",
        f"run {pipeline.number}: {pipeline.plan!r}",
    ]
    with pytest.raises(ValueError, match=rf"no run 999999 with a step. There are: {pipeline.number}, "):
        found.compare(999999)


def test_a_notebook_shows_the_same_table(found: RunList) -> None:
    shown = draw(found, "widget").data
    assert shown.count("<tr>") == 1 + len(found) and "peak memory" in shown and "Plan(dp=2)" in shown


def test_runs_of_a_folder_outlast_the_notebook(train: Callable[..., Run], tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))]
    how = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD, "steps": 3}
    with pytest.raises(
        ValueError, match=r"no saved trace \(\*\.mpkit\) is in it; run.trace.save\('.*first.mpkit'\)"
    ):
        mk.runs(tmp_path)
    kept = {}
    for name, plan in (("a-pipeline", mk.Plan.gpipe(2, 4)), ("b-zero", mk.Plan.zero(2, 2))):
        run = train(MLP(2, 3), data, plan, **how)
        run.trace.save(tmp_path / f"{name}.mpkit")
        kept[name] = keep(run)
    (tmp_path / "c-cut.mpkit").write_bytes((tmp_path / "b-zero.mpkit").read_bytes()[:999])
    with pytest.warns(UserWarning, match=r"c-cut.mpkit is left out: ") as warned:
        found = mk.runs(str(tmp_path))
    assert [each.filename for each in warned] == [__file__]
    assert [row.name for row in found] == list(kept)
    for row in found:
        same = kept[row.name]
        assert (row.plan, row.status, row.steps, row.loss) == (same.plan, "finished", 3, same.loss)
        assert (row.bubble, row.memory, row.step_time) == (same.bubble, same.memory, same.step_time)
    assert [each.name for each in found.compare().rows] == [f"{row.name}: {row.plan!r}" for row in found]
    table = found.to_dataframe()
    assert table["zero"].tolist() == [0, 2] and "tp" not in table  # the fields in which their plans differ
    assert "a-pipeline" in str(found) and "a-pipeline" in draw(found, "widget").data
    with pytest.raises(ValueError, match="there is no such folder"):
        mk.runs(tmp_path / "none")
