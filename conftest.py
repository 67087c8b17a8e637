"""What is thorough by where it lies: whole tutorials, of which tests/test_tutorials.py runs the fast cells."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole notebooks as thorough."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.thorough)
