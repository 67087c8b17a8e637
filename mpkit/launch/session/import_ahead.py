"""Import what the first training needs while the caller still makes the model and the data.

Preparing a training runs the model on fake tensors, for which torch imports its compiler (torch._dynamo) and sympy:
about a second in a fresh process, which `import torch` spares those who do not need it. A Cluster begins with this in a
thread when it is made, as its fork server begins to import torch, and `train` waits for the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading

__all__ = ["NEEDED", "import_ahead"]

NEEDED = (
    "sympy",
    "torch.distributed.tensor",
    "torch._dynamo",
    "mpkit.strategies.prepare.prepare",
    "mpkit.launch.session.run",
)
"""What `train` imports at its first call. Each is imported after what it imports itself, so that a thread that imports
one of them at the same time waits for it, rather than for a ring of modules that wait for each other."""


def import_ahead() -> threading.Thread:
    """Start a thread that imports these modules, and return it.

    The thread is no daemon: an interpreter that ends while it imports would abort in the middle of torch's C++ code.
    An import that fails here fails in `train` too, where the error is reported.
    """
    thread = threading.Thread(target=_import, name="mpkit-import-ahead", daemon=False)
    thread.start()
    return thread


def _import() -> None:
    collects = gc.isenabled()
    gc.disable()  # what imports create stays: looking for garbage in it takes a quarter of their time
    try:
        with contextlib.suppress(ImportError):
            for name in NEEDED:
                importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
