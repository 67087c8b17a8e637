"""A notebook as a learner sees it: in JupyterLab, in a browser, from its first cell to its last."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from mpkit.course.catalogue import ExerciseEntry, find
from mpkit.course.framework.source import IMPORTS
from tests import limits
from tests.browser.lab import (
    CELLS,
    RANKS,
    RUN_ALL,
    TOUCH,
    in_cell,
    look_at,
    look_at_output,
    open_notebook,
    run,
    write,
)

Screenshot = Callable[[Page, str], None]

PROGRAM = 1000 * limits.PROGRAM

WATCH = """() => {
  // What the first timeline of the page shows, whenever that changes: and how its run stands.
  window.seen = [];
  let frames = 0;  // in which the picture of the latest change may still be drawn
  const look = () => {
    const root = document.querySelector('.mpkit-timeline');
    const output = root?.closest('.jp-OutputArea-output');
    if (output) {
      const status = output.textContent.match(/running|finished|stopped|failed/)?.[0];
      const spans = Number(root.dataset.spans ?? 0);
      const last = window.seen.at(-1);
      if (last?.status !== status || last?.spans !== spans) {
        const words = root.querySelector('canvas').getAttribute('aria-label');
        window.seen.push({ status, spans, words, picture: root.querySelector('canvas').toDataURL() });
        frames = 60;
      } else if (frames-- > 0) last.picture = root.querySelector('canvas').toDataURL();
    }
    requestAnimationFrame(look);
  };
  look();
}"""

PAUSE = """() => {
  // The first run waits, after each of its first two steps, for a file.
  const { widgets } = window.jupyterapp.shell.currentWidget.content;
  const { sharedModel } = widgets.find((cell) => cell.model.sharedModel.source.includes('naive = train')).model;
  const code = sharedModel.source.replace('naive_mp(stages=4)', 'naive_mp(stages=4), on_step=until_seen');
  sharedModel.source = code.replace('naive = train', `
def until_seen(ctx, step):
    import pathlib, time
    while step < 2 and not pathlib.Path(f"seen{step}").exists():
        time.sleep(0.01)


naive = train`);
}"""

ONLY_FAST = """() => {
  const { sharedModel } = window.jupyterapp.shell.currentWidget.content.model;
  for (let at = sharedModel.cells.length - 1; at >= 0; at--)
    if (sharedModel.cells[at].metadata.tags?.includes('thorough')) sharedModel.deleteCell(at);
}"""

TIMES = "(root) => root.panel.chart.times"


def place(timeline: Locator, share: float, rank: int) -> tuple[float, float]:
    """Where on the page a lane is, at a share of the times seen."""
    look_at(timeline)
    x, y = timeline.evaluate(
        """(root, [share, rank]) => {
          const { chart } = root.panel;
          const box = chart.canvas.getBoundingClientRect();
          const row = chart.placed.rows.find((row) => row.rank === rank && row.part === 'compute');
          return [box.left + chart.left + share * chart.width, box.top + row.y + row.height / 2];
        }""",
        [share, rank],
    )
    return float(x), float(y)


def settled(timeline: Locator) -> None:
    """Wait until what was asked for is drawn."""
    timeline.page.wait_for_function(
        "(root) => root.panel.chart.asked === 0", arg=timeline.element_handle()
    )  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cells", ["fast", pytest.param("all", marks=pytest.mark.soak)])
def test_pipeline_bubbles(jupyterlab: str, lab_page: Page, screenshot: Screenshot, cells: str) -> None:
    page = lab_page
    notebook = f"{jupyterlab}/workspaces/{cells}/tree/{cells}/01-pipeline-bubbles.ipynb"
    open_notebook(page, notebook)
    if cells == "fast":
        page.evaluate(ONLY_FAST)
    page.evaluate(WATCH)
    page.evaluate(PAUSE)
    page.evaluate(RUN_ALL)

    # Bars appear while the run is going, more after each step, for which it waits.
    going = "window.seen.filter((one) => one.status === 'running' && one.spans > 0)"
    page.wait_for_function(f"{going}.length > 0", timeout=PROGRAM)
    page.evaluate(TOUCH, f"{cells}/seen0")
    page.wait_for_function(f"new Set({going}.map((one) => one.spans)).size > 1", timeout=PROGRAM)
    page.wait_for_function(f"new Set({going}.map((one) => one.picture)).size > 1")
    naive = in_cell(page, "naive = train").locator(".mpkit-timeline")
    look_at(naive)
    screenshot(page, "notebook-running")
    page.evaluate(TOUCH, f"{cells}/seen1")
    page.wait_for_function("window.seen.some((one) => one.status === 'finished')")

    # Every cell ran, none failed.
    page.wait_for_function("window.ran !== undefined", timeout=PROGRAM)
    ran = page.evaluate(CELLS)
    assert [cell["error"] for cell in ran if cell["error"]] == []
    assert [cell["count"] for cell in ran] == list(range(1, len(ran) + 1))

    expect(in_cell(page, "naive = train").get_by_role("img", name="memory over time")).to_be_visible()

    # Hover: what an operation is. GPU 0 begins with its forward, and waits in the middle.
    look_at(naive)
    tip = naive.locator(".mpkit-tip").first
    page.mouse.move(*place(naive, 0.01, rank=0))
    expect(tip).to_contain_text(re.compile("forward.*micro-batch 0"))
    screenshot(page, "notebook-hover")
    page.mouse.move(*place(naive, 0.17, rank=0))
    expect(tip).to_contain_text("idle: wait")

    # With Ctrl the wheel zooms around the pointer.
    page.keyboard.down("Control")
    for _ in range(4):
        t0, t1 = naive.evaluate(TIMES)
        page.mouse.wheel(0, -240)  # one at a time: a browser may join several into one
        page.wait_for_function(
            "([root, length]) => root.panel.chart.times[1] - root.panel.chart.times[0] < length",
            arg=[naive.element_handle(), t1 - t0],
        )
    page.keyboard.up("Control")
    settled(naive)
    screenshot(page, "notebook-zoomed")

    # The operations that decide the step, found by the kernel.
    naive.get_by_role("button", name="Critical path").click()
    page.wait_for_function("(root) => root.panel.chart.path !== null", arg=naive.element_handle())
    settled(naive)
    screenshot(page, "notebook-critical-path")
    naive.get_by_role("button", name="Critical path").click()
    naive.get_by_role("button", name="Fit").click()

    # Another machine, by the dropdown.
    machines = in_cell(page, "ipywidgets.Dropdown")
    look_at(machines.locator(".mpkit-timeline"))
    clock = machines.locator(".mpkit-clock")
    expect(clock).to_contain_text(re.compile(r"\b4x-titan-rtx-nvlink\b"))
    screenshot(page, "notebook-with-nvlink")
    machines.locator("select").select_option("TITAN RTX, without")
    expect(clock).to_contain_text(re.compile(r"\b4x-titan-rtx(?!-)"))
    settled(machines.locator(".mpkit-timeline"))
    look_at(machines.locator(".mpkit-timeline"))
    screenshot(page, "notebook-without-nvlink")

    pictures = [("picture", "naive.timeline().step(2).show()"), ("memory", "show(memory=True)")]
    if cells == "all":
        pictures += [("formula", "# the runs as points"), ("recompute", "mk.experiments.memory_by_plan")]
    for name, code in pictures:
        look_at_output(page, code)
        screenshot(page, f"notebook-{name}")

    # The page is loaded again: the same kernel, and the picture is back.
    spans = naive.get_attribute("data-spans")
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    open_notebook(page, notebook)
    look_at(naive)
    expect(naive).to_have_attribute("data-spans", str(spans))
    settled(naive)
    screenshot(page, "notebook-reloaded")

    # So is the memory, and something to hover over.
    memory = in_cell(page, "naive = train").locator(".mpkit-track .mpkit-stage")
    look_at(memory)
    memory.hover()
    expect(memory.locator(".mpkit-tip")).to_contain_text("params")
    screenshot(page, "notebook-memory-reloaded")


# ---- Exercises as a student does them, in JupyterLab, in a browser.


def open_exercise(page: Page, jupyterlab: str, notebook: str, entry: ExerciseEntry) -> None:
    """Its notebook, with all run that comes before the answer."""
    open_notebook(page, f"{jupyterlab}/workspaces/{notebook}/tree/exercises/{notebook}.ipynb")
    for code in filter(None, (IMPORTS, entry.given_code.strip())):
        run(page, in_cell(page, code.splitlines()[0]))


def first_line(entry: ExerciseEntry) -> str:
    """Of the student's cell, by which it is found."""
    return next(line for line in entry.source.stub.splitlines() if line.strip())


