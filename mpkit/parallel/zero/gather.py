"""P_p: a layer's parameters are gathered just before use and freed after, in the forward and again in the backward.

    forward    before a layer: gather its parameters, and start those of the next `prefetch` layers; free after it
    backward   when the gradient of its output has come: gather again, start those of the layers before; whatever
               the backward has passed is freed

So each parameter is sent twice a step, and its gradient once: 3 psi instead of 2 (Rajbhandari et al. 2020, section
7.2.2). No layer is asked what it does: hooks on modules and on their outputs do it. Autograd keeps, for the backward,
views of the gathered memory; that is given back and taken again beneath them (`Flat`), so they see the same
numbers.

Where a backward is done in two halves, I is as a whole one, and for W the stage's parameters are gathered together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.parallel.anymodel.walk import around_forward
from mpkit.parallel.axis import Axis, Waiting
from mpkit.parallel.zero.flat import Flat
from mpkit.parallel.zero.sharded import veil
from mpkit.parallel.zero.units import Site
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Gathering"]


class Gathering:
    """Which parameters are whole at the moment.

    Args:
        replicas: who holds the other shards.
        record: of this rank.
        sites: of the model, in order of use.
        flats: of all their parameters, with the shards filled.
        prefetch: how many sites ahead.
        on_host: shards are copied to the device first (offload="params").
    """

    def __init__(
        self,
        replicas: Axis,
        record: Recorder,
        sites: list[Site],
        flats: list[Flat],
        *,
        prefetch: int,
        on_host: bool,
    ) -> None:
        self._replicas, self._record, self._on_host = replicas, record, on_host
        self._prefetch = prefetch
        self._flats = flats
        of = {parameter: flat for flat in flats for parameter in flat.layout.parameters}
        # By site, in order of use; a flat once.
        self._needs = [list(dict.fromkeys(of[parameter] for parameter in site.uses)) for site in sites]
        self._stage = [site.stage for site in sites]
        self._has_backward = [False] * len(sites)
        self._around: set[Flat] = set()  # of sites that others are within, while they are under way
        self._whole: dict[Flat, Waiting | None] = {}  # gathered, or with what is under way
        self._all = False  # inside `gathered`
        for flat in flats:
            flat.free()
            veil(flat.layout.parameters, sharded=True)
        for i, site in enumerate(sites):
            before = partial(self._before_forward, i, site.around)
            around_forward(site.module, before, partial(self._after_forward, i, site.around))

    # ---- forward ------------------------------------------------------------------------------------------

    def _before_forward(self, i: int, around: bool, *_: Any) -> None:
        if not self._all:
            self._gather(i, self._next(i), around)

    def _after_forward(self, i: int, around: bool, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._all:
            return
        if around:
            self._around.clear()
        self._keep(flat for j in self._next(i) for flat in self._needs[j] if not around)
        self._has_backward[i] = False
        for tensor in _tensors(output):
            if tensor.requires_grad:
                self._has_backward[i] = True
                tensor.register_hook(partial(self._before_backward, i, around))

    def _next(self, i: int) -> list[int]:
        ahead = range(i + 1, min(i + 1 + self._prefetch, len(self._needs)))
        return [j for j in ahead if self._stage[j] == self._stage[i]]

    # ---- backward -----------------------------------------------------------------------------------------

    def _before_backward(self, i: int, around: bool, _gradient: Tensor) -> None:
        if not self._all:
            before = range(i - 1, max(i - 1 - self._prefetch, -1), -1)
            soon = [j for j in before if self._has_backward[j] and self._stage[j] == self._stage[i]]
            self._gather(i, soon, around)

    def after_backward(self) -> None:
        """Free what the backward used last."""
        self._around.clear()
        self._keep(())

    def gather_stage(self, stage: int) -> None:
        """Have all that a stage of the model uses whole, until `after_backward`."""
        needed = {flat for i, s in enumerate(self._stage) if s == stage for flat in self._needs[i]}
        with torch.no_grad():
            self._keep(needed)
            for flat in self._flats:
                if flat in needed:
                    self._start(flat)
            for flat in needed:
                self._wait(flat)

    # ---- gather and free ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, i: int, ahead: list[int], around: bool) -> None:
        """Have site i's parameters whole, those of the sites ahead under way, and no others.

        What a site around others uses stays as long as those are at work; and what these use stays.
        """
        soon = [flat for j in ahead for flat in self._needs[j] if not around]
        if around:
            self._around.update(self._needs[i])
        else:
            self._keep((*self._needs[i], *soon))
        for flat in (*self._needs[i], *soon):
            self._start(flat)
        for flat in self._needs[i]:
            self._wait(flat)

    def _keep(self, flats: Any) -> None:
        """Free all but these."""
        kept = {*flats, *self._around}
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
        self._whole[flat] = self._replicas.start_all_gather(shard, out=flat.whole)

    def _wait(self, flat: Flat) -> None:
        work = self._whole[flat]
        if work is not None:
            work.wait()
            self._whole[flat] = None
            veil(flat.layout.parameters, sharded=False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all parameters are whole; every rank enters. What is written into them is lost."""
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


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of what a module gives: one, or some in tuples, lists or dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for inner in output:
            yield from _tensors(inner)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
