"""How helper processes start: they import what the launching process would, and never from the current folder.

Python looks for modules in the current folder or the script's folder before its own. A learner's random.py there, or a
file that someone else put into a shared folder, would be imported in place of the real module. So helper processes
start with `python -P` and get the launching process's sys.path without these folders. Ranks set the whole sys.path
afterwards, once all of mpkit has been imported, for the user's own modules.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ["helper_command"]

START = """
import json, sys
path, module, function, arguments = json.loads(sys.argv[1])
sys.path[:] = path
getattr(__import__(module, fromlist=[function]), function)(**arguments)
"""


def helper_command(function: str, **arguments: Any) -> list[str]:
    """Return the command of a process that calls a function ("module:name") with arguments of JSON types."""
    module, _, name = function.partition(":")
    return [sys.executable, "-P", "-c", START, json.dumps([safe_path(), module, name, arguments])]


def safe_path() -> list[str]:
    """Return sys.path without the current folder and the script's, unless Python's own packages are there.

    mpkit may lie in one of these, as in a checkout that is not installed; its folder then comes last.
    """
    own = {
        os.path.realpath(folder) for folder in (*sysconfig.get_paths().values(), site.getusersitepackages())
    }
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    unsafe = {os.path.realpath(os.path.dirname(script))} if os.path.isabs(script) else set()
    if os.path.isdir(os.curdir):  # otherwise it has been deleted
        unsafe.add(os.path.realpath(os.curdir))
    safe = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) not in unsafe - own]
    home = str(Path(__file__).parents[3])
    return safe if home in safe else [*safe, home]