@pytest.mark.timeout(300)
def test_an_exercise_failed_twice_and_solved(jupyterlab: str, lab_page: Page, screenshot: Screenshot) -> None:
    page, entry = lab_page, find("pass-the-token")
    open_exercise(page, jupyterlab, "1-ranks", entry)
    answer, check = in_cell(page, first_line(entry)), in_cell(page, f'mk.check("{entry.name}"')
    run(page, answer)
    expect(run(page, check)).to_contain_text("First say who your neighbours are")
    screenshot(page, "exercise-stub")

    mistakes = {one.name: one for one in entry.exercise.mistakes}
    # The stub is no answer, and the same wrong answer again is no further one.
    first = "nobody-closes-the-ring"
    for number, name, hint in ((1, first, 0), (2, first, 0), (3, "adds-after-it-sent", 1)):
        write(page, answer, mistakes[name].wrong)
        run(page, answer)
        output = run(page, check)
        expect(output).to_contain_text("not yet")
        expect(output).to_contain_text(mistakes[name].hints[hint].split("`")[0])
        screenshot(page, f"exercise-failed-{number}")

    write(page, answer, entry.source.plain)
    run(page, answer)
    output = run(page, check)
    expect(output).to_contain_text("solved, at the third try")
    expect(output.locator("img")).to_have_count(2)
    look_at(output)
    screenshot(page, "exercise-solved")
    expect(run(page, in_cell(page, "mk.progress()"))).to_contain_text("✔ pass-the-token")
    screenshot(page, "exercise-progress")


