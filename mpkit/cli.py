"""The command line: `python -m mpkit demo`, `watch`, `grade`, `exercises`, `diagnose`, `doctor`, `estimate`, `fits`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpkit.course.grading.commands import add_classroom
from mpkit.errors import MpkitError
from mpkit.views.commands.diagnose import add_diagnose
from mpkit.views.commands.doctor import add_doctor
from mpkit.views.commands.open import add_open
from mpkit.views.commands.predict import add_advise, add_predict

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run; a user's mistake ends with one message and exit code 2, a failed run with 1."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _check_renamed(given)
        options = _parser().parse_args(given)
        options.run(options)
    except ValueError as error:
        _leave(str(error), 2)
    except MpkitError as error:
        _leave(str(error), 1)
    except KeyboardInterrupt:
        _leave("interrupted; the ranks are gone", 130)
    except BrokenPipeError:  # as in `mpkit diagnose trace | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


RENAMED = {"--on": "--hardware", "--batch": "--global-batch"}
"""Options of estimate, fits, advise and open that had another name."""


def _check_renamed(given: Sequence[str]) -> None:
    """Reject an option by its former name."""
    old = next((each for each in given if each in RENAMED), None)
    if old and given[0] in ("estimate", "fits", "advise", "open"):
        raise ValueError(
            f"{old} is {RENAMED[old]} now, as in Python: mpkit {given[0]} ... {RENAMED[old]} ..."
        )


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
        help="any of naive, gpipe, gpipe-recompute, 1f1b, zb-h1, dp, ddp, zero1, zero2, zero3, tp, 2d, 3d; "
        "with commas between",
    )
    demo.add_argument("--device", default="auto", help="auto, cpu or cuda")
    demo.add_argument("--html", default="mpkit-demo.html", help="where the interactive timelines go")
    demo.add_argument("--seed", type=int, default=0, help="of the model's weights and the choice of text")
    demo.add_argument(
        "--plain", action="store_true", help="no live drawing (it is left out in a pipe anyway)"
    )
    demo.set_defaults(run=_demo)
    _add_watch(commands)
    add_open(commands)
    _add_launch(commands)
    add_classroom(commands)
    add_diagnose(commands)
    add_doctor(commands)
    add_predict(commands)
    add_advise(commands)
    return parser


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    watch = commands.add_parser(
        "watch",
        help="run a program of your own, unchanged, and see its timeline",
        description="Starts a script on every rank as torchrun would, records its communication, forwards, backwards, "
        "optimizer steps and memory, and prints its timeline. Options of mpkit's stand before the script, those of "
        "the script after it.",
    )
    watch.add_argument("--ranks", type=int, help="processes; left out: one per GPU, or 2 without GPUs")
    watch.add_argument("--device", default="auto", help="auto, cpu or cuda")
    watch.add_argument("--depth", type=int, help="how deep modules are recorded; left out: repeated blocks")
    watch.add_argument(
        "--timeout", type=float, help="seconds without progress after which a hang is reported"
    )
    watch.add_argument("--html", help="where an interactive timeline goes")
    watch.add_argument("--trace", help="where the trace goes, for Trace.load")
    watch.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is a module, as after python -m"
    )
    watch.add_argument("program", help="the script")
    watch.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    watch.set_defaults(run=_watch)


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    launch = commands.add_parser(
        "launch",
        help="print the commands that start a script on several machines",
        description="Prints the commands that start SCRIPT on several machines, with each flag explained: torchrun, a "
        "SLURM batch file, accelerate, deepspeed. It starts nothing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    launch.add_argument("--nodes", type=int, default=1, help="machines")
    launch.add_argument("--gpus", type=int, default=8, help="GPUs per machine, a process for each")
    launch.add_argument("--address", default="NODE0", help="name or address of the first machine")
    launch.add_argument("--port", type=int, default=29500, help="a free port there")
    launch.add_argument("--hours", type=float, default=1.0, help="time limit of the SLURM job")
    launch.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as after python -m")
    launch.add_argument("program", metavar="SCRIPT", help="train.py")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    launch.set_defaults(run=_launch)


def _demo(options: argparse.Namespace) -> None:
    from mpkit.views.commands.demo import Demo

    given = vars(options).copy()
    del given["run"]
    given["strategies"] = tuple(name.strip() for name in given["strategies"].split(",") if name.strip())
    Demo(**given).run()


def _watch(options: argparse.Namespace) -> None:
    from mpkit.views.commands.watch import CommandProgram, watch

    program = CommandProgram(options.program, tuple(options.arguments), options.module)
    watch(
        program, ranks=options.ranks, device=options.device, depth=options.depth, timeout=options.timeout,
        html=options.html, trace=options.trace,
    )  # fmt: skip


def _launch(options: argparse.Namespace) -> None:
    from mpkit.views.commands.launch_commands import LaunchPlan, commands
    from mpkit.views.commands.watch import CommandProgram

    program = CommandProgram(options.program, tuple(options.arguments), options.module)
    plan = LaunchPlan(program, options.nodes, options.gpus, options.address, options.port, options.hours)
    plan.check()
    print(commands(plan))
