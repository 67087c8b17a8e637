"""The messages if packages are missing: those of a notebook, or PyTorch.

Schedules, plans, traces, timelines, replays, estimates and advice need only sizes and records, and import no torch:
they also run without it, such as in a browser. Code that trains, or reads a model, imports torch when it is used. If
that fails, the user's public call says so (`mpkit.common.tracebacks.public`).
"""

from importlib.util import find_spec

from mpkit.errors import NeedsTorch


def needs_notebook(what: str, error: ImportError) -> ImportError:
    """Return an ImportError that says how to install the packages that `what` needs, and what works without them.

    >>> print(str(needs_notebook("the live timeline", ImportError("No module named 'anywidget'"))).splitlines()[0])
    the live timeline needs packages that only notebooks need (No module named 'anywidget'):
    """
    return ImportError(
        f"{what} needs packages that only notebooks need ({error}):\n"
        '    pip install "mpkit[notebook]"\n'
        "Without them print(timeline), timeline.to_svg(path) and timeline.to_html(path) show the same picture."
    )


def needs_torch(what: str) -> NeedsTorch:
    """Return an error that says why `what` needs PyTorch, and what works without it.

    >>> print(str(needs_torch("mk.trace_fake")).splitlines()[0])
    mk.trace_fake needs PyTorch to run or read models, and this Python has none (in a browser there is none to install).
    """
    return NeedsTorch(
        f"{what} needs PyTorch to run or read models, and this Python has none (in a browser there is none to "
        "install).\n"
        "What follows from sizes and from recorded traces works without it:\n"
        '    mk.simulate(mk.Plan.pipeline("1f1b", 4, 8))\n'
        '    mk.explore("1f1b", ranks=4, microbatches=8)\n'
        '    mk.fits("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)\n'
        '    mk.Timeline.of(mk.Trace.load(path), hardware="8x-a100-nvlink")\n'
        "On a computer of your own, pip install mpkit brings PyTorch."
    )


def require_torch(what: str) -> None:
    """Check that PyTorch is installed, without importing it."""
    if find_spec("torch") is None:
        raise needs_torch(what)


def lacks_torch(error: BaseException) -> bool:
    """Return whether an import failed because PyTorch is not installed."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch"
