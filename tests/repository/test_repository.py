"""What the repository promises about itself.

Versions in one place, imports one way, nothing of the machine it was written on.
"""

import os
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it: `Jinja2` and `jinja2` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "constraints.txt holds exact versions only"
    return {normal(name): version for name, version in pairs}


def requirements() -> list[str]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    return [*PYPROJECT["build-system"]["requires"], *project["dependencies"], *chain(*extras)]


def test_torch_is_pinned_for_every_build() -> None:
    # No "+cpu": the pin must hold for the CPU's wheel and the GPU's.
    assert pins()["torch"] == "2.13.0"


@pytest.mark.parametrize("requirement", requirements())
def test_every_dependency_has_a_range_and_a_pin_within_it(requirement: str) -> None:
    name, least = requirement.split(">=")
    pin = pins()[normal(name)]
    assert release(pin) >= release(least), f"{name}: constraints.txt has {pin}, below {least}"


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]+", version)[0].rstrip(".").split("."))


def test_training_needs_four_packages() -> None:
    core = [normal(re.split(r"[^\w.-]", line)[0]) for line in PYPROJECT["project"]["dependencies"]]
    assert sorted(core) == ["cloudpickle", "numpy", "rich", "torch"]


# Spelt in parts, or this file would find itself.
REGISTRY_HOSTS = [
    "pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "registry.npmjs" + ".org",
    "deb.debian" + ".org", "anaconda" + ".org",
]  # fmt: skip
MACHINE_PATHS = ["/opt/" + "wheels", "/opt/" + "pypi", "/wo" + "rk/"]


def source_files(root: Path = ROOT) -> list[Path]:
    """What git tracks; where git knows of nothing (an archive), all that .gitignore does not leave out."""
    if shutil.which("git") and (root / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
        paths = [root / name for name in listing.stdout.split("\0") if name]
        if paths:
            return [path for path in paths if path.is_file()]
    return unpacked_files(root)


def unpacked_files(root: Path) -> list[Path]:
    from pathspec import GitIgnoreSpec  # hatchling reads .gitignore with it too

    ignored = GitIgnoreSpec.from_lines((root / ".gitignore").read_text(encoding="utf-8").splitlines())
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [n for n in folders if n != ".git" and not ignored.match_file(f"{here / n}/")]
        found += [root / here / name for name in files if not ignored.match_file(str(here / name))]
    return found


@pytest.mark.parametrize("words", [REGISTRY_HOSTS, MACHINE_PATHS], ids=["hosts", "paths"])
def test_no_file_names_a_registry_or_a_path_of_this_machine(words: list[str]) -> None:
    pattern = re.compile(rf"(?<![\w~])(?:{'|'.join(map(re.escape, words))})".encode())
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0].decode()}"
        for path in source_files()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        for match in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)


def test_what_views_and_catalogue_need_ships_with_the_package(tmp_path: Path) -> None:
    """A wheel holds every source file of mpkit/, .js and .csv included."""
    from hatchling.builders.wheel import WheelBuilder

    shipped = {included.distribution_path for included in WheelBuilder(str(ROOT)).recurse_included_files()}
    ours = {path.relative_to(ROOT).as_posix() for path in source_files()}
    assert {path for path in ours if path.startswith("mpkit/")} <= shipped


def test_every_way_to_install_takes_versions_from_constraints_and_a_cpu_build_of_torch() -> None:
    """README's line and environment.yml's are one."""
    line = "uv pip install --torch-backend=cpu -c constraints.txt -e '.[notebook]'"
    for name in ("README.md", "environment.yml"):
        assert line in (ROOT / name).read_text(encoding="utf-8"), name
    assert PYPROJECT["tool"]["uv"]["pip"] == {"torch-backend": "auto"}
