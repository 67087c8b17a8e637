"""Checks of the arguments of a Cluster and of its runs."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from mpkit.devices.local.choose import DeviceChoice, choose
from mpkit.errors import ArgumentError
from mpkit.plan.kinds import real, whole

__all__ = [
    "EXAMPLE",
    "MOST_RANKS",
    "check_function",
    "check_ranks",
    "check_timeout",
    "elsewhere",
    "place_ranks",
]

MOST_RANKS = 256
"""The most processes per machine; a larger number is taken for a typing error."""


def check_timeout(timeout: Any) -> float | None:
    """Return the timeout in seconds if it is valid."""
    if timeout is None:
        return None
    seconds = real(timeout)
    if seconds is None or not seconds > 0:
        raise ValueError(f"timeout={timeout!r}: a number of seconds above 0, such as timeout=60, or None")
    return seconds


def check_ranks(ranks: Any) -> int:
    """Return the number of ranks if this machine can run so many."""
    number = whole(ranks)
    if number is None or number < 1:
        raise ValueError(
            f"Cluster(ranks={ranks!r}): a number of processes, 1 or more, such as mk.Cluster(ranks=4)"
        )
    if number > MOST_RANKS:
        raise ValueError(
            f"Cluster(ranks={ranks}) would start {ranks} processes on this machine; up to {MOST_RANKS} are allowed. "
            "mk.simulate draws larger pipelines without processes."
        )
    return number


def place_ranks(ranks: Any, device: Any, devices: Any) -> DeviceChoice:
    """Return the devices of a Cluster's ranks, and how many ranks there are.

    Raises:
        ArgumentError: neither the number of ranks nor the devices are given.
        ValueError: there is no such device here, there can be no such number of ranks, or both do not fit.
    """
    if devices is not None and device != "auto":
        raise ValueError(
            f"Cluster(device={device!r}, devices={devices!r}): give one of both; devices= names them one by one, such "
            "as mk.Cluster(devices=[2, 0]), and device= is the kind of all of them"
        )
    number = None if ranks is None else check_ranks(ranks)
    gpus = 0
    if devices is None and device in ("auto", "cuda"):
        import torch

        gpus = torch.cuda.device_count()  # this starts no CUDA context
    if devices is None and (gpus or device in ("auto", "cpu")):
        chosen = DeviceChoice("cuda" if gpus else "cpu", tuple(range(gpus)), number)
    else:
        from mpkit.devices.local.gpus import inventory_of

        named = ("device", device) if devices is None else ("devices", devices)
        chosen = choose(named[1], number, inventory_of, named[0])
        there = inventory_of(chosen.kind) if chosen.numbers else None
        for note in there.notes if there is not None else ():
            print(f"mpkit: {note}")
    if chosen.ranks is None:
        raise ArgumentError(
            "mk.Cluster() lacks ranks. Such as:\n    mk.Cluster(ranks=4)\n"
            "(Without a number it is the ranks that torchrun, srun or mpirun have started, and none of these has.)"
        )
    check_ranks(chosen.ranks)
    return chosen


def check_function(fn: Callable[..., Any], args: Sequence[object]) -> None:
    """Check that ranks can call fn(ctx, *args).

    >>> check_function(lambda: 1, ())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: run(fn): ranks call fn(ctx), which <lambda>() does not fit: too many positional arguments. ...

    Raises:
        ValueError: it is no function, or has other parameters.
    """
    if not callable(fn):
        raise ValueError(f"run(fn) takes a function of a context, such as `lambda ctx: ctx.rank`, not {fn!r}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of a built-in function, which does not say its parameters
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        call = f"fn(ctx{', *args' * bool(args)})"
        what = f"{getattr(fn, '__name__', type(fn).__name__)}{signature}"
        raise ValueError(
            f"run(fn): ranks call {call}, which {what} does not fit: {error}. Its first parameter is the "
            "context, as in cluster.run(lambda ctx: ctx.rank)"
        ) from None


EXAMPLE = """\
cluster.train(
    model,
    data,  # [(inputs, targets), ...], or mk.Batches(dataset, batch_size=32)
    mk.Plan.ddp(2),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    steps=10,
)"""


def elsewhere() -> dict[str, str]:
    """Return what other libraries call arguments of `Cluster.train`, and what is to be used here."""
    return tomllib.loads((files(__package__) / "elsewhere.toml").read_text(encoding="utf-8"))
