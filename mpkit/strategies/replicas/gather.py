"""P_p: a layer's parameters are gathered just before use and freed after, in the forward and again in the backward.

    forward    before a layer: gather its parameters, and start those of the next `prefetch` layers; free after it
    backward   when the gradient of a layer's output arrives: gather again, and start the layers before; free whatever
               the backward has passed
    demand     a parameter that is used while its own layer is not called (`F.linear(x, embedding.weight)`): gather it
               there, and from then on for the outermost module that is being called, until that is done

So each parameter is sent twice per step, and its gradient once: 3 psi instead of 2 psi (Rajbhandari et al. 2020,
section 7.2.2). Layers need no change: hooks on modules and on their outputs do the work, and the first forward records
the order in which layers are called (`CallOrder`). For the backward, autograd keeps views of the gathered memory, which
is freed and allocated again beneath them (`flat`), so they see the same values.

The I half of a split backward works like a whole one; for W, all parameters of the stage are gathered.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import (
    DisableTorchFunctionSubclass,
    _current_graph_task_id,
    _get_sequence_nr,
    peek_interpreter_stack,
    tree_leaves,
)
from mpkit.errors import MpkitError
from mpkit.strategies.comm.wire import PendingWork
from mpkit.strategies.models.nested_values import REGISTER, flatten, tensors_inside
from mpkit.strategies.partition.walk import around_forward
from mpkit.strategies.replicas.flat import Flat
from mpkit.strategies.replicas.units import Site

# ---------------------------------------------------------------- which layer is next


class CallOrder:
    """Which site is called after which: at first, in order of registration, without those around others.

    Args:
        prefetch: number of sites to gather ahead.

    >>> from torch import nn
    >>> order = CallOrder([Site(0, nn.Linear(1, 1), [], []) for _ in range(4)], prefetch=2)
    >>> list(order.next_forward(1)), list(order.next_backward(1))
    ([2, 3], [])
    >>> order.has_backward[0] = True
    >>> list(order.next_backward(1))
    [0]
    """

    def __init__(self, sites: list[Site], prefetch: int) -> None:
        self._prefetch = prefetch
        self.has_backward = [False] * len(sites)  # whether the graph of a site's latest forward leads to it
        self._after: dict[int, int] = {}  # by site, the site that is called next
        self._before: dict[int, int] = {}
        self._latest: int | None = None  # the last called site
        inner = [i for i, site in enumerate(sites) if not site.around]
        for one, following in pairwise(inner):
            if sites[one].stage == sites[following].stage:
                self._follow(one, following)

    def note_call(self, i: int, *, alone: bool) -> None:
        """Note that site i is called; `alone` if it is the first of a forward."""
        if not alone and self._latest is not None and self._latest != i:
            self._follow(self._latest, i)
        self._latest = i

    def end(self) -> None:
        """Note that the forward is over, so that the next call follows nothing."""
        self._latest = None

    def _follow(self, one: int, following: int) -> None:
        self._after[one], self._before[following] = following, one

    def next_forward(self, i: int) -> Iterator[int]:
        """Yield the sites to gather ahead when site i's forward begins."""
        yield from self._walk(i, self._after)

    def next_backward(self, i: int) -> Iterator[int]:
        """Yield the sites to gather ahead when site i's backward begins."""
        yield from (at for at in self._walk(i, self._before) if self.has_backward[at])

    def _walk(self, i: int, order: dict[int, int]) -> Iterator[int]:
        for _ in range(self._prefetch):
            if i not in order:
                return
            i = order[i]
            yield i


# ---------------------------------------------------------------- whole and sharded parameters


# Methods of a parameter that do not read its values.
METHODS = {
    "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "numel", "nelement",
    "dim", "ndimension", "size", "stride", "element_size", "is_floating_point", "is_complex", "__len__", "backward",
}  # fmt: skip
NUMBERS = {"data", "T", "mT", "H", "mH", "real", "imag"}


class ShardedParameter(nn.Parameter):
    """A parameter while it is not gathered: it knows its shape, and is gathered when a model's forward reads it.

    At any other time reading it is an error: the memory does not exist, so a read would kill the process.
    """

    _gather: Callable[[nn.Parameter], bool]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a function that needs no values; for any other, gather the parameters first."""
        kwargs = kwargs or {}
        name = func.__name__
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_harmless = attribute not in NUMBERS if name in ("__get__", "__set__") else name in METHODS
        sharded = [] if is_harmless else [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls)]
        # One by one: gathering the parameter before may have made this one whole.
        if name != "__set__" and all(arg.__class__ is not cls or arg._gather(arg) for arg in sharded):
            is_harmless = True
        if is_harmless:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        of_shape = f" of shape {list(sharded[0].shape)}" if sharded else ""
        raise MpkitError(
            f"{name} of a parameter{of_shape} that is sharded: each rank holds a part of it, and it is whole only "
            "while its layer computes. Look at it inside `with replica.gathered():`, which all ranks enter."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<parameter of shape {list(self.shape)}, sharded; whole inside `with replica.gathered():`>"


def _veil(parameters: Iterable[nn.Parameter], *, sharded: bool) -> None:
    """Make plain parameters sharded ones, or the reverse; instances of a user's own subclasses stay as they are."""
    now, then = (nn.Parameter, ShardedParameter) if sharded else (ShardedParameter, nn.Parameter)
    for parameter in parameters:
        if parameter.__class__ is now:
            parameter.__class__ = then


