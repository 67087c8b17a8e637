"""The command line: `mpkit demo`, or `python -m mpkit demo`, and ten more commands, in `commands.toml`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from mpkit.cli.parser import CommandParser, add_commands
from mpkit.errors import MpkitError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run; a user's mistake ends with one message and exit code 2, a failed run with 1."""
    try:
        options = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
        resolve_name(options.run)(options)
    except ValueError as error:
        _leave(str(error), 2)
    except MpkitError as error:
        _leave(str(error), 1)
    except KeyboardInterrupt:
        _leave("interrupted; the ranks are gone", 130)
    except BrokenPipeError:  # as in `mpkit diagnose trace | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + 13) from None


def _leave(message: str, code: int) -> None:
    print(f"mpkit: {message}", file=sys.stderr)
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mpkit", description="Learn, try out and plan parallel training in PyTorch.",
        epilog="`mpkit COMMAND --help` describes a command's options.",
    )  # fmt: skip
    add_commands(parser)
    return parser
