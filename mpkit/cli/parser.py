"""The command line's commands, which `commands.toml` lists, their pages of help and their errors: one form for all."""

import argparse
import sys
import tomllib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "path": Path}


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


class CommandParser(argparse.ArgumentParser):
    r"""A parser whose errors name what was meant, and show a command line that works.

    >>> parser = CommandParser(prog="mpkit fits", epilog="example:\n  mpkit fits --model gpt2")
    >>> _ = parser.add_argument("--model", required=True)
    >>> parser.what_was_meant(["--modle", "gpt2"])
    'There is no --modle: did you mean --model?'
    """

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and reject what a command does not know itself, so that the error is the command's."""
        self._given = sys.argv[1:] if args is None else list(args)
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"it does not take {' '.join(rest)}")
        return options, rest

    def what_was_meant(self, given: Sequence[str]) -> str:
        """Return what to say of the first option or command that is unknown; "" if all are known."""
        options = [name for action in self._actions for name in action.option_strings]
        names = [
            name for action in self._actions if isinstance(action.choices, dict) for name in action.choices
        ]
        for word in given:
            said = word.partition("=")[0]
            known = (
                names if names and not said.startswith("-") else options if said.startswith("--") else None
            )
            if known is None or any(each.startswith(said) for each in known):
                continue
            near = get_close_matches(said, known, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            return f"There is no {said}: {hint}"
        return ""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, what was meant and what works, and leave with exit code 2."""
        about_names = message.startswith(("it does not take", "the following", "argument COMMAND"))
        meant = self.what_was_meant(self._given) if about_names else ""
        works = (self.epilog or "").replace("example:", "Such as:", 1)
        self.exit(2, f"{self.prog}: {meant or message}\n{works}\n")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `commands.toml` to a parser; `options.run` is then the function to call, by its name.

    >>> parser = CommandParser(prog="mpkit")
    >>> add_commands(parser)
    >>> options = parser.parse_args(["diagnose", "traces/", "--step", "3"])
    >>> options.run, options.paths, options.step
    ('mpkit.cli.commands:diagnose_traces', ['traces/'], 3)
    """
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    rows = tomllib.loads((files(__package__) / "commands.toml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        does = row["does"]
        command = commands.add_parser(
            name, help=does, description=f"{does[0].upper()}{does[1:]}. {row['more']}",
            epilog=f"example:\n  {row['example']}", formatter_class=PageOfHelp,
        )  # fmt: skip
        command.set_defaults(command=name, run=row["run"])
        for flags, how in rows[row.get("like", name)]["options"].items():
            kind = {"type": TYPES[how["type"]]} if "type" in how else {}
            command.add_argument(*flags.split(), **how | kind)
