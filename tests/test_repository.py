"""What the repository promises about itself.

Versions in one place, imports one way, nothing of the machine it was written on.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
    ours = {"mpkit/run.py", "mpkit/views/timeline.js", "notebooks/one.ipynb", "docs/runs/of.md"}
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


# ---------------------------------------------------------------- imports go one way

# docs/architecture.md, "How data flows". What runs in a rank ...
RANK_SIDE = ["mpkit.parallel", "mpkit.record", "mpkit.launch", "mpkit.models", "mpkit.trace"]
# ... never imports what draws:
DRAWING = ["mpkit.views"]
# What a rank or a headless GPU box may lack; imported when a view is shown.
NOTEBOOK_ONLY = [
    "IPython",
    "anywidget",
    "ipykernel",
    "ipywidgets",
    "jupyter",
    "jupyterlab",
    "pandas",
    "plotly",
    "traitlets",
]


def modules() -> dict[str, Path]:
    """Every module of mpkit by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(name: str, source: str, *, is_package: bool) -> Iterator[tuple[str, bool]]:
    """Each module that `source` names, and whether importing `name` alone imports it.

    A function's imports wait until it is called; those for a type checker's eyes never run.

    >>> source = "import torch\\nfrom .trace import Op\\ndef show(): import plotly"
    >>> list(imports("mpkit.replay", source, is_package=False))
    [('torch', True), ('mpkit.trace', True), ('mpkit.trace.Op', True), ('plotly', False)]
    """

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children: list[ast.AST] = [*node.orelse]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
            return
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node)
            yield base, at_import
            # A module (`from mpkit import views`) or a mere name, which then is in no graph.
            yield from ((f"{base}.{alias.name}", at_import) for alias in node.names)
            return
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        for child in children:
            yield from walk(child, at_import)

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = name.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *(node.module or "").split(".")]).rstrip(".")

    yield from walk(ast.parse(source), True)


Edges = dict[str, list[tuple[str, bool]]]


def graph() -> Edges:
    edges = {}
    for name, path in modules().items():
        is_package = path.name == "__init__.py"
        edges[name] = list(imports(name, path.read_text("utf-8"), is_package=is_package))
    return edges


def test_imports_are_read_as_python_resolves_them() -> None:
    def names(module: str, source: str, *, is_package: bool = False) -> list[str]:
        return [found for found, _ in imports(module, source, is_package=is_package)]

    assert "mpkit.views.svg" in names("mpkit.parallel.zero", "from ..views import svg")
    assert "mpkit.views.svg" in names("mpkit.views", "from . import svg", is_package=True)
    assert "mpkit.trace" in names("mpkit", "from .trace import Op", is_package=True)
    hidden = "if TYPE_CHECKING:\n    import pandas\nelse:\n    import numpy"
    assert names("mpkit.timeline", hidden) == ["numpy"]


def test_what_runs_in_a_rank_never_imports_what_draws() -> None:
    edges = graph()
    for name in edges:
        if is_within(name, RANK_SIDE):
            way = way_to(edges, name, DRAWING)
            assert way is None, "a rank would import what draws: " + " -> ".join(way)


def way_to(edges: Edges, start: str, forbidden: list[str]) -> list[str] | None:
    """The imports that lead from `start` to a forbidden module, if any do.

    From `start` itself a deferred import counts too: it will run in a rank. Only launch, whose
    one half is the parent's, may defer one of a module that draws (the Run that train returns).
    """
    ways = [[start]]
    seen = {start}
    while ways:
        way = ways.pop(0)
        here = way[-1]
        may_defer = len(way) > 1 or is_within(start, ["mpkit.launch"])
        # Importing a.b.c runs a/b/__init__.py first. (mpkit's own is lazy, which is tested below.)
        targets = edges[here] + [(package, True) for package in packages_above(here)]
        for target, at_import in targets:
            if is_within(target, forbidden) and (at_import or len(way) == 1):
                return [*way, target]
            if target not in edges or target in seen or target == "mpkit":
                continue
            if at_import or not may_defer:
                seen.add(target)
                ways.append([*way, target])
    return None


