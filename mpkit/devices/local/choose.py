"""Which rank gets which device, as a function of the request and of the devices there are; and the table that shows it.

A request is `devices=[2, 0]` (numbers as torch counts them), `"cuda:1"`, `["xpu:0", "xpu:1"]`, `"cuda"` for all of a
kind, or `["cpu"] * 4`. Ranks default to one per device; more ranks than devices share them in turn.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from mpkit.common.safe_text import escape, visible
from mpkit.common.table import table_html, table_text
from mpkit.common.units import memory_text
from mpkit.devices.local import gpus
from mpkit.devices.local.gpus import KINDS, Inventory, LocalDevice
from mpkit.errors import ArgumentError
from mpkit.plan.kinds import whole

LIKE = "such as mk.Cluster(devices=[2, 0]) or mk.Cluster(devices='cuda:1')"
ALSO = {"gpu": "cuda", "rocm": "cuda", "hip": "cuda"}


@dataclass(frozen=True)
class DeviceChoice:
    """The devices that ranks run on."""

    kind: str  # "cpu", or the kind of accelerator
    numbers: tuple[int, ...] = ()  # as torch counts; rank r is on numbers[r % len(numbers)]; () on CPUs
    ranks: int | None = None  # None if neither the request nor the number of devices says it
    named: int = field(default=0, repr=False, compare=False)  # devices named one by one; "cuda" names none

    def number_of(self, rank: int) -> int:
        """Return the number of a rank's device."""
        return self.numbers[rank % len(self.numbers)]

    def one_each(self, ranks: int) -> bool:
        """Return whether each of so many ranks has a device of its own.

        >>> DeviceChoice("cuda", (2, 0)).one_each(2), DeviceChoice("cuda", (1, 1)).one_each(2)
        (True, False)
        """
        return len({self.number_of(rank) for rank in range(ranks)}) == ranks if self.numbers else False


def choose(
    devices: object, ranks: int | None, inventory: Callable[[str], Inventory | None], argument: str = "devices"
) -> DeviceChoice:  # fmt: skip
    """Return the devices of a request, which the user made with this `argument`.

    `inventory` returns what torch sees of a kind; None if there is none.

    >>> from mpkit.devices.local.gpus import LocalDevice
    >>> choose("cuda:1", 2, {"cuda": Inventory("cuda", (LocalDevice(name="A100"),) * 4)}.get)
    DeviceChoice(kind='cuda', numbers=(1,), ranks=2)
    """
    said = f"{argument}={devices!r}"
    asked = [_read(each, said) for each in _each(devices)]
    if not asked:
        raise ValueError(f"{said} names no device: one per rank, {LIKE}")
    kinds = list(dict.fromkeys(kind for kind, _ in asked if kind))
    if len(kinds) > 1:
        raise ValueError(
            f"{said} mixes {' and '.join(kinds)}: the ranks of a run talk over one backend, so all are of "
            f"one kind, {LIKE}"
        )
    kind = kinds[0] if kinds else next((each for each in KINDS if inventory(each) is not None), "cuda")
    if kind == "cpu":
        named = 0 if isinstance(devices, str) else len(asked)
        return DeviceChoice("cpu", (), _fitting_ranks(said, ranks, named), named)
    there = inventory(kind)
    if there is None:
        raise ValueError(_none(said, kind, ranks or len(asked), inventory))
    every = range(len(there.devices))
    numbers = [number for _, one in asked for number in (every if one is None else [one])]
    for number in numbers:
        if number >= len(there.devices):
            raise ValueError(_explain_missing(said, number, there))
    named = sum(one is not None for _, one in asked)
    return DeviceChoice(kind, tuple(numbers), _fitting_ranks(said, ranks, len(numbers)), named)


def _each(devices: object) -> list[object]:
    if isinstance(devices, str):
        return [part.strip() for part in devices.split(",") if part.strip()]
    return list(devices) if isinstance(devices, Iterable) else [devices]


def _read(one: object, said: str) -> tuple[str, int | None]:
    """Return the kind ("" if it is left out) and the number (None for all of the kind) of one entry."""
    if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
        return "", one
    text = str(one).strip().lower()
    if isinstance(one, str) and text.isdecimal():
        return "", int(text)
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
    word = ALSO.get(match[1], match[1]) if match else ""
    if match is None or word not in (*KINDS, "cpu"):
        near = get_close_matches(re.sub(r"[^a-z].*", "", text), [*KINDS, "cpu", "auto"], 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{said}: {one!r} is no device{hint} It is a number as torch counts, from 0 on, or "
            f"'cuda:1', or a kind ({', '.join((*KINDS, 'cpu'))}), {LIKE}"
        )
    return word, int(match[2]) if match[2] is not None and word != "cpu" else None


def _fitting_ranks(said: str, ranks: int | None, count: int) -> int | None:
    """Return the number of ranks, unless there are fewer of them than devices."""
    if ranks is not None and ranks < count:
        raise ValueError(
            f"{said} names {count} devices for ranks={ranks}: leave out ranks for one per device, or name "
            f"{ranks} of them"
        )
    return ranks if ranks is not None else count or None


