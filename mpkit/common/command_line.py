"""The command line's pages of help: one form for all commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Commands", "add_command"]

Commands = Any
"""The parser's commands, to which each is added (an `argparse._SubParsersAction`)."""


class PageOfHelp(argparse.RawDescriptionHelpFormatter):
    """Help that states each option's default, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n")
        return "\n".join(part if part.startswith("  ") else self._wrap(part, width, indent) for part in parts)

    def _wrap(self, text: str, width: int, indent: str) -> str:
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = isinstance(action.default, (int, float, str, Path)) and action.default not in (
            "",
            argparse.SUPPRESS,
        )
        stated = not told or isinstance(action.default, bool) or "(default" in str(action.help)
        return action.help if stated or not action.option_strings else f"{action.help} (default: %(default)s)"


def add_command(
    commands: Commands, name: str, does: str, more: str, *, example: str, run: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a command.

    Args:
        commands: to which.
        name: its name.
        does: what it does, in the imperative and without a full stop: its line in `mpkit --help`.
        more: what else its own page says.
        example: a command line that works.
        run: what it calls with the parsed options.

    Returns:
        Its parser, which its options are added to.

    >>> parser = argparse.ArgumentParser(prog="mpkit")
    >>> one = add_command(parser.add_subparsers(), "fits", "say whether a plan fits", "It exits with 1 if not.",
    ...                   example="mpkit fits --plan ddp", run=print)
    >>> print(one.format_help())
    usage: mpkit fits [-h]
    <BLANKLINE>
    Say whether a plan fits. It exits with 1 if not.
    <BLANKLINE>
    options:
      -h, --help  show this help message and exit
    <BLANKLINE>
    example:
      mpkit fits --plan ddp
    <BLANKLINE>
    """
    about = f"{does[0].upper()}{does[1:]}. {more}".strip()
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=does, description=about, epilog=f"example:\n  {example}", formatter_class=PageOfHelp
    )
    command.set_defaults(run=run)
    return command
