"""The scripts of examples/systems are whole programs of their own; `python -m tests.systems` runs them."""

from __future__ import annotations

import pytest

from tests.systems.measure import FOLDER
from tests.systems.systems import SYSTEMS

SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_every_script_is_watched() -> None:
    assert {system.script for system in SYSTEMS} == {*SCRIPTS} - {"tiny", "serial"}


BY_HAND = {"mirrored"}  # TensorFlow's says what it does


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - BY_HAND))
def test_a_script_knows_nothing_of_mpkit(script: str) -> None:
    assert "mpkit" not in (FOLDER / f"{script}.py").read_text()
