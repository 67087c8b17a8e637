"""What pytest does not collect by itself: notebooks that nbmake would run to no end of their own."""

from pathlib import Path

EXERCISES = Path(__file__).parent / "notebooks" / "exercises"

# tests/classroom/test_notebooks.py runs the students' notebooks, and nbgrader's are the solved ones once more.
collect_ignore = [*map(str, EXERCISES.glob("*.ipynb")), str(EXERCISES / "nbgrader")]
