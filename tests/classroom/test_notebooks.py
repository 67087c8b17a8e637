"""The exercise notebooks: written from the exercises, and each runs as a student finds it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mpkit.course.catalogue import families, of_family
from mpkit.course.notebooks import notebooks, write_notebooks, your_turn
from tests import limits

HOME = Path(__file__).parents[2] / "notebooks" / "exercises"
TUTORIALS = HOME.parent
FIRST = "1-ranks.ipynb"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All notebooks; the repository has the students' only."""
    folder = tmp_path_factory.mktemp("exercises")
    write_notebooks(folder)
    return folder


def test_notebooks_are_what_the_exercises_say(written: Path) -> None:
    """`make exercises` writes them."""
    theirs = {path.name: path.read_text(encoding="utf-8") for path in written.glob("*.ipynb")}
    ours = {path.name: path.read_text(encoding="utf-8") for path in HOME.glob("*.ipynb")}
    assert ours == theirs, "make exercises"
    assert len(list(notebooks())) == 3 * len(theirs) == len(list(written.rglob("*.ipynb")))


def executed(path: Path, at: Path) -> nbformat.NotebookNode:
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=limits.PROGRAM, resources={"metadata": {"path": str(at)}}).execute()
    return book


def test_a_solved_notebook_runs(written: Path, tmp_path: Path) -> None:
    """It raises where an answer is wrong. The others differ by text alone."""
    executed(written / "solved" / FIRST, tmp_path)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=() if path.name == FIRST else pytest.mark.soak)
    for path in sorted(HOME.glob("*.ipynb"))
])  # fmt: skip
def test_a_students_notebook_runs_before_anything_is_solved(path: Path, tmp_path: Path) -> None:
    book = executed(path, tmp_path)
    for cell in book.cells:
        if cell.id.endswith("-check"):
            said = cell.outputs[-1].data["text/plain"]
            assert ": not yet" in said and "Hint: " in said
            assert all(output.output_type != "stream" for output in cell.outputs), "nothing but the table"
    assert (tmp_path / "mpkit-progress.json").is_file()


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_tutorials_lead_to_their_exercises(path: Path) -> None:
    last = nbformat.read(path, as_version=4).cells[-1]
    assert your_turn(path.stem) == (last.source if last.id == "your-turn" else ""), "make exercises"


def test_each_exercise_has_its_place_in_a_tutorial() -> None:
    for package in families():
        for entry in of_family(package.__name__.rsplit(".", 1)[1]):
            assert (TUTORIALS / f"{entry.exercise.after}.ipynb").is_file()
            assert entry.text.title in your_turn(entry.exercise.after)


def test_nbgraders_metadata_is_whole(written: Path) -> None:
    for path in sorted((written / "nbgrader").rglob("*.ipynb")):
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if "nbgrader" in cell.metadata]
        ids = [cell.metadata.nbgrader.grade_id for cell in cells]
        assert len(set(ids)) == len(ids)
        for cell in cells:
            if cell.metadata.nbgrader.solution:
                assert cell.source.count("### BEGIN SOLUTION") == cell.source.count("### END SOLUTION") >= 1
            else:
                assert cell.metadata.nbgrader.points > 0 and "### BEGIN HIDDEN TESTS" in cell.source