class WholeParameters:
    """The parameters that are whole or being gathered, at first none.

    Args:
        demand: gathers a parameter that is used while it is not whole; returns False if that is not possible.
    """

    def __init__(self, flats: list[Flat], demand: Callable[[nn.Parameter], bool]) -> None:
        self._versions: dict[Flat, list[int]] = {}
        self._whole: dict[Flat, PendingWork | None] = {}  # whole (None), or with the pending all-gather
        for flat in flats:
            flat.free()
            for parameter in flat.layout.parameters:
                parameter._gather = demand  # type: ignore[attr-defined]
            _veil(flat.layout.parameters, sharded=True)

    @torch.no_grad()
    def gather(self, flats: Iterable[Flat], soon: Iterable[Flat] = ()) -> None:
        """Make these flat tensors whole, and start gathering those needed soon."""
        flats = list(flats)
        for flat in (*flats, *soon):
            self._start(flat)
        for flat in flats:
            self._wait(flat)

    def _start(self, flat: Flat) -> None:
        if flat not in self._whole:
            flat.allocate()
            with flat.shard_group.wire.sending_for(flat.layer, flat.names):
                self._whole[flat] = flat.start_all_gather()

    def _wait(self, flat: Flat) -> None:
        work = self._whole[flat]
        if work is not None:
            work.wait()
            self._whole[flat] = None
            self._versions[flat] = [parameter._version for parameter in flat.layout.parameters]
            _veil(flat.layout.parameters, sharded=False)

    def free_all_but(self, kept: Collection[Flat], *, changed: bool = False) -> None:
        """Free all flat tensors but these; reject changes to them, unless they may have `changed`."""
        for flat in [flat for flat in self._whole if flat not in kept]:
            self._wait(flat)
            for parameter, version in zip(flat.layout.parameters, self._versions.pop(flat), strict=True):
                if parameter._version != version and not changed:
                    raise MpkitError(
                        f"The model's forward writes into a parameter, of shape {list(parameter.shape)}, and under "
                        "zero=3 that is lost: it is whole only while its layer computes. Change parameters between "
                        "steps, or take zero=2, which keeps them whole"
                    )
            _veil(flat.layout.parameters, sharded=True)
            flat.free()
            del self._whole[flat]


# ---------------------------------------------------------------- hooks


