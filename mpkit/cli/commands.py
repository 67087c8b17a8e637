"""What the commands of `commands.toml` do with their options; `mpkit.cli.predict` has those that predict.

Each imports what it needs when it is called, so that `mpkit --help` is quick.
"""

import argparse
import sys


def train_demo(options: argparse.Namespace) -> None:
    """Run `mpkit demo`."""
    from mpkit.cli.demo import Demo

    given = vars(options).copy()
    del given["run"], given["command"]
    given["strategies"] = tuple(name.strip() for name in given["strategies"].split(",") if name.strip())
    Demo(**given).run()


def watch_program(options: argparse.Namespace) -> None:
    """Run `mpkit watch`."""
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


def print_launch(options: argparse.Namespace) -> None:
    """Run `mpkit launch`."""
    from mpkit.cli.launch import LaunchPlan, commands
    from mpkit.cli.watch import CommandProgram

    program = CommandProgram(options.program, tuple(options.arguments), options.module)
    plan = LaunchPlan(program, options.nodes, options.gpus, options.address, options.port, options.hours)
    plan.check()
    print(commands(plan))


def open_traces(options: argparse.Namespace) -> None:
    """Run `mpkit open`."""
    from mpkit.timeline.foreign.open_trace import open

    trace = open(options.paths)
    timeline = trace.timeline(options.hardware)
    print(timeline)
    print(f"inferred: {trace.inferred}")
    if options.html:
        timeline.to_html(options.html)
        print(f"mpkit: an interactive timeline is in {options.html}")
    if options.perfetto:
        print(f"mpkit: a trace for ui.perfetto.dev is in {timeline.to_perfetto(options.perfetto)}")
    if options.trace:
        print(f"mpkit: the trace is in {trace.save(options.trace)}")


def diagnose_traces(options: argparse.Namespace) -> None:
    """Run `mpkit diagnose`."""
    from mpkit.timeline.foreign.open_trace import open
    from mpkit.timeline.timeline import Timeline

    timeline = Timeline.of(open(options.paths), clock=options.clock)
    found = timeline.diagnose(options.step, hardware=options.hardware)
    print(found)
    if options.critical:
        print(f"\n{found.path}")
    if options.html is not None:
        found.to_html(options.html)
        print(f"\nmpkit: a page with pictures is in {options.html}")


def examine_machine(options: argparse.Namespace) -> None:
    """Run `mpkit doctor`; leave with 1 if something costs."""
    from rich.console import Console

    from mpkit.common.display import draw
    from mpkit.launch.doctor.doctor import doctor

    report = doctor(" ".join(options.topic) or None, quick=options.quick)
    if options.json:
        print(report.to_json())
    else:
        draw(report, "terminal", Console(highlight=False))
    raise SystemExit(0 if report.ok else 1)


def grade_notebooks(options: argparse.Namespace) -> None:
    """Run `mpkit grade`."""
    try:
        import IPython  # noqa: F401  # the notebooks' processes need it

        from mpkit.course.grading.grade import grade
        from mpkit.course.sandbox.guard import Guard
    except ImportError as error:
        raise ValueError(
            f"grading runs notebooks, and their packages are not here ({error}): pip install 'mpkit[notebook]'"
        ) from None

    if not options.output.parent.is_dir():
        raise ValueError(f"-o {options.output}: there is no folder {options.output.parent} to write it into")
    guard = Guard(options.seconds, int(options.memory * 2**30))
    names = tuple(name.strip() for name in options.exercises.split(",") if name.strip())
    try:
        summary = grade(options.folder, names, output=options.output, guard=guard)
    except KeyboardInterrupt:
        said = f"interrupted; {options.output} has what is graded, and the same command goes on from there"
        print(f"mpkit: {said}", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"\n{summary}\n\n{options.output}: the class; {options.output.with_suffix('')}: a page per student")


def write_exercises(options: argparse.Namespace) -> None:
    """Run `mpkit exercises`."""
    from mpkit.course.catalogue import families, find, of_family
    from mpkit.course.framework.kinds import Questions
    from mpkit.course.framework.room import shared_room
    from mpkit.course.notebooks import link_tutorials, write_notebooks
    from mpkit.course.signatures import record_signatures

    names = [name.strip() for name in options.record.split(",") if name.strip()]
    every = [entry for package in families() for entry in of_family(package.__name__.rpartition(".")[2])]
    for entry in every if names == ["all"] else map(find, names):
        if not isinstance(entry.exercise, Questions):  # whose wrong values are in the text
            for fault in record_signatures(entry, shared_room()):
                print(fault)
    for path in (*write_notebooks(options.folder), *link_tutorials(options.folder)):
        print(path)
