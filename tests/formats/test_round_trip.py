"""What a format says comes back; what it cannot say is listed; nothing is lost in silence."""

from __future__ import annotations

import warnings
from dataclasses import fields

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpkit import Plan
from mpkit.plan.formats.table import FORMATS
from tests.formats.plans import plans


def written(plan: Plan, name: str, **context: object):
    """Return the configuration of a plan, or None if the framework would refuse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return plan.to(name, **context)
        except ValueError as error:
            assert "Plan(" in str(error), "an error shows a plan that works"
            return None


@pytest.mark.parametrize("name", FORMATS)
@given(plan=plans(), micro=st.integers(1, 8))
@settings(max_examples=25)
def test_plans_survive_each_format(name: str, plan: Plan, micro: int, tmp_path_factory) -> None:
    config = written(plan, name, micro_batch=micro)
    assume(config is not None)
    path = config.save(tmp_path_factory.mktemp("format") / "file")
    assert path.read_text() == config
    back = Plan.read(path)  # no warning: nothing that was written is unknown
    differ = {f.name for f in fields(Plan) if getattr(back, f.name) != getattr(plan, f.name)}
    assert differ == {*config.cannot_say}
    assert all(config.cannot_say.values())
    assert Plan.read(config) == Plan.read(path, format=name) == back
