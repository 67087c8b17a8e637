"""The main job, small: what `make demo` prints and leaves."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mpkit as mk
from mpkit.cli.demo import Demo, Outcome, strategies
from mpkit.common.units import percent, seconds
from mpkit.trace.proof import Proof
from tests.serial import Clusters


@pytest.fixture
def demo(tmp_path: Path, clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Demo]:
    """Make a small demo on the shared clusters."""
    monkeypatch.setattr("mpkit.cli.demo.Cluster", lambda ranks, device: nullcontext(clusters(ranks)))
    small: dict[str, Any] = {
        "device": "cpu", "layers": 4, "width": 32, "length": 16, "batch": 16, "plain": True,
    }  # fmt: skip

    def make(**given: Any) -> Demo:
        console = Console(file=io.StringIO(), width=300)
        return Demo(html=str(tmp_path / "demo.html"), console=console, **{**small, **given})

    return make


def printed(demo: Demo) -> str:
    return demo.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_it_compares_the_strategies_and_keeps_the_timelines(demo: Callable[..., Demo]) -> None:
    made = demo(steps=3)
    serial, naive, gpipe, ddp, zero = made.run()
    text = printed(made)
    assert re.search(r"equal to serial( +3 steps){5}", text)
    for each in made.table([serial, naive, gpipe, ddp, zero]).columns[1:]:  # what is held at the peak, in MiB
        peak, *held = [float(cell.split()[0].replace("-", "0")) for cell in [*each.cells][4:10]]
        assert sum(held) == pytest.approx(peak, abs=0.05 * len(held) + 0.05)
    narrow = Console(file=io.StringIO(), width=80)  # a terminal's, in which no cell breaks
    narrow.print(made.table([serial, naive, gpipe, ddp, zero]))
    assert " ".join(narrow.file.getvalue().split()) in " ".join(text.split())  # type: ignore[attr-defined]
    # What is drawn of each run is the step of the table.
    for outcome in (naive, gpipe, ddp, zero):
        figures = f"bubble {percent(outcome.typical.bubble)} · step time {seconds(outcome.typical.step_time)}"
        assert text.count(figures) == 1
    assert "Equal to serial training in" not in text  # the table says it, by strategy
    for outcome in (naive, gpipe, ddp, zero):
        assert outcome.losses == pytest.approx(serial.losses, rel=1e-4)
    assert (naive.theory, gpipe.theory) == (3 / 4, 3 / 11)
    # Four stages hold the model's states once, between them.
    for category in ("params", "grads", "optimizer"):
        whole = serial.timeline.peak_memory[0][category]
        assert sum(held[category] for held in gpipe.typical.peak_memory) == whole
        # DDP holds them once per rank.
        assert [held[category] for held in ddp.typical.peak_memory] == 4 * [whole]
    html = Path(made.html).read_text()
    assert "bubble in theory" in html and "naive MP" in html


def simulated_outcomes() -> list[Outcome]:
    """Runs of three steps, each slower than the one before, so that a typical step is not the last one."""
    plans = {"serial": mk.Plan.serial(), "naive MP": mk.Plan.naive_mp(4), "GPipe": mk.Plan.gpipe(4, 8)}
    outcomes = []
    for name, plan in plans.items():
        timeline = mk.simulate(plan, 1e-3, 1.4e-3, 1.3e-3, 1e-4, steps=3)
        late = timeline.spans["step"] == 2
        timeline.spans["end"][late & (timeline.spans["kind"] == 1)] += 2e-4
        timeline.held["total"][timeline.held["time"] > timeline.spans["start"][late].min()] *= 2
        outcomes.append(
            Outcome(name, timeline, [4.0, 3.0, 2.71828], Proof((1, 2)), 3 / 11, strategies()["gpipe"]["seen"])
        )
    return outcomes


def test_no_figure_of_a_run_stands_on_the_page_or_in_the_terminal_with_two_values(tmp_path: Path) -> None:
    """The page's table, each timeline's headline and table (JSON), its still picture, its memory; and the terminal."""
    demo = Demo(html=str(tmp_path / "demo.html"), console=Console(file=io.StringIO(), width=200))
    outcomes = simulated_outcomes()
    demo.console.print(demo.table(outcomes))
    demo._keep(outcomes, "trains nothing")
    terminal = {}
    for line in demo.console.file.getvalue().splitlines():  # type: ignore[attr-defined]
        label, *cells = re.split(r"\s{2,}", line.strip())
        terminal[label] = cells
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    rows = page[page.index("<tbody>") : page.index("</tbody>")].split("</tr>")[:-1]
    assert len(rows) == len(outcomes)
    for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        section = page[page.index(f'id="timeline-{number}"') :].split("</section>")[0]
        (data,) = re.findall(r'data-of="\d+">(.*?)</script>', section)
        state = json.loads(data)["state"]
        cells = dict(re.findall(r'<td data-head="([^"]*)">(?:<span class="bar".*?"number">)?([^<]*)', row))
        said: dict[str, set[str]] = {
            "bubble": {cells["bubble"], percent(state["bubble"]), terminal["bubble measured"][number]},
            "step time": {cells["step time"], seconds(state["step_time"]), terminal["step time"][number]},
        }
        for what in said:  # under the still picture
            said[what] |= set(re.findall(rf"\b{what} ([\d.]+ (?:%|ms))", section))
        head, ranks = state["table"]["head"], state["table"]["rows"]
        idle = [float(rank[head.index("idle")].removesuffix(" %")) for rank in ranks]
        assert sum(idle) / len(idle) == pytest.approx(float(cells["bubble"].removesuffix(" %")), abs=0.06)
        most = f"{max(int(rank[head.index('peak memory')].split()[0]) for rank in ranks)} micro-batch"
        drawn = max(int(peak) for peak in re.findall(r"peak (\d+) micro-batch", section))
        said["peak memory"] = {most, f"{drawn} micro-batch", cells["peak memory per GPU"].removesuffix("es")}
        assert {what: len(values) for what, values in said.items()} == dict.fromkeys(said, 1), said
        assert state["of"] == f"step {outcome.typical_step}" and outcome.typical_step != 2
