"""P_p: a layer's parameters are gathered just before use and freed after, in the forward and again in the backward.

    forward    before a layer: gather its parameters, and start those of the next `prefetch` layers; free after it
    backward   when the gradient of a layer's output arrives: gather again, and start the layers before; whatever the
               backward has passed is freed
    demand     a parameter that is used while its own layer is not called (`F.linear(x, embedding.weight)`): gather it
               there, and from then on for the outermost module that is being called, until that is done

So each parameter is sent twice per step, and its gradient once: 3 psi instead of 2 psi (Rajbhandari et al. 2020,
section 7.2.2). Layers need no change: hooks on modules and on their outputs do the work, and the first forward records
the order in which layers are called. For the backward, autograd keeps views of the gathered memory, which is freed and
allocated again beneath them (`Flat`), so they see the same values.

Where a backward is split, its I half works like a whole backward; for W, all parameters of the stage are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # private; tests/test_zero_units.py guards it

from mpkit.comm.communicator import Communicator
from mpkit.comm.process_group import Pending
from mpkit.errors import MpkitError
from mpkit.parallel.partition.walk import around_forward
from mpkit.parallel.zero.flat import Flat
from mpkit.parallel.zero.sharded import on_demand, veil
from mpkit.parallel.zero.units import Site
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Gathering"]


class Gathering:
    """The parameters that are whole at the moment.

    Args:
        replicas: the ranks that hold the other shards.
        record: this rank's recorder.
        sites: the model's sites, in order of use as far as that is known.
        flats: flat tensors of all their parameters, with the shards filled.
        prefetch: number of sites to gather ahead.
        on_host: whether shards are copied to the device first (offload="params").
    """

    def __init__(
        self,
        replicas: Communicator,
        record: Recorder,
        sites: list[Site],
        flats: list[Flat],
        *,
        prefetch: int,
        on_host: bool,
    ) -> None:
        self._replicas, self._record, self._on_host = replicas, record, on_host
        self._prefetch = prefetch
        self._flats, self._sites = flats, sites
        self._of = {parameter: flat for flat in flats for parameter in flat.layout.parameters}
        # Indexed by site; each flat tensor once.
        self._needs = [list(dict.fromkeys(self._of[parameter] for parameter in site.uses)) for site in sites]
        self._has_backward = [False] * len(sites)
        self._after: dict[int, int] = {}  # by site, the site that is called next
        self._before: dict[int, int] = {}
        self._begun = [0] * len(sites)  # autograd's count of nodes when the site's forward began
        self._active: list[int] = []  # the sites whose forward is under way, outermost first
        self._latest: int | None = None  # of those that contain no other site, the last that was called
        self._soon: list[Flat] = []  # being gathered ahead
        self._until_the_end: set[Flat] = set()  # not to be freed before this backward ends
        self._whole: dict[Flat, Pending | None] = {}  # gathered (None), or with the pending all-gather
        self._all = False  # inside `gathered`
        for flat in flats:
            flat.free()
            for parameter in flat.layout.parameters:
                on_demand(parameter, self._demand)
            veil(flat.layout.parameters, sharded=True)
        inner = [i for i, site in enumerate(sites) if not site.around]
        for one, following in pairwise(inner):
            if sites[one].stage == sites[following].stage:
                self._follow(one, following)
        for i, site in enumerate(sites):
            around_forward(site.module, partial(self._before_forward, i), partial(self._after_forward, i))

    # ---- forward ------------------------------------------------------------------------------------------

    def _before_forward(self, i: int, *_: Any) -> None:
        if self._all:
            return
        self._begun[i] = _get_sequence_nr()
        if _in_backward():  # a checkpoint recomputes its forward
            self._have(i)
            return
        self._active.append(i)
        if self._sites[i].around:
            self._have(i)
            return
        if len(self._active) > 1 and self._latest is not None and self._latest != i:
            self._follow(self._latest, i)
        self._latest = i
        self._go_to(i, self._ahead(i, self._after))

    def _after_forward(self, i: int, module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._all:
            return
        tensors = list(_tensors(output))
        if not _in_backward():
            while self._active and self._active.pop() != i:
                pass
            if not self._active:
                self._latest = None
            self._follow_views(i, module, tensors)
            self._keep(self._soon)
        self._has_backward[i] = False
        for tensor in tensors:
            # An input that the module returns unchanged is the output of another module.
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._begun[i]:
                self._has_backward[i] = True
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

    def _follow(self, one: int, following: int) -> None:
        self._after[one], self._before[following] = following, one

    def _ahead(self, i: int, order: dict[int, int]) -> list[Flat]:
        """Return what the next sites need, as far as it is to be gathered ahead."""
        found: list[Flat] = []
        at: int | None = i
        for _ in range(self._prefetch):
            at = order.get(at) if at is not None else None
            if at is not None and (order is self._after or self._has_backward[at]):
                found += self._needs[at]
        return found

    # ---- demand -------------------------------------------------------------------------------------------

    def _demand(self, parameter: nn.Parameter) -> bool:
        """Gather a parameter that is used while its layer is not called; return False if nothing is being computed."""
        flat = self._of[parameter]
        if self._active:
            self._need_around(flat)
        elif _in_backward():
            self._until_the_end.add(flat)
        else:
            return False
        with torch.no_grad():
            self._start(flat)
            self._wait(flat)
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
            self._go_to(i, self._ahead(i, self._before))

    def after_backward(self) -> None:
        """Free what the backward used last."""
        self._until_the_end.clear()
        self._active.clear()
        self._latest = None
        self._soon = []
        self._keep(())

    def gather_stage(self, stage: int) -> None:
        """Gather all that a stage of the model uses, and keep it whole until `after_backward`."""
        here = (needs for site, needs in zip(self._sites, self._needs, strict=True) if site.stage == stage)
        needed = {flat for needs in here for flat in needs}
        with torch.no_grad():
            self._until_the_end.update(needed)  # hooks on outputs may run here too: nothing is freed
            self._keep(())
            for flat in self._flats:
                if flat in needed:
                    self._start(flat)
            for flat in needed:
                self._wait(flat)

    # ---- gather and free ----------------------------------------------------------------------------------

    def _go_to(self, i: int, soon: list[Flat]) -> None:
        """Gather site i's parameters, start gathering `soon`, and free all others but those of enclosing sites."""
        self._soon = soon
        self._keep((*self._needs[i], *soon))
        self._have(i)

    @torch.no_grad()
    def _have(self, i: int) -> None:
        """Gather site i's parameters beside those that are whole already."""
        for flat in (*self._needs[i], *self._soon):
            self._start(flat)
        for flat in self._needs[i]:
            self._wait(flat)

    def _keep(self, flats: Iterable[Flat]) -> None:
        """Free all flat tensors but these and those that the sites under way need."""
        under_way = (flat for i in self._active for flat in self._needs[i])
        kept = {*flats, *under_way, *self._until_the_end}
        for flat in [flat for flat in self._whole if flat not in kept]:
            self._wait(flat)
            veil(flat.layout.parameters, sharded=True)
            flat.free()
            del self._whole[flat]

    def _start(self, flat: Flat) -> None:
        if flat in self._whole:
            return
        flat.allocate()
        shard = flat.shard
        if self._on_host:
            op = self._record.begin(Kind.COPY_TO_DEVICE, nbytes=shard.nbytes)
            shard = flat.mine.copy_(shard, non_blocking=True)
            self._record.end(op)
        self._whole[flat] = self._replicas.all_gather(shard, async_op=True, out=flat.whole)

    def _wait(self, flat: Flat) -> None:
        work = self._whole[flat]
        if work is not None:
            work.wait()
            self._whole[flat] = None
            veil(flat.layout.parameters, sharded=False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole inside the block, which every rank enters. Changes to them are lost."""
        if self._all:
            yield
            return
        with torch.no_grad():
            for flat in self._flats:
                self._start(flat)
            for flat in self._flats:
                self._wait(flat)
        self._all = True
        try:
            yield
        finally:
            self._all = False
            self._keep(())


def _in_backward() -> bool:
    """Return whether autograd is running a backward, in which any forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)  # private; tests/test_zero_units.py guards it


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output: one, or several in tuples, lists or dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for inner in output:
            yield from _tensors(inner)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
