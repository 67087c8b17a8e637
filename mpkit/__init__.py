"""mpkit: learn, try and plan parallel training in PyTorch, from a notebook.

The public names are listed in `__init__.pyi`, once, for type checkers and for this module. Each is imported when it is
first used, so that `import mpkit` is cheap.
"""

from __future__ import annotations

import atexit
from functools import cache
from importlib import import_module
from typing import Any

from mpkit.common.display import look_in
from mpkit.common.needs import lacks_torch, needs_torch
from mpkit.common.tracebacks import public
from mpkit.strategies.comm.release import free_groups

__version__ = "0.1.0"

look_in("mpkit.views.renderers")
# Registered here, before a program registers anything of its own, which therefore runs earlier and has its groups.
atexit.register(free_groups)

MOVED = {
    "ArgumentError": "errors",
    "by_name": "optimizer",
    "data_digest": "digest",
    "Device": "devices",
    "elementwise": "optimizer",
    "find_tensor_plan": "tensor",
    "Hardware": "devices",
    "hf_experiment": "experiments",
    "linear_scaling": "learning_rate",
    "Link": "devices",
    "Region": "tensor",
    "sample_digests": "digest",
    "soap": "experiments",
    "sqrt_scaling": "learning_rate",
    "TensorPlan": "tensor",
    "TraceError": "errors",
}
"""Names that were at the top once, and the submodule that they are in now."""

LEFT = {"layer_strategies": "examples.flexflow", "layerwise": "examples.flexflow"}
"""Names that were at the top once, and the package in the repository that they are in now."""


def load_ipython_extension(shell: Any) -> None:
    """Add `%%ranks` to a notebook: IPython calls this for `%load_ext mpkit`."""
    from mpkit.launch.notebook.magics import load

    load(shell)


@cache
def homes() -> dict[str, str]:
    """Return the module that each public name is imported from."""
    import ast
    from importlib.resources import files

    tree = ast.parse((files(__name__) / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@public
def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(homes())
    if name.startswith("__") or name not in homes():
        now = f"; it is mk.{MOVED[name]}.{name} now" if name in MOVED else ""
        if name in LEFT:
            now = (
                f"; it moved out of the package, to the repository: from {LEFT[name]} import layer_strategies"
            )
        raise AttributeError(f"module 'mpkit' has no attribute {name!r}{now}")
    home = homes()[name]
    try:
        value = vars(import_module(home)).get(name) or import_module(f"{home}.{name}")
    except ModuleNotFoundError as error:
        if not lacks_torch(error):
            raise
        raise needs_torch(f"mk.{name}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *homes()])
