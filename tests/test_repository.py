"""What the repository promises about itself.

Versions in one place, imports one way, nothing of the machine it was written on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpkit"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- versions


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


def test_every_pin_serves_the_oldest_python_we_promise() -> None:
    # Debian 12 has 3.11.2: a pin that asks for 3.11.5 makes `make setup` fail there.
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    asked = {
        normal(found.name): SpecifierSet(found.metadata.get("Requires-Python") or "")
        for found in distributions()
    }
    assert [name for name in pins() if name in asked and not asked[name].contains(oldest)] == []


def test_training_needs_four_packages() -> None:
    core = [normal(re.split(r"[^\w.-]", line)[0]) for line in PYPROJECT["project"]["dependencies"]]
    assert sorted(core) == ["cloudpickle", "numpy", "rich", "torch"]


def test_conda_takes_its_versions_from_the_same_place() -> None:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert "-c constraints.txt" in text
    assert "==" not in text


# ---------------------------------------------------------------- nothing of this machine

# Spelt in parts, or this file would find itself.
REGISTRY_HOSTS = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "download.pytorch" + ".org",
    "registry.npmjs" + ".org",
    "deb.debian" + ".org",
    "anaconda" + ".org",
]
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


def test_a_tree_without_git_is_read_as_git_would(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)}

    shutil.copy(ROOT / ".gitignore", tmp_path)
    ours = {
        "mpkit/launch/session/run.py",
        "mpkit/views/timeline.js",
        "notebooks/one.ipynb",
        "docs/runs/of.md",
    }
    for name in ours:
        put(tmp_path / name)
    assert names() == ours | {".gitignore"}
    for name in (
        ".venv/torch.py",
        "mpkit/__pycache__/run.pyc",
        "runs/1/rank0",
        "mpkit-demo.html",
        "dist/a.whl",
    ):
        put(tmp_path / name)
    assert names() == ours | {".gitignore"}
    # and nothing that git tracks is left out
    assert set(source_files()) <= set(unpacked_files(ROOT))


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("anything")


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


# ---------------------------------------------------------------- what ships


def test_what_views_and_catalogue_need_ships_with_the_package(tmp_path: Path) -> None:
    """A wheel holds every source file of mpkit/, .js and .csv included."""
    from hatchling.builders.wheel import WheelBuilder

    shipped = {included.distribution_path for included in WheelBuilder(str(ROOT)).recurse_included_files()}
    ours = {path.relative_to(ROOT).as_posix() for path in source_files()}
    assert {path for path in ours if path.startswith("mpkit/")} <= shipped


# ---------------------------------------------------------------- benchmarks


def test_every_benchmark_can_be_run_by_name() -> None:
    without = [
        path.name
        for path in (ROOT / "benchmarks").glob("bench_*.py")
        if "\ndef measure(" not in path.read_text(encoding="utf-8")
    ]
    assert not without, "`python -m benchmarks` calls measure() of each"


# ---------------------------------------------------------------- make


def test_every_target_of_the_makefile_is_written_once_and_declared() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    assert sorted(set(targets)) == sorted(targets)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(phony.split()) == set(targets)


# ---------------------------------------------------------------- installs


def test_every_way_to_install_takes_versions_from_constraints_and_a_cpu_build_of_torch() -> None:
    """README's line and environment.yml's are one."""
    line = "uv pip install --torch-backend=cpu -c constraints.txt -e '.[notebook]'"
    for name in ("README.md", "environment.yml"):
        assert line in (ROOT / name).read_text(encoding="utf-8"), name
    assert PYPROJECT["tool"]["uv"]["pip"] == {"torch-backend": "auto"}


def test_no_lock_is_committed_and_git_ignores_the_one_that_make_writes() -> None:
    assert not [
        path for path in source_files() if re.fullmatch(r"pylock.*\.toml|uv\.lock|.*\.lock", path.name)
    ]
    assert "pylock*.toml\nuv.lock\n" in (ROOT / ".gitignore").read_text(encoding="utf-8")


@pytest.mark.parametrize("works", [True, False], ids=["uv installs", "uv cannot and pip does"])
def test_the_set_up_installs_with_uv_where_it_is(tmp_path: Path, works: bool) -> None:
    """Both are stand-ins that write down how they were called."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    calls, programs = tmp_path / "calls", tmp_path / "programs"
    for path, body in {
        programs / "uv": f'echo "uv $*" >>{calls}; exit {int(not works)}',
        programs / "python3": f'case "$*" in *base_executable*) echo {programs}/python3 ;; *-m\\ pip*) '
        f'echo "$*" >>{calls} ;; *version*) echo 3.11.9 ;; esac',
        tmp_path / ".venv/bin/python": f'exec {programs}/python3 "$@"',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    told = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHON": str(programs / "python3")}
    done = subprocess.run(["sh", "scripts/setup.sh"], cwd=tmp_path, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    uv, *pip = [line for line in calls.read_text().splitlines() if "install" in line]
    assert (
        uv
        == "uv pip install --python .venv/bin/python -c constraints.txt -b constraints.txt -e .[notebook,dev,systems]"
    )
    assert [line.split(" install ")[0] for line in pip] == ([] if works else ["-m pip"])
