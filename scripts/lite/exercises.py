"""Write the notebooks of the exercises that need no torch: this Python acts as if it had none.

    python scripts/lite/exercises.py FOLDER

The tutorials in the folder above get links to these exercises only.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  # import torch raises ModuleNotFoundError

import nbformat  # noqa: E402

from mpkit.course.notebooks import link_tutorials, notebooks  # noqa: E402

folder = Path(sys.argv[1])
for path, book in notebooks():
    if path.parent == Path("."):  # a student's, not a solved one
        nbformat.write(book, folder / path)
link_tutorials(folder)
