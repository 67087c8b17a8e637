"""Torch's CSV of a pipeline schedule: a line per rank, an action per field.

    0F0,0F1,,0B0             actions are spelled as here; an empty field is an idle slot
    (0F7;7B3)OVERLAP_F_B     a forward and a backward at the same time: 0F7&7B3 here
    0UNSHARD, 0SEND_F1       communication, which is left out when it is read: mpkit adds its own, as torch does to a
                             file of computation alone

torch.distributed.pipelining writes such files with `_dump_csv` and reads them with `_load_csv` ("compute_only");
torchtitan takes the path of one as `pipeline_parallel_schedule_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mpkit.common.size_limits import read_text
from mpkit.plan.schedule.action import COMMUNICATION, Action

__all__ = ["fields_of", "lines_of", "text_of"]

_TOGETHER = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_SHARDS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_SENT = re.compile(rf"\d+({'|'.join(COMMUNICATION)})\d+")


def fields_of(line: str) -> list[str]:
    """Return the actions in a line of torch's CSV, as mpkit spells them; communication is left out.

    >>> fields_of("0UNSHARD,0F0,,(0F7;7B3)OVERLAP_F_B,0SEND_F1")
    ['0F0', '0F7&7B3']
    """
    try:
        (row,) = list(csv.reader([line], skipinitialspace=True)) or [[]]
    except csv.Error as error:
        raise ValueError(f"{line[:60]!r} is no line of a CSV: {error}") from None
    words = [_TOGETHER.sub(r"\1&\2", field.strip()) for field in row]
    return [word for word in words if word and not _SHARDS.fullmatch(word) and not _SENT.fullmatch(word)]


def lines_of(source: str | Path) -> tuple[list[str], str]:
    r"""Return the rows of a file of torch's, or of its text, as mpkit spells them, and a name for the schedule.

    Args:
        source: the path of a file, or several lines of text.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no text, or longer than any schedule.

    >>> lines_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1'], 'own')
    """
    is_text = isinstance(source, str) and "\n" in source
    text = str(source) if is_text else read_text(Path(source))
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return [" ".join(fields_of(line)) for line in lines], "own" if is_text else Path(source).stem


def text_of(rows: Iterable[Sequence[Action]], together: Collection[Action]) -> str:
    """Return rows of actions as torch's CSV of computation alone.

    >>> pair = [Action("F", 0, 0), Action("B", 0, 1)]
    >>> print(text_of([[*pair, Action("F", 0, 1)]], {pair[0]}), end="")
    (0F0;0B1)OVERLAP_F_B,0F1

    Args:
        rows: a row per rank.
        together: forwards that run together with the backward after them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        actions = iter(row)
        writer.writerow(
            f"({action};{next(actions)})OVERLAP_F_B" if action in together else str(action)
            for action in actions
        )
    return text.getvalue()
