"""How a model is built: as a chain of layers, each of which takes the output of the previous one; and repeated blocks.

Any other model counts as one layer here; `mpkit.strategies.partition` cuts such models.

Repeated blocks are a transformer's layers, a ResNet's residual blocks: the modules that FSDP users wrap, and that
Megatron and torchtitan recompute. They follow each other and make up most of a model.

    list        modules in one nn.ModuleList or nn.Sequential, or side by side as attributes, some of which are alike
    alike       of the same class, with at least half of their parameters of the same names and shapes: T5's first
                layer has one table more than the others, and DeepSeek's first layers have no experts
    outermost   a layer of a Mixtral is a block, its experts are not; a Swin's stages differ in width and so are not
                alike: the layers inside them are the blocks
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import combinations, pairwise

from torch import nn

from mpkit.common.tracebacks import public
from mpkit.plan.balance import balance
from mpkit.strategies.models.hooks import is_bare

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@public
def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks of a model, by name, in the order in which they are registered.

    >>> layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
    >>> list(repeated_blocks(nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": layers})))
    ['layers.0', 'layers.1', 'layers.2']
    >>> repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))  # a single layer is not a block
    {}
    """
    return dict(_blocks_within("", model))


def _blocks_within(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the blocks inside a module."""
    names = {id(child): f"{prefix}{name}" for name, child in module.named_children()}
    inner = {id(child): list(_blocks_within(f"{names[id(child)]}.", child)) for child in module.children()}
    candidates = [child for child in module.children() if _is_composite(child)]
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        # Two towers side by side are not blocks, but their layers are.
        candidates = [c for c in candidates if not inner[id(c)] and not isinstance(c, CONTAINERS)]
    alike = _repeated_classes(candidates)
    if isinstance(module, nn.ModuleList):  # a list with one block, or with blocks that all differ
        blocks = {id(child) for child in candidates if alike or not inner[id(child)]}
    else:
        blocks = {id(child) for child in candidates if type(child) in alike}
    for child in module.children():
        if id(child) in blocks:
            yield names[id(child)], child
        else:
            yield from inner[id(child)]


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module contains other modules and has parameters."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeated_classes(modules: list[nn.Module]) -> set[type]:
    """Return the classes of which at least two modules are alike."""
    has = {module: {(name, p.shape) for name, p in module.named_parameters()} for module in modules}
    return {
        type(a)
        for a, b in combinations(modules, 2)
        if type(a) is type(b) and 2 * len(has[a] & has[b]) >= max(len(has[a]), len(has[b]))
    }


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain; any other module counts as one layer, whose name is empty."""
    return chain(model) if is_chain(model) else [("", model)]


def prefix_of(layer: str) -> str:
    """Return the prefix that the model's state dict puts before the names within a layer."""
    return f"{layer}." if layer else ""


@public
def chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model that is a chain, in order, with their names in its state dict.

    A chain is an `nn.Sequential`, or a subclass that keeps its `forward` and `__call__`, such as the kit's own models.
    It has no hooks, since those would see the whole chain. Sequentials inside a chain are opened too.

    >>> [name for name, _ in chain(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))))]
    ['0', '1.0', '1.1']

    Raises:
        ValueError: the model is not a chain, or has no layers.
    """
    if not is_chain(model):
        kind = type(model).__name__
        why = (
            f"{kind} is made from nn.Sequential but has a forward, a __call__ or hooks of its own"
            if isinstance(model, nn.Sequential)
            else f"{kind} has a forward that may do anything"
        )
        raise ValueError(
            f"This model is no chain of layers: {why}. Pipelines and all other plans take it as it is; what is a "
            "chain: nn.Sequential(layer, layer, ...), where each layer may be any module, and mpkit.models.GPT, MLP "
            "and ConvNet. To make one of yours, give its parts, in order, to nn.Sequential: "
            f"nn.Sequential({', '.join(f'model.{name}' for name, _ in model.named_children()) or '...'})."
        )
    layers = list(_flatten(model, ""))
    if not layers:
        raise ValueError(
            "The model is an nn.Sequential without layers: nn.Sequential(nn.Linear(4, 4)) has one."
        )
    return layers


def is_chain(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Sequential` whose call only runs its layers, one after the other."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and is_bare(module)
    )


def _flatten(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    layers = []
    for name, module in model._modules.items():  # named_children lists a shared module only once
        assert module is not None
        if is_chain(module):
            layers += _flatten(module, f"{prefix}{name}.")
        else:
            layers.append((prefix + name, module))
    return layers


@public
def cut(
    names: Sequence[str], costs: Sequence[float], stages: int, at: Sequence[int | str] | None
) -> list[range]:
    """Divide the layers among the stages: at the user's cuts, or balanced by cost.

    >>> cut(["embedding", "0", "1", "head"], [0, 3, 3, 1], 2, at=["head"])
    [range(0, 3), range(3, 4)]

    Raises:
        ValueError: there are more stages than layers, or a cut is at a layer that does not exist.
    """
    layers = len(names)
    if not layers:
        raise ValueError(
            f"{stages} stages, but the model is one block, with nothing to cut between. Plan.serial() or "
            f"Plan.ddp({stages}) takes it as it is; Plan.gpipe({stages}, 8) takes a deeper model."
        )
    if stages > layers:
        raise ValueError(
            f"{stages} stages, but the model has {layers} layer{'s' * (layers != 1)} "
            f"({', '.join(names)}): each stage needs at least one. At most pp={layers} works, or a deeper model."
        )
    if at is None:
        return balance(costs, stages)
    points = [_point(point, names) for point in at]
    bounds = [0, *points, layers]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cut={list(at)} leaves a stage empty or goes back: the first layers of the stages have to rise from 1 to "
            f"{layers - 1}. The model's layers are {', '.join(f'{i}: {n}' for i, n in enumerate(names))}; "
            f"balanced it would be cut={[part.start for part in balance(costs, stages)[1:]]}."
        )
    return [range(a, b) for a, b in pairwise(bounds)]


def _point(point: int | str, names: Sequence[str]) -> int:
    if not isinstance(point, str):
        return int(point)
    if point in names:
        return list(names).index(point)
    near = get_close_matches(point, names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"cut at {point!r}: the model has no layer of that name. {hint}It has {', '.join(names)}."
    )
