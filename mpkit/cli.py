"""The command line: `python -m mpkit demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mpkit.errors import MpkitError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run; a user's mistake ends with one message and exit code 2, a failed run with 1."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        _leave(str(error), 2)
    except MpkitError as error:
        _leave(str(error), 1)
    except KeyboardInterrupt:
        _leave("interrupted; the ranks are gone", 130)


def _leave(message: str, code: int) -> None:
    print(f"mpkit: {message}", file=sys.stderr)
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpkit", description="Learn, try and plan parallel training in PyTorch."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT on several processes and watch the pipeline bubble",
        description="Trains a small GPT on real text with each strategy in turn, draws the timeline of all ranks while "
        "they run, compares the strategies in a table, and writes the interactive timelines into one HTML file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--ranks", type=int, default=4, help="processes, each with one stage of the model")
    demo.add_argument("--microbatches", type=int, default=8, help="micro-batches of GPipe")
    demo.add_argument("--layers", type=int, default=8, help="transformer blocks of the model")
    demo.add_argument("--width", type=int, default=192, help="width of the model")
    demo.add_argument("--length", type=int, default=64, help="bytes of text a sequence")
    demo.add_argument("--batch", type=int, default=32, help="sequences a batch")
    demo.add_argument("--steps", type=int, default=6, help="training steps a strategy")
    demo.add_argument(
        "--strategies",
        default="naive,gpipe,ddp,zero3",
        help="any of naive, gpipe, gpipe-recompute, dp, ddp, zero1, zero2, zero3; with commas between",
    )
    demo.add_argument("--device", default="auto", help="auto, cpu or cuda")
    demo.add_argument("--html", default="mpkit-demo.html", help="where the interactive timelines go")
    demo.add_argument("--seed", type=int, default=0, help="of the model's weights and the choice of text")
    demo.add_argument(
        "--plain", action="store_true", help="no live drawing (it is left out in a pipe anyway)"
    )
    demo.set_defaults(run=_demo)
    return parser


def _demo(options: argparse.Namespace) -> None:
    from mpkit.demo import Demo

    given = vars(options).copy()
    del given["run"]
    given["strategies"] = tuple(name.strip() for name in given["strategies"].split(",") if name.strip())
    Demo(**given).run()
