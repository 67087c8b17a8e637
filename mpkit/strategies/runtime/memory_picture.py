"""Whether a rank ran out of memory, and what it held then: taken while the error is reported.

Until then, the traceback's frames and the recorder's ledger are as they were when the allocation failed.
"""

import torch

from mpkit.trace.record.recorder import Recorder

WORDS = ("can't allocate memory", "out of memory")
"""What torch says where it raises a plain RuntimeError: its CPU allocator, and older backends."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is, or was caused by, an allocation that failed.

    >>> import torch
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(ValueError("memory"))
    (True, False)
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(each, RuntimeError) and any(words in str(each).lower() for words in WORDS):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


def picture_of(recorder: Recorder) -> dict[str, dict[str, int]]:
    """Return the bytes held by category, and on a GPU what the allocator and the driver say."""
    device: dict[str, int] = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        device = {"allocated": allocated, "reserved": reserved, "free": free, "total": total}
    return {"held": recorder.memory.held, "device": device}