# ---- A run in JupyterLab that goes on: nothing below it moves, and when its kernel ends its picture stays and says so.

RESTART = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"

BROKEN = """(output) => [...output.querySelectorAll('.jupyter-widgets-disconnected')].filter((each) =>
  !['none', 'normal'].includes(getComputedStyle(each, '::before').content)).length"""
"""How many parts show the icon of a broken widget."""

LANES = """(root) => {
  const top = (each) => each.getBoundingClientRect().top;
  return [...root.querySelectorAll('.mpkit-stage')].map((each) => top(each) - top(root.closest('.jp-OutputArea')));
}"""
"""How far below the top of the output the lanes and the memory are."""


def test_what_a_kernel_drew_last_stays_when_it_ends(
    jupyterlab: str, lab_page: Page, screenshot: Screenshot
) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/ended/tree/ended.ipynb")
    cell = page.locator(".jp-CodeCell").first
    run(page, cell)
    timeline = cell.locator(".mpkit-timeline")
    page.wait_for_function("(root) => root.panel.chart.placed", arg=timeline.element_handle())
    before = timeline.evaluate(LANES)
    expect(cell).to_contain_text("step 3 of 9")
    page.wait_for_function("(root) => Number(root.dataset.spans) > 0", arg=timeline.element_handle())
    look_at(timeline)
    screenshot(page, "ended-before")
    # ---- while it runs, nothing above the lanes grows: losses and charts came, and the lanes are where they were
    assert timeline.evaluate(LANES) == pytest.approx(before, abs=2) and len(before) == 2
    expect(timeline.locator(".mpkit-ended")).to_be_hidden()
    expect(cell.get_by_role("button", name="Stop")).to_be_visible()
    spans = timeline.get_attribute("data-spans") or 0
    page.evaluate(RESTART)
    # ---- the picture stays, says once that it is still, and nothing seems to go on
    expect(timeline.locator(".mpkit-ended")).to_have_text(
        "The kernel of this picture has ended or was restarted. This is the last that it sent."
    )
    assert int(last := timeline.get_attribute("data-spans") or 0) >= int(spans)  # more may have come
    expect(cell.locator(".mpkit-stop")).to_be_hidden()
    expect(timeline.get_by_role("button", name="Follow")).to_be_hidden()
    assert cell.locator(".jp-OutputArea").first.evaluate(BROKEN) == 0
    assert timeline.evaluate("(root) => root.panel.chart.store.count > 0 && root.dataset.spans") == last
    screenshot(page, "ended-after")


# ---- `%%ranks` as a learner meets it: in JupyterLab, with the stop button.


def test_cells_on_ranks(jupyterlab: str, lab_page: Page, screenshot: Screenshot) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/ranks/tree/ranks.ipynb")
    cells = [page.locator(".jp-CodeCell").nth(i) for i in range(len(RANKS))]
    # ---- output and values, by rank
    run(page, cells[0])
    run(page, cells[1])
    for rank in range(4):
        expect(cells[1]).to_contain_text(f"[rank {rank}] rank {rank} of 4")
        expect(cells[1]).to_contain_text(f"[rank {rank}] tensor([{6 * rank}., {6 * rank}.])")
    # ---- an error of one rank, with its line
    run(page, cells[2])
    expect(cells[2]).to_contain_text(
        "rank 2 of 4: AttributeError: 'Tensor' object has no attribute 'nothing'"
    )
    expect(cells[2]).to_contain_text('File "Cell In[3]", line 3')
    expect(cells[2]).to_contain_text("[rank 3] 3")
    expect(cells[2]).not_to_contain_text("interactiveshell")
    screenshot(page, "ranks-error")
    # ---- the stop button
    look_at(cells[3])
    cells[3].locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    expect(cells[3].locator(".jp-OutputArea")).to_contain_text("[rank 3] asleep")
    page.evaluate("window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    expect(cells[3].locator(".jp-OutputArea")).to_contain_text("KeyboardInterrupt")
    # ---- the variables are still there, on the ranks that are asked
    run(page, cells[4])
    expect(cells[4]).to_contain_text("[ranks 0,2] tensor(12.)")
    run(page, cells[5])
    screenshot(page, "ranks")
    run(page, cells[6])
    expect(cells[6]).to_contain_text("[ranks 0-3] 4")