class GatherHooks:
    """The hooks that gather parameters and free them.

    Args:
        sites: the model's sites, in order of use as far as that is known.
        flats: flat tensors of all their parameters, with the shards filled.
    """

    def __init__(self, sites: list[Site], flats: list[Flat], *, prefetch: int) -> None:
        self.goes_back = False  # whether a step's backward is under way; set at its beginning
        self._flats, self._sites = flats, sites
        self._of = {parameter: flat for flat in flats for parameter in flat.layout.parameters}
        # Indexed by site; each flat tensor once.
        self._needs = [list(dict.fromkeys(self._of[parameter] for parameter in site.uses)) for site in sites]
        self._begun = [0] * len(sites)  # autograd's count of nodes when the latest forward of a site began
        self._soon: list[Flat] = []  # being gathered ahead
        self._active: list[int] = []  # the sites whose forward is under way, outermost first
        self._until_the_end: set[Flat] = set()  # stay whole until this backward ends
        self._all = False  # inside `gather_all`
        self._order = CallOrder(sites, prefetch)
        self._whole = WholeParameters(flats, self._demand)
        for i, site in enumerate(sites):
            around_forward(site.module, partial(self._before_forward, i), partial(self._after_forward, i))

    # ---- forward ------------------------------------------------------------------------------------------

    def _before_forward(self, i: int, module: nn.Module, _inputs: Any) -> None:
        if self._all:
            return
        if peek_interpreter_stack() is not None:
            raise MpkitError(
                f"The forward calls {type(module).__name__} within a transform of torch.func (vmap, grad or jvp), on "
                "whose tensors zero=3 cannot gather the layer's parameters. What works: zero=2, which keeps them "
                "whole; or to call the layer on the whole batch"
            )
        self._begun[i] = _get_sequence_nr()
        if _in_backward():  # a checkpoint recomputes its forward
            self._have(i)
            return
        self._active.append(i)
        if self._sites[i].around:
            self._have(i)
            return
        self._order.note_call(i, alone=len(self._active) == 1)
        self._go_to(i, self._order.next_forward(i))

    def _after_forward(self, i: int, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._all:
            return
        tensors = _tensors(output, module)
        if not _in_backward():
            while self._active and self._active.pop() != i:
                pass
            if not self._active:
                self._order.end()
            self._follow_views(i, module, tensors)
            self._keep(self._soon)
        self._order.has_backward[i] = False
        for tensor in tensors:
            # An input that the module returns unchanged is the output of another module.
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._begun[i]:
                self._order.has_backward[i] = True
                tensor.register_hook(partial(self._before_backward, i))

    def _follow_views(self, i: int, module: nn.Module, tensors: list[Tensor]) -> None:
        """Treat parameters that a module returns, or views of them, as used on demand outside of it."""
        storages = {flat.whole.untyped_storage()._cdata: flat for flat in self._needs[i]}
        for tensor in tensors:
            flat = storages.get(tensor.untyped_storage()._cdata)
            if flat is not None and not self._active:
                raise MpkitError(
                    f"{type(module).__name__} returns its parameter, or a part of it, which under zero=3 is whole only "
                    "while the layer computes. Let it return a copy: `return self.weight[:n].clone()`"
                )
            if flat is not None:
                self._need_around(flat)

    # ---- demand -------------------------------------------------------------------------------------------

    def _demand(self, parameter: nn.Parameter) -> bool:
        """Gather a parameter that is used while its layer is not called; return False if nothing is being computed."""
        flat = self._of[parameter]
        if _in_backward() and not self._active:
            self._until_the_end.add(flat)
        elif self._active:
            self._need_around(flat)
        else:
            return False
        self._whole.gather([flat])
        return True

    def _need_around(self, flat: Flat) -> None:
        """Add the tensor to the needs of the outermost site under way, for its forward and its backward."""
        needs = self._needs[self._active[0]]
        if flat not in needs:
            needs.append(flat)

    # ---- backward -----------------------------------------------------------------------------------------

    def _before_backward(self, i: int, _gradient: Tensor) -> None:
        if self._all:
            return
        if not self.goes_back:
            raise MpkitError(
                f"The forward computes gradients of what {type(self._sites[i].module).__name__} returned "
                "(torch.autograd.grad), and zero=3 has dropped that layer's parameters by then. What works: zero=2, "
                "which keeps them whole; or to compute them within a layer"
            )
        if self._sites[i].around:  # no hook shows when the sites within it are done
            self._until_the_end.update(self._needs[i])
            self._have(i)
        else:
            self._go_to(i, self._order.next_backward(i))

    def after_backward(self) -> None:
        """Free the parameters that the backward used last."""
        self.goes_back = False
        self._until_the_end.clear()
        self._active.clear()
        self._order.end()
        self._soon = []
        self._keep(())

    def gather_stage(self, stage: int) -> None:
        """Gather all parameters that a stage of the model uses, and keep them whole until `after_backward`."""
        here = (needs for site, needs in zip(self._sites, self._needs, strict=True) if site.stage == stage)
        needed = {flat for needs in here for flat in needs}
        self._until_the_end.update(needed)  # hooks on outputs may run here too: nothing is freed
        self._keep(())
        self._whole.gather(flat for flat in self._flats if flat in needed)

    # ---- gather and free ----------------------------------------------------------------------------------

    def _go_to(self, i: int, soon: Iterable[int]) -> None:
        """Gather site i's parameters, start those of `soon`, and free all but these and those under way."""
        self._soon = [flat for at in soon for flat in self._needs[at]]
        self._keep((*self._needs[i], *self._soon))
        self._have(i)

    def _have(self, i: int) -> None:
        """Gather site i's parameters."""
        self._whole.gather(self._needs[i], soon=self._soon)

    def _keep(self, flats: Iterable[Flat]) -> None:
        """Free all flat tensors but these, those that sites under way need, and those that stay until the end."""
        under_way = (flat for i in self._active for flat in self._needs[i])
        self._whole.free_all_but({*flats, *under_way, *self._until_the_end})

    @contextmanager
    def gather_all(self) -> Iterator[None]:
        """Keep all parameters whole inside the block, which every rank enters. Changes to them are lost."""
        if self._all:
            yield
            return
        self._whole.gather(self._flats)
        self._all = True
        try:
            yield
        finally:
            self._all = False
            self._whole.free_all_but(self._until_the_end, changed=True)


def _in_backward() -> bool:
    """Return whether autograd is running a backward, in which any forward is a recomputation."""
    return bool(_current_graph_task_id() != -1)


def _tensors(output: Any, module: nn.Module) -> list[Tensor]:
    leaves, _ = flatten(output)
    for leaf in (each for each in leaves if isinstance(each, Iterator)):
        raise MpkitError(
            f"{type(module).__name__} returns {type(leaf).__name__}, and under zero=3 parameters are gathered again "
            f"when the gradients of a layer's outputs arrive, which cannot be seen in there. Return {REGISTER}; zero=2 "
            "gathers nothing."
        )
    return [tensor for leaf in leaves for tensor in tensors_inside(leaf)]
