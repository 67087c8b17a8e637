"""Build both wheels: `python -m scripts.exam [FOLDER]`, by default into build/exam.

copy    copy what the wheel is built from into a folder that is thrown away
seal    write each exercise there without its solution and hints
whole   write the exercises as they are into the package mpkit_solutions
build   let hatchling build both
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from inspect import getsource
from pathlib import Path

import mpkit
from mpkit.course.catalogue import families, of_family
from scripts.exam.seal import sealed, sealed_text

HOME = Path(__file__).parents[2]
PLACE = Path("mpkit", "course", "exercises")
PARTS = ("pyproject.toml", "README.md", "LICENSE", "mpkit")
SOLUTIONS = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "mpkit-solutions"
version = "{version}"
description = "The solutions, checks and hints of mpkit's exercises, for those who grade an exam"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
dependencies = ["mpkit=={version}+exam"]

[tool.hatch.build.targets.wheel]
packages = ["mpkit_solutions"]
"""


def main(folder: str = "build/exam") -> None:
    """Build both wheels into a folder, and print their paths."""
    target = Path(folder).absolute()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        student, whole = Path(name, "mpkit"), Path(name, "solutions")
        # ---- copy
        _copy(student)
        # ---- seal
        for package in families():
            for entry in of_family(package.__name__.rpartition(".")[2]):
                module = import_module(entry.module)
                path = student.joinpath(*entry.module.split(".")).with_suffix(".py")
                path.write_text(sealed(entry, module, getsource(module)), encoding="utf-8")
                path.with_suffix(".md").write_text(sealed_text(entry), encoding="utf-8")
        with (student / PLACE / "__init__.py").open("a", encoding="utf-8") as file:
            file.write("\nSEALED = True\n")
        # ---- whole
        _write_whole(whole)
        # ---- build
        for source in (student, whole):
            _build(source, target)
    for path in sorted(target.glob("*.whl")):
        print(path)


def _copy(place: Path) -> None:
    """Copy the project; its version says that it is the one for an exam."""
    place.mkdir()
    for part in PARTS:
        if (HOME / part).is_dir():
            shutil.copytree(HOME / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(HOME / part, place / part)
    project = place / "pyproject.toml"
    text = re.sub(r'^version = "(.*)"$', r'version = "\1+exam"', project.read_text(), count=1, flags=re.M)
    project.write_text(text, encoding="utf-8")


def _write_whole(place: Path) -> None:
    """Write the project mpkit-solutions: the exercises, which import each other under their new name."""
    shutil.copytree(HOME / PLACE, place / "mpkit_solutions", ignore=shutil.ignore_patterns("__pycache__"))
    for path in place.rglob("*.py"):
        text = path.read_text(encoding="utf-8").replace("mpkit.course.exercises", "mpkit_solutions")
        path.write_text(text, encoding="utf-8")
    (place / "pyproject.toml").write_text(SOLUTIONS.format(version=mpkit.__version__), encoding="utf-8")
    shutil.copy(HOME / "LICENSE", place)


def _build(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=source, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
