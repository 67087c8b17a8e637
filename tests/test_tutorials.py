"""The fast cells of the tutorials. Those tagged "thorough" run with the whole notebooks (`make test-all`)."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_fast_cells_run(name: str) -> None:
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if "thorough" not in cell.metadata.get("tags", [])]
    assert sum(cell.cell_type == "code" for cell in book.cells) >= 4, "a tutorial has fast cells"
    NotebookClient(book, timeout=60, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
