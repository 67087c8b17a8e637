"""What a browser reads from the messages of `mpkit.views.timeline.wire`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.views.timeline.wire import COLUMNS


def unpack(buffer: bytes, count: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of a buffer, as the browser reads them."""
    columns, at = {}, 0
    for name, code in COLUMNS:
        columns[name] = np.frombuffer(buffer, code, count, at)
        at += columns[name].nbytes
    return columns