def packages_above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(2, len(parts))]


def test_a_way_to_what_draws_is_found() -> None:
    def edges(**named: list[tuple[str, bool]]) -> Edges:
        return {"mpkit." + name.replace("__", "."): targets for name, targets in named.items()}

    views = ("mpkit.views.svg", True)
    views_later = ("mpkit.views.svg", False)
    zero, cluster = "mpkit.parallel.zero", "mpkit.launch.cluster"
    # directly, now or later
    assert way_to(edges(parallel__zero=[views_later]), zero, DRAWING)
    assert way_to(edges(launch__cluster=[views_later]), cluster, DRAWING)
    # through another module, or through the package it lies in
    run = [("mpkit.run", True)]
    assert way_to(edges(parallel__zero=run, run=[views]), zero, DRAWING)
    assert way_to(edges(parallel__zero=[], parallel=run, run=[views]), zero, DRAWING)
    # a Timeline that imports its views when shown is harmless, and so is the parent's Run
    timeline = [("mpkit.timeline", True)]
    assert not way_to(edges(parallel__zero=timeline, timeline=[views_later]), zero, DRAWING)
    later = [("mpkit.run", False)]
    assert not way_to(edges(launch__cluster=later, run=[views]), cluster, DRAWING)
    assert way_to(edges(parallel__zero=later, run=[views]), zero, DRAWING)


def test_the_two_sides_meet_in_trace_which_imports_nothing_of_mpkit() -> None:
    # Nothing but the names of what can go wrong, which in turn imports nothing at all.
    edges = graph()
    assert "mpkit.trace" in edges
    for name in filter(lambda name: is_within(name, ["mpkit.trace", "mpkit.errors", "mpkit.disk"]), edges):
        named = [target for target, _ in edges[name] if is_within(target, ["mpkit"])]
        assert [t for t in named if not is_within(t, ["mpkit.errors", "mpkit.disk", "mpkit.trace"])] == []


def test_no_cycles_among_modules_when_they_are_imported() -> None:
    edges = {
        name: sorted({target for target, at_import in targets if at_import and target != name})
        for name, targets in graph().items()
        if name != "mpkit"
    }
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> None:
        assert name not in above, "cycle: " + " -> ".join([*above[above.index(name) :], name])
        if name in done or name not in edges:
            return
        for target in edges[name]:
            # A package importing its own parts, and they it, is one unit of the design.
            if not (is_within(target, [name]) or is_within(name, [target])):
                visit(target, [*above, name])
        done.add(name)

    for name in edges:
        visit(name, [])


def test_only_views_import_what_notebooks_need_and_none_at_import_elsewhere() -> None:
    found = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target, at_import in targets
        if at_import and is_within(target, NOTEBOOK_ONLY) and not is_within(name, ["mpkit.views"])
    ]
    assert not found, "\n".join(found)


def test_importing_mpkit_is_cheap() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import mpkit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = [line.rsplit("|", 1)[1].strip() for line in run.stderr.splitlines() if "|" in line]
    assert "mpkit" in imported
    heavy = [name for name in imported if is_within(name, ["torch", "numpy", *NOTEBOOK_ONLY])]
    assert not heavy, f"`import mpkit` imports {heavy[0]}"


# ---------------------------------------------------------------- what ships


def test_what_views_and_catalogue_need_ships_with_the_package(tmp_path: Path) -> None:
    """A wheel holds every source file of mpkit/, .js and .csv included."""
    from hatchling.builders.wheel import WheelBuilder

    shipped = {included.distribution_path for included in WheelBuilder(str(ROOT)).recurse_included_files()}
    ours = {path.relative_to(ROOT).as_posix() for path in source_files()}
    assert {path for path in ours if path.startswith("mpkit/")} <= shipped
