"""The first file that a helper process runs: imports what the launching process would, never from the current folder.

Python looks for modules in the current folder or the script's folder before its own. A learner's random.py there, or a
file that someone else put into a shared folder, would be imported in place of the real module. So helper processes
start with `python -P`, get the launching process's sys.path without these folders, and import the same `mpkit` and
`torch` as the launching process, wherever those are. Ranks set the whole sys.path afterwards, once all of mpkit has
been imported, for the user's own modules.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__all__ = ["boot_command", "boot_environment"]


class PinnedFinder(MetaPathFinder):
    """Finds packages by their file in the launching process."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of `fullname` if it is one of the pinned packages."""
        if (file := self.files.get(fullname)) is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, file, submodule_search_locations=[os.path.dirname(file)]
        )


def boot_command(entry: str, *arguments: str) -> list[str]:
    """Return the command of a process that calls `entry` ("module:function") with these strings."""
    settings = {"path": safe_path(), "files": package_files(), "entry": entry, "arguments": arguments}
    return [sys.executable, "-P", str(Path(__file__)), json.dumps(settings)]


def boot_environment() -> dict[str, str]:
    """Return os.environ for a helper process, without PYTHONPATH: it receives its sys.path separately."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def safe_path() -> list[str]:
    """Return sys.path without the current folder and the script's, unless Python's own packages are there."""
    own = {
        os.path.realpath(folder) for folder in (*sysconfig.get_paths().values(), site.getusersitepackages())
    }
    unsafe = {os.path.realpath(folder) for folder in (_current_folder(), _script_folder()) if folder} - own
    return [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) not in unsafe]


def package_files() -> dict[str, str]:
    """Return the files of `mpkit` and `torch` in this process."""
    specs = ((name, importlib.util.find_spec(name)) for name in ("mpkit", "torch"))
    return {name: os.path.abspath(spec.origin) for name, spec in specs if spec and spec.origin}


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder has been deleted
        return None


def _script_folder() -> str | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(file) if file and os.path.isabs(file) else None


if __name__ == "__main__":
    settings: dict[str, Any] = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    sys.meta_path.insert(0, PinnedFinder(settings["files"]))
    module, function = settings["entry"].split(":")
    getattr(importlib.import_module(module), function)(*settings["arguments"])
