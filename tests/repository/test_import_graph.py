"""The architecture, held to: who imports whom, in which order, and how much lies in one file and one folder.

All imports count: those within functions, and those for type checkers. `import mpkit as mk` counts as imports of the
modules whose names are then used, such as `mk.Context`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mpkit
from tests.words import parse

PACKAGE = Path(mpkit.__file__).parent
ROOT = PACKAGE.parent
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = mpkit.homes()  # public name -> module

# What a rank or a headless GPU box may lack; imported when a view is shown.
NOTEBOOK_ONLY = {
    "IPython", "anywidget", "ipykernel", "ipywidgets", "jupyter", "jupyterlab", "pandas", "plotly", "traitlets",
}  # fmt: skip
USES_NOTEBOOKS = ("mpkit.views", "mpkit.launch.notebook.magics")


class Import(NamedTuple):
    target: str
    typing: bool = False
    deferred: bool = False


def modules() -> dict[str, Path]:
    """Every module of mpkit but the package itself, by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if name not in ("mpkit", "mpkit.__main__")}


MODULES = modules()


def imports(source: str) -> Iterator[Import]:
    """What a module's source imports; of mpkit's own modules those that there are."""
    tree = parse(source)

    def walk(node: ast.AST, typing: bool, deferred: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, typing, deferred) for alias in names if alias.name != "mpkit")
            case ast.ImportFrom(module=module, names=names, level=level):
                assert not level, "imports are absolute"
                for alias in names:
                    whole = f"{module}.{alias.name}"
                    yield Import(whole if whole in MODULES else str(module), typing, deferred)
            case ast.Attribute(value=ast.Name(id="mk"), attr=name) if name in TABLE:
                yield Import(TABLE[name], typing, deferred)
        typing = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, typing, deferred)

    yield from walk(tree, False, False)


@cache
def graph() -> dict[str, list[Import]]:
    """What each module imports."""
    return {name: list(imports(path.read_text(encoding="utf-8"))) for name, path in MODULES.items()}


def folder(name: str) -> str:
    """The folder of a module: `strategies/zero`; of one at the top its own name."""
    path = MODULES[name].relative_to(PACKAGE)
    if path.parent == Path():
        return path.stem
    return "course/exercises" if path.parts[:2] == ("course", "exercises") else path.parent.as_posix()


def room(name: str) -> str:
    """The folder at the top that a module is in, or the file."""
    return folder(name).partition("/")[0]


def rooms() -> list[str]:
    """The rooms in the order of docs/architecture.md, the lowest first, between the files at the top."""
    table = re.search(r"## The rooms.*?\n(\|.*?)\n\n", ARCHITECTURE, re.DOTALL)
    assert table, "docs/architecture.md lists the rooms"
    return ["errors", *re.findall(r"^\| `(\w+)/` ", table[1], re.MULTILINE), "cli", "data", "models"]


def test_the_architecture_names_every_room_once() -> None:
    assert sorted(rooms()) == sorted({room(name) for name in MODULES})
    assert len([each for each in PACKAGE.iterdir() if (each / "__init__.py").exists()]) <= 11


SAYS = ("In", "Out", "Begin", "May import")


def test_a_room_says_what_it_does_what_comes_in_and_out_and_where_to_begin() -> None:
    for each in rooms()[1:-3]:
        said = ast.get_docstring(parse((PACKAGE / each / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert re.findall(r"^(In|Out|Begin|May import) +", said, re.MULTILINE) == list(SAYS), each


def test_no_room_imports_one_that_lies_above_it() -> None:
    order = {name: number for number, name in enumerate(rooms())}
    against = [
        f"{room(name)} -> {room(each.target)}: {name} imports {each.target}"
        for name, found in graph().items()
        for each in found
        if each.target in MODULES and order[room(name)] < order[room(each.target)]
    ]
    assert not against, "\n".join(against)


def test_no_cycle_among_folders() -> None:
    edges: dict[str, list[str]] = {folder(name): [] for name in MODULES}
    for name, found in graph().items():
        edges[folder(name)] += [
            folder(each.target)
            for each in found
            if each.target in MODULES and folder(each.target) != folder(name)
        ]
    assert cycle_of(edges) is None


def test_no_cycle_among_modules() -> None:
    edges = {
        name: [
            each.target
            for each in found
            if each.target in MODULES
            and each.target != name
            and not (each.typing and folder(name) == folder(each.target))
        ]
        for name, found in graph().items()
    }
    assert cycle_of(edges) is None


def cycle_of(edges: dict[str, list[str]]) -> str | None:
    """One cycle, if there is any."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> str | None:
        if name in above:
            return " -> ".join((*above[above.index(name) :], name))
        if name in done:
            return None
        found = next(filter(None, (visit(target, (*above, name)) for target in edges[name])), None)
        done.add(name)
        return found

    return next(filter(None, (visit(name, ()) for name in edges)), None)


def test_modules_and_functions_are_short() -> None:
    """95 % of the modules have 450 lines at most; functions 60, but in exercises and views."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    lengths = [source.count("\n") for source in sources.values()]
    assert sum(length <= 450 for length in lengths) >= 0.95 * len(lengths)
    long = [
        f"{name}.{node.name}: {lines} lines"
        for name, source in sources.items()
        if not name.startswith(("mpkit.views", "mpkit.course.exercises"))
        for node in ast.walk(parse(source))
        if isinstance(node, ast.FunctionDef) and (lines := node.end_lineno - node.lineno + 1) > 60
    ]
    assert not long, "\n".join(long)


def test_only_views_import_what_notebooks_need() -> None:
    found = [
        f"{name} imports {each.target}"
        for name, targets in graph().items()
        for each in targets
        if each.target.partition(".")[0] in NOTEBOOK_ONLY
        and not (each.deferred or each.typing or name.startswith(USES_NOTEBOOKS))
    ]
    assert not found, "\n".join(found)


def test_importing_mpkit_is_cheap() -> None:
    code = [sys.executable, "-c", "import sys, mpkit; print(*sys.modules)"]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert "mpkit" in imported and not imported & {"torch", "numpy", *NOTEBOOK_ONLY}
