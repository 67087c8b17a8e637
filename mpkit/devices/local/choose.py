"""Which rank gets which device: a function of what was asked and of what there is.

What is asked: `devices=[2, 0]` (numbers as torch counts them), `"cuda:1"`, `["xpu:0", "xpu:1"]`, `"cuda"` for all of a
kind, `["cpu"] * 4`. Ranks default to one per device; more ranks than devices share them in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from mpkit.devices.local.gpus import KINDS, Inventory

__all__ = ["DeviceChoice", "choose"]

LIKE = "such as mk.Cluster(devices=[2, 0]) or mk.Cluster(devices='cuda:1')"
ALSO = {"gpu": "cuda", "rocm": "cuda", "hip": "cuda"}


@dataclass(frozen=True)
class DeviceChoice:
    """The devices that ranks are put on.

    Attributes:
        kind: "cpu", or the kind of accelerator.
        numbers: the devices' numbers, as torch counts; rank r is on numbers[r % len(numbers)]. () on CPUs.
        ranks: the number of ranks: what was asked, or one per device; None where neither says.
        named: how many devices were named one by one; "cuda" names none.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    ranks: int | None = None
    named: int = field(default=0, repr=False, compare=False)

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
    """Return the devices that were asked for.

    >>> from mpkit.devices.local.gpus import LocalDevice
    >>> four = Inventory("cuda", (LocalDevice(name="A100"),) * 4)
    >>> machine = {"cuda": four}.get
    >>> choose([2, 0], None, machine)
    DeviceChoice(kind='cuda', numbers=(2, 0), ranks=2)
    >>> choose("cuda:1", 2, machine)
    DeviceChoice(kind='cuda', numbers=(1,), ranks=2)

    Args:
        devices: what was asked.
        ranks: the number of ranks, if it was asked too.
        inventory: inventory(kind) is what torch sees of a kind; None if there is none.
        argument: the argument that it was asked by.

    Raises:
        ValueError: it cannot be read, there is no such device, or the number of ranks does not fit.
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
    numbers = [
        number
        for _, one in asked
        for number in (range(len(there.devices)) if one is None else [one])  # "cuda": all of them
    ]
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
    """Return the kind ("" if it is not said) and the number (None for all of the kind) of one entry."""
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
    meant = (
        f"nvidia-smi's GPU {number} is {there.kind}:{same[0]} for this program: devices=[{same[0]}]"
        if same
        else f"such as devices={list(range(min(2, count)))}"
    )
    return f"{said} names {there.kind}:{number}, and torch sees {count}: {only} ({there.decided_by}); {meant}"
