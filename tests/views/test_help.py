"""The command line's help: one form for all commands, and examples whose options exist."""

from __future__ import annotations

import argparse
import shlex

import pytest

from mpkit.cli import _parser

COMMANDS = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))


@pytest.mark.parametrize("name", COMMANDS.choices)
def test_each_page_has_the_form(name: str) -> None:
    command = COMMANDS.choices[name]
    (line,) = [choice.help for choice in COMMANDS._choices_actions if choice.dest == name]
    about = str(command.description)
    assert about.lower().startswith(f"{line}. ".lower()) and about.endswith(".") and line[0].islower()
    for action in command._actions[1:]:
        said = str(action.help)
        capital = said[0].isupper() and not said[1].isupper()  # names in capitals may begin it
        assert not capital and not said.endswith("."), said
        assert "left out" not in said and not (action.required and "default" in said), said


@pytest.mark.parametrize("name", COMMANDS.choices)
def test_its_example_is_one(name: str) -> None:
    _, _, example = str(COMMANDS.choices[name].epilog).partition("\n  ")
    assert example.startswith(f"mpkit {name}")
    assert _parser().parse_args(shlex.split(example)[1:]).run is not None


def test_defaults_are_stated_once() -> None:
    said = " ".join(COMMANDS.choices["demo"].format_help().split())
    assert "choice of text (default: 0)" in said and "in a pipe example" in said
    said = " ".join(COMMANDS.choices["watch"].format_help().split())
    assert "(default: one per GPU, or 2 without GPUs) --device" in said
