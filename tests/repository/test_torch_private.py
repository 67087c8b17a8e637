"""Private names of torch: all in one module, each there in the torch that runs the tests, each missing one named.

`python -m scripts.torch_versions` runs this with the oldest and the newest torch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mpkit
from mpkit.common.torch_private import GENERATORS, SEEN, current, places
from mpkit.errors import MpkitError
from tests.words import parse

PACKAGE = Path(mpkit.__file__).parent
HOME = PACKAGE / "common" / "torch_private.py"

ALONE = ("strategies/reference/", "course/exercises/")
"""Code that learners read and run by itself: it imports nothing of mpkit's inside."""

OF_OTHERS = {
    "_asdict", "_clear", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace", "_run_exitfuncs",
    "_shutdown", "_can_record_outputs",
}  # fmt: skip
"""Private attributes of Python's library, and of transformers."""

LISTED = set(places())
ON_OBJECTS = {
    *GENERATORS,
    "_backward_hooks", "_buffers", "_call_impl", "_cdata", "_check_input_dim", "_conv_forward", "_destroy",
    "_flatten", "_forward_hooks", "_forward_pre_hooks", "_get_backend", "_handle", "_local_tensor", "_make_subclass",
    "_make_wrapper_subclass", "_modules", "_non_persistent_buffers_set", "_num_yielded", "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks", "_parameters", "_pg_registry", "_post_accumulate_grad_hooks", "_schema",
    "_sequence_nr", "_state_dict_hooks", "_state_dict_pre_hooks", "_version",
}  # fmt: skip
"""Private attributes of torch's objects."""


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def private_uses(source: str) -> Iterator[str]:
    """Yield each private name of torch that a source imports or reads from a module, and attributes of its objects.

    >>> list(private_uses("import torch.nn as t\\nfrom torch._C import a\\nt._b(x._c, self._d)"))
    ['torch._C.a', 'torch.nn._b', '._c']
    """
    tree = parse(source)
    known, own = {"torch": "torch"}, set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if _of_torch(alias.name) and is_private(alias.name))
                known |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(module), names=names):
                paths = {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
                yield from (path for path in paths.values() if _of_torch(path) and is_private(path))
                known |= paths
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
    if not any(
        _of_torch(path) for name, path in known.items() if name != "torch" or "import torch" in source
    ):
        return
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and is_private(node.attr)):
            continue
        start, *rest = ast.unparse(node).split(".")
        path = ".".join([known.get(start, ""), *rest])
        if _of_torch(path) and path.removesuffix(node.attr)[:-1] in _MODULES:
            yield path
        elif start not in ("self", "cls") and node.attr not in own | OF_OTHERS:
            yield f".{node.attr}"


def _of_torch(path: str) -> bool:
    return path.partition(".")[0] == "torch"


_MODULES = {"torch", "torch.nn", "torch.ops", "torch.ops.aten"} | {
    path.relative_to(Path(torch.__file__).parent.parent)
    .with_suffix("")
    .as_posix()
    .removesuffix("/__init__")
    .replace("/", ".")
    for path in Path(torch.__file__).parent.rglob("*.py")
    if "_inductor" not in path.parts
}


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if path != HOME and not name.startswith(ALONE):
            yield name, path.read_text(encoding="utf-8")


def test_no_other_module_of_mpkit_imports_or_reads_a_private_name_of_torch() -> None:
    found = [(name, use) for name, text in sources() for use in private_uses(text)]
    assert [each for each in found if each[1].removeprefix(".") not in ON_OBJECTS] == []


@pytest.mark.parametrize("name", sorted(LISTED))
def test_this_torch_has_each_listed_name(name: str) -> None:
    assert current(name) is not None


def test_checkpoint_has_one_of_the_generators() -> None:
    assert any(hasattr(torch.utils.checkpoint, name) for name in GENERATORS)


def test_a_release_of_torch_without_a_name_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.modules.loss, "_Loss")
    with pytest.raises(MpkitError) as caught:
        from mpkit.common.torch_private import _Loss  # noqa: F401
    assert str(caught.value) == (
        f"torch {torch.__version__} has no _Loss in torch.nn.modules.loss, which mpkit uses; torch {', '.join(SEEN)} "
        "have it"
    )
