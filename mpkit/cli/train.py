"""The commands that train and watch: `mpkit demo`, `mpkit watch` and `mpkit launch`."""

from __future__ import annotations

import argparse
import sys

from mpkit.cli.parser import Commands, add_command

__all__ = ["add_train"]


def add_train(commands: Commands) -> None:
    """Add the commands."""
    _add_demo(commands)
    _add_watch(commands)
    _add_launch(commands)


def _add_demo(commands: Commands) -> None:
    demo = add_command(
        commands, "demo", "train a small GPT on several processes and watch the pipeline bubble",
        "It trains on real text with each strategy in turn, draws a step of all ranks, prints a "
        "table that compares the strategies, and writes the interactive timelines to one HTML file.",
        example="mpkit demo --strategies gpipe,1f1b,zb-h1 --microbatches 16", run=_demo,
    )  # fmt: skip
    for name, default, words in (
        ("--ranks", 4, "processes; each holds one stage of the model"),
        ("--microbatches", 8, "micro-batches per step of a pipeline"),
        ("--layers", 8, "transformer blocks of the model"),
        ("--width", 192, "width of the model"),
        ("--length", 64, "bytes of text per sequence"),
        ("--batch", 32, "sequences per step"),
        ("--steps", 6, "training steps per strategy"),
        ("--seed", 0, "seed of the model's weights and of the choice of text"),
    ):
        demo.add_argument(name, type=int, default=default, metavar="N", help=words)
    demo.add_argument(
        "--strategies", default="naive,gpipe,ddp,zero3", metavar="NAMES",
        help="a list with commas, of naive, gpipe, gpipe-recompute, 1f1b, zb-h1, dp, ddp, zero1, zero2, zero3, tp, 2d "
        "and 3d",
    )  # fmt: skip
    demo.add_argument("--device", default="auto", help="auto, cpu or cuda")
    demo.add_argument(
        "--html", default="mpkit-demo.html", metavar="FILE", help="file for the interactive timelines"
    )
    demo.add_argument("--plain", action="store_true", help="no bar while a run goes on, as in a pipe")


def _add_watch(commands: Commands) -> None:
    watch = add_command(
        commands, "watch", "run a program of your own, unchanged, and show its timeline",
        "It starts the script on every rank, as torchrun would; records communication, forwards, backwards, optimizer "
        "steps and memory; and prints the timeline. Options before the script are mpkit's, those after it are the "
        "script's.",
        example="mpkit watch --ranks 2 --html timeline.html train.py --epochs 1", run=_watch,
    )  # fmt: skip
    watch.add_argument(
        "--ranks", type=int, metavar="N", help="processes (default: one per GPU, or 2 without GPUs)"
    )
    watch.add_argument("--device", default="auto", help="auto, cpu or cuda")
    watch.add_argument(
        "--depth", type=int, metavar="N",
        help="levels of nested modules that are recorded (default: down to repeated blocks)",
    )  # fmt: skip
    watch.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time without progress after which a hang is reported",
    )
    watch.add_argument("--html", metavar="FILE", help="file for the interactive timeline")
    watch.add_argument("--trace", metavar="FILE", help="file for the trace, which `mpkit open` reads")
    _add_program(watch)


def _add_launch(commands: Commands) -> None:
    launch = add_command(
        commands, "launch", "print the commands that start a script on several machines",
        "It explains each flag of torchrun, a SLURM batch file, accelerate and deepspeed. It starts nothing.",
        example="mpkit launch --nodes 2 --gpus 8 --address node0 train.py", run=_launch,
    )  # fmt: skip
    launch.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    launch.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs per machine; each gets a process"
    )
    launch.add_argument("--address", default="NODE0", help="name or address of the first machine")
    launch.add_argument("--port", type=int, default=29500, help="a free port of the first machine")
    launch.add_argument("--hours", type=float, default=1.0, help="time limit of the SLURM job")
    _add_program(launch)


def _add_program(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as after `python -m`"
    )
    command.add_argument("program", metavar="SCRIPT", help="the script, such as train.py")
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def _demo(options: argparse.Namespace) -> None:
    from mpkit.cli.demo import Demo

    given = vars(options).copy()
    del given["run"]
    given["strategies"] = tuple(name.strip() for name in given["strategies"].split(",") if name.strip())
    Demo(**given).run()


def _watch(options: argparse.Namespace) -> None:
    from mpkit.cli.watch import CommandProgram, watch

    for option in ("--ranks", "--html", "--trace"):
        if option in options.arguments and getattr(options, option[2:]) is None:
            said = f"{option} comes after {options.program}, so it is the script's own; mpkit's options come before it"
            print(f"mpkit: {said}: mpkit watch {option} ... {options.program}", file=sys.stderr)
    program = CommandProgram(options.program, tuple(options.arguments), options.module)
    watch(
        program, ranks=options.ranks, device=options.device, depth=options.depth, timeout=options.timeout,
        html=options.html, trace=options.trace,
    )  # fmt: skip


def _launch(options: argparse.Namespace) -> None:
    from mpkit.cli.launch import LaunchPlan, commands
    from mpkit.cli.watch import CommandProgram

    program = CommandProgram(options.program, tuple(options.arguments), options.module)
    plan = LaunchPlan(program, options.nodes, options.gpus, options.address, options.port, options.hours)
    plan.check()
    print(commands(plan))