def _none(said: str, kind: str, count: int, inventory: Callable[[str], Inventory | None]) -> str:
    others = [each for each in KINDS if inventory(each) is not None]
    there = f"it sees {', '.join(others)}" if others else "and no other accelerator"
    return (
        f"{said}: torch sees no {kind} device here, {there}; `mpkit doctor gpus not found` has the steps "
        f"to find out why, and mk.Cluster(ranks={count}, device='cpu') runs the same code on CPU processes"
    )


def _explain_missing(said: str, number: int, there: Inventory) -> str:
    count = len(there.devices)
    only = f"{there.kind}:0" if count == 1 else f"{there.kind}:0 to {there.kind}:{count - 1}"
    same = [place for place, device in enumerate(there.devices) if device.number == number]
    meant = f"such as devices={list(range(min(2, count)))}"
    if same:
        meant = f"nvidia-smi's GPU {number} is {there.kind}:{same[0]} for this program: devices=[{same[0]}]"
    return f"{said} names {there.kind}:{number}, and torch sees {count}: {only} ({there.decided_by}); {meant}"


# ---- the ranks of a Cluster ----------------------------------------------------------------------------------------

MOST_RANKS = 256  # the most processes per machine; mpkit takes a larger number for a typing error


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
    """Return the devices of a Cluster's ranks, and how many ranks there are."""
    if devices is not None and device != "auto":
        raise ValueError(
            f"Cluster(device={device!r}, devices={devices!r}): give one of both; devices= names them one by one, such "
            "as mk.Cluster(devices=[2, 0]), and device= is the kind of all of them"
        )
    number = None if ranks is None else check_ranks(ranks)
    count = 0
    if devices is None and device in ("auto", "cuda"):
        import torch

        count = torch.cuda.device_count()  # this starts no CUDA context
    if devices is None and (count or device in ("auto", "cpu")):
        chosen = DeviceChoice("cuda" if count else "cpu", tuple(range(count)), number)
    else:
        argument, request = ("device", device) if devices is None else ("devices", devices)
        chosen = choose(request, number, gpus.inventory_of, argument)
        there = gpus.inventory_of(chosen.kind) if chosen.numbers else None
        for note in there.notes if there is not None else ():
            print(f"mpkit: {note}")
    if chosen.ranks is None:
        raise ArgumentError(
            "mk.Cluster() lacks ranks. Such as:\n    mk.Cluster(ranks=4)\n"
            "(Without a number it is the ranks that torchrun, srun or mpirun have started, and none of these has.)"
        )
    check_ranks(chosen.ranks)
    return chosen


# ---- the table of ranks and their devices that a Cluster prints ----------------------------------------------------

HEAD = ("rank", "device", "name", "UUID or bus id", "memory")
COLUMNS = range(len(HEAD))  # all of words


class DeviceRow(NamedTuple):
    """A rank's device, in words."""

    device: str
    name: str
    identity: str
    memory: str


def row_of(chosen: DeviceChoice, rank: int, inventory: Inventory | None) -> DeviceRow:
    """Return the row of a rank; with a launcher, of its number on its node.

    >>> pair = Inventory("cuda", tuple(LocalDevice(i, "T4", f"GPU-{i}a", memory=15 << 30) for i in range(2)))
    >>> row_of(DeviceChoice("cuda", (1, 0)), 0, pair)
    DeviceRow(device='cuda:1', name='T4', identity='GPU-1a', memory='15.0 GiB')
    """
    there = inventory.devices if inventory is not None else ()
    number = chosen.number_of(rank)
    device = there[number] if number < len(there) else LocalDevice()
    memory = memory_text(device.memory) if device.memory else "?"
    name = "mps" if chosen.kind == "mps" else f"{chosen.kind}:{number}"
    return DeviceRow(name, device.name or "?", device.identity or "?", memory)


Told = Sequence[Sequence[str]] | None  # the rows of all ranks that a launcher has started


def devices_text(chosen: DeviceChoice, ranks: int, told: Told = None) -> str:
    """Return the table as text; below it, which variable decides and what may surprise."""
    rows, below = _table(chosen, ranks, told)
    return visible("\n".join([*table_text(rows, COLUMNS), *below]))


def devices_html(chosen: DeviceChoice, ranks: int, told: Told = None) -> str:
    """Return the same as HTML."""
    rows, below = _table(chosen, ranks, told)
    return f"{table_html(rows, COLUMNS)}<p>{'<br>'.join(map(escape, below))}</p>"


def _table(chosen: DeviceChoice, ranks: int, told: Told) -> tuple[list[Sequence[str]], list[str]]:
    """Return the rows, the first of which has the heads, and the lines below them."""
    inventory = gpus.inventory_of(chosen.kind)
    each = told or [row_of(chosen, rank, inventory) for rank in range(ranks)]
    rows: list[Sequence[str]] = [HEAD, *((str(rank), *row) for rank, row in enumerate(each))]
    if inventory is None:
        return rows, []
    return rows, [f"decided by: {inventory.decided_by}", *inventory.notes]
