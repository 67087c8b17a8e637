"""P_p: a layer's parameters are gathered just before use and freed after, in the forward and again in the backward.

    forward    before a layer: gather its parameters, and start those of the next `prefetch` layers; free after it
    backward   when the gradient of a layer's output arrives: gather again, and start the layers before; whatever the
               backward has passed is freed
    demand     a parameter that is used while its own layer is not called (`F.linear(x, embedding.weight)`): gather it
               there, and from then on for the outermost module that is being called, until that is done

So each parameter is sent twice per step, and its gradient once: 3 psi instead of 2 psi (Rajbhandari et al. 2020,
section 7.2.2). Layers need no change: hooks on modules and on their outputs do the work, and the first forward records
the order in which layers are called (`prefetch`). For the backward, autograd keeps views of the gathered memory, which
is freed and allocated again beneath them (`flat`), so they see the same values.

Where a backward is split, its I half works like a whole backward; for W, all parameters of the stage are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from mpkit.common.torch_private import _current_graph_task_id, _get_sequence_nr
from mpkit.errors import MpkitError
from mpkit.strategies.models.nested_values import flatten, is_opaque
from mpkit.strategies.partition.walk import around_forward
from mpkit.strategies.zero.flat import Flat
from mpkit.strategies.zero.prefetch import CallOrder
from mpkit.strategies.zero.residency import WholeParameters
from mpkit.strategies.zero.units import Site

__all__ = ["GatherHooks"]


class ActionNeeds:
    """What forwards need at the moment, or backwards.

    Args:
        sites: the number of sites.

    Attributes:
        begun: by site, autograd's count of nodes when the site's forward began, in the action's thread.
        soon: being gathered ahead.
        kept: not to be freed before the action has come to its next site.
    """

    def __init__(self, sites: int) -> None:
        self.begun = [0] * sites
        self.clear()

    def clear(self) -> None:
        """Need nothing more."""
        self.soon: list[Flat] = []
        self.kept: set[Flat] = set()


class GatherHooks:
    """The hooks that gather parameters and free them.

    Args:
        sites: the model's sites, in order of use as far as that is known.
        flats: flat tensors of all their parameters, with the shards filled.
        prefetch: number of sites to gather ahead.
    """

    def __init__(self, sites: list[Site], flats: list[Flat], *, prefetch: int) -> None:
        self._flats, self._sites = flats, sites
        self._of = {parameter: flat for flat in flats for parameter in flat.layout.parameters}
        # Indexed by site; each flat tensor once.
        self._needs = [list(dict.fromkeys(self._of[parameter] for parameter in site.uses)) for site in sites]
        self._of_forward, self._of_backward = ActionNeeds(len(sites)), ActionNeeds(len(sites))
        self._active: list[int] = []  # the sites whose forward is under way, outermost first
        self._until_the_end: set[Flat] = set()  # not to be freed before this backward ends
        self._all = False  # inside `gather_all`
        self._order = CallOrder(sites, prefetch)
        self._whole = WholeParameters(flats, self._demand)
        for i, site in enumerate(sites):
            around_forward(site.module, partial(self._before_forward, i), partial(self._after_forward, i))

    @property
    def _now(self) -> ActionNeeds:
        """The needs of the action that is running."""
        return self._of_backward if _in_backward() else self._of_forward

    # ---- forward ------------------------------------------------------------------------------------------

    def _before_forward(self, i: int, *_: Any) -> None:
        if self._all:
            return
        self._now.begun[i] = _get_sequence_nr()
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
            self._keep(self._now.soon)
        self._order.has_backward[i] = False
        for tensor in tensors:
            # An input that the module returns unchanged is the output of another module.
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._now.begun[i]:
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
        if self._sites[i].around:  # no hook shows when the sites within it are done
            self._until_the_end.update(self._needs[i])
            self._have(i)
        else:
            self._go_to(i, self._order.next_backward(i))

    def after_backward(self) -> None:
        """Free what the backward used last."""
        self._until_the_end.clear()
        self._of_backward.clear()
        self._active.clear()
        self._order.end()
        self._of_forward.clear()
        self._free()

    def gather_stage(self, stage: int) -> None:
        """Gather all that a stage of the model uses, and keep it whole until `after_backward`."""
        here = (needs for site, needs in zip(self._sites, self._needs, strict=True) if site.stage == stage)
        needed = {flat for needs in here for flat in needs}
        self._until_the_end.update(needed)  # hooks on outputs may run here too: nothing is freed
        self._keep(())
        self._whole.gather(flat for flat in self._flats if flat in needed)

    # ---- gather and free ----------------------------------------------------------------------------------

    def _go_to(self, i: int, soon: Iterable[int]) -> None:
        """Gather site i's parameters, start with those of `soon`, and free all but these and those under way."""
        self._now.soon = [flat for at in soon for flat in self._needs[at]]
        self._keep((*self._needs[i], *self._now.soon))
        self._have(i)

    def _have(self, i: int) -> None:
        """Gather site i's parameters beside those that are whole already."""
        self._whole.gather(self._needs[i], soon=self._now.soon)

    def _keep(self, flats: Iterable[Flat]) -> None:
        """Free all flat tensors but these and those that are needed still."""
        self._of_forward.kept, self._of_backward.kept = set(), set()
        self._now.kept = set(flats)
        self._free()

    def _free(self) -> None:
        """Free all flat tensors but those that the sites under way need, and those that the actions keep."""
        under_way = (flat for i in self._active for flat in self._needs[i])
        kept = self._of_forward.kept | self._of_backward.kept | self._until_the_end
        self._whole.free_all_but(kept.union(under_way))

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
    """Return the tensors of a module's output."""
    leaves, _ = flatten(output)
    for leaf in filter(is_opaque, leaves):
        raise MpkitError(
            f"{type(module).__name__} returns {type(leaf).__name__}, and under zero=3 parameters are gathered again "
            "when the gradients of a layer's outputs arrive: iterators, functions and objects that contain themselves "
            "cannot be looked into. Return tensors, or a tuple, a dict, a dataclass or an object with tensors as "
            "attributes; zero=2 gathers nothing."
        )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
