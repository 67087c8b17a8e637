"""mpkit: learn, try and plan parallel training in PyTorch, from a notebook.

The public names are listed in `__init__.pyi`, once, for type checkers and for this module. Each is imported when it is
first used, so that `import mpkit` is cheap.
"""

import atexit
from functools import cache
from importlib import import_module
from typing import Any

from mpkit.common.missing_packages import lacks_torch, needs_torch
from mpkit.common.tracebacks import public
from mpkit.strategies.comm.release import free_groups

__version__ = "0.2.0"

# Registered here, before a program registers anything of its own, which therefore runs earlier and has its groups.
atexit.register(free_groups)


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
        raise _unknown_name(name)
    home = homes()[name]
    try:
        value = vars(import_module(home)).get(name) or import_module(f"{home}.{name}")
    except ModuleNotFoundError as error:
        if not lacks_torch(error):
            raise
        raise needs_torch(f"mk.{name}") from None
    globals()[name] = value
    return value


def _unknown_name(name: str) -> Exception:
    """Return the error for a name that is not at the top: what is near."""
    from difflib import get_close_matches

    from mpkit.errors import UnknownName

    near = [f"mk.{each}" for each in get_close_matches(name, homes(), 2, 0.7)]
    hint = f". Did you mean {' or '.join(near)}?" if near else ""
    return UnknownName(f"module 'mpkit' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """Return what Tab completes: public names, without what this module itself imports."""
    return sorted({*homes(), *(name for name in globals() if name.startswith("__"))})
