"""ExpertCopies: experts that a rank computes but does not own, because a placement gives them several slots.

    choose      the i-th row of an expert with c slots goes to its slot (i + r) mod c, on rank r of the group
    borrow      before the first forward with new weights, each owner sends its experts to the ranks that have copies
    compute     rows of experts that this rank owns, then those of its copies, whose gradients accumulate like others
    give back   after the last backward of a step, the gradients of copies go to the owner, which adds them to its own

So the owner alone has optimizer states, counts the expert in the norm of gradients, and saves it. Slots of one rank
with the same expert are one copy. Each step sends a copy twice, as the all-reduce of its gradients would; ranks are
added in their order, so that a sum is the same every time. Replicas sum gradients afterwards, as those of tied weights.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.4 (redundant experts, for inference);
He et al., "FasterMoE", PPoPP 2022, section 4.2 (dynamic shadowing: weights are sent, and gradients returned).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.plan.expert_checks import lent_experts
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.process_group import FakeGroup, ProcessGroup
from mpkit.strategies.experts.known_experts import find_experts, number_of_experts
from mpkit.strategies.models.experts import owned_experts, placed_copies
from mpkit.strategies.models.experts.routing import number_rows

__all__ = ["ExpertCopies", "borrowed_bytes", "choose_slots", "find_copies"]

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""Computes rows, (R, h), with the experts of these places."""


def choose_slots(chosen: Tensor, order: Sequence[int], rank: int) -> Tensor:
    """Return the slot for each choice of an expert, in the shape of `chosen`; a dropped choice is past the last slot.

    >>> choose_slots(torch.tensor([[0], [1], [0], [0], [2]]), [0, 1, 0], rank=1).flatten().tolist()
    [2, 1, 0, 2, 3]

    Args:
        chosen: each token's experts, [T, k], integers from 0 to E; E: the choice is dropped.
        order: the expert of each slot.
        rank: this rank's place in the group, at which it begins to count, so that copies are about as busy.
    """
    experts = max(order) + 1
    slots = [[slot for slot, held in enumerate(order) if held == expert] for expert in range(experts)]
    slots.append([len(order)])
    most = max(map(len, slots))
    table = torch.tensor([[*each, *[-1] * (most - len(each))] for each in slots], device=chosen.device)
    if most == 1:
        return table[:, 0].to(chosen.dtype)[chosen]
    copies = torch.tensor([len(each) for each in slots], device=chosen.device)
    turn = (number_rows(chosen, experts + 1) - 1 + rank) % copies[chosen]
    return table[chosen, turn].to(chosen.dtype)


class ExpertCopies:
    """One rank's copies in one layer.

    Args:
        module: the layer's experts, with the parameters of those that this rank owns.
        order: the expert of each slot.
        experts: how many the whole layer has.
        group: the ranks that divide them.

    Attributes:
        order, group: as given.
        count, lent: how many experts this rank borrows, and how many it lends, once per borrower.
        places: for each slot of this rank, its expert's place: owned experts, then borrowed ones.
        track: called with tensors that the rank begins to hold, and the category of their memory.
    """

    def __init__(self, module: nn.Module, order: Sequence[int], experts: int, group: ProcessGroup) -> None:
        self.order, self.group = tuple(order), group
        self._module, n, me = module, group.size, group.index
        owned = owned_experts(order, experts, n)
        slots, of = len(order) // n, lent_experts(order, experts, n)
        self._any = any(each for owner in of for each in owner)
        self._lent = [[owned[me].index(e) for e in to] for to in of[me]]
        self._borrowed = [len(owner[me]) for owner in of]
        borrowed = [e for owner in of for e in owner[me]]
        self.count, self.lent, self._owned = len(borrowed), sum(map(len, self._lent)), len(owned[me])
        place = {e: i for i, e in enumerate((*owned[me], *borrowed))}
        self.places = [place[e] for e in order[me * slots : (me + 1) * slots]]
        self._weights: dict[str, nn.Parameter] = {}
        self._expired, self._used = True, False
        self.track: Callable[[Tensor, str], object] = lambda *_: None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The owned parameters, whose gradients are complete only after `give_back`."""
        return list(self._module.parameters()) if self._any else []

    def choose(self, chosen: Tensor) -> Tensor:
        """Return the slot for each choice of an expert, in the shape of `chosen`."""
        return choose_slots(chosen, self.order, self.group.index)

    # ---- borrow

    def expire(self) -> None:
        """Note that weights may have changed since they were borrowed."""
        self._expired = True

    def borrow(self) -> None:
        """Take the owners' weights, if they may have changed; every rank calls it in each forward."""
        self._used = self._used or torch.is_grad_enabled()
        if not (self._any and self._expired):
            return
        self._expired = False
        sends = [len(each) for each in self._lent]
        for name, parameter in self._module.named_parameters():
            if name in self._weights and not parameter.requires_grad:
                continue
            with torch.no_grad():
                index = self._index(parameter.device)
                rows = parameter.detach().index_select(0, index)
                copies = self.group.all_to_all(rows, sends=sends, receives=self._borrowed)
            self._weights[name] = nn.Parameter(copies, parameter.requires_grad)
            self.track(copies, "params")

    def _index(self, device: torch.device) -> Tensor:
        """Return the places of the experts that this rank lends, one borrower's after the other's."""
        return torch.tensor([place for each in self._lent for place in each], dtype=torch.long, device=device)

    # ---- compute

    def compute(self, rows: Tensor, places: Sequence[int], compute: Compute) -> Tensor:
        """Return what the experts in these places make of rows, (R, h).

        Args:
            rows: (R, h).
            places: the place of the expert of each row.
            compute: the layer's own forward, with the experts that the module has.
        """
        if not self.count:
            return compute(rows, places)
        own = [i for i, place in enumerate(places) if place < self._owned]
        others = [i for i, place in enumerate(places) if place >= self._owned]
        index = torch.tensor([*own, *others], dtype=torch.long, device=rows.device)
        mine, theirs = rows.index_select(0, index).split([len(own), len(others)])
        made = [compute(mine, [places[i] for i in own])]
        with self._standing_in():
            made.append(compute(theirs, [places[i] - self._owned for i in others]))
        return torch.cat(made).index_select(0, index.argsort())

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Within the block, the module's parameters are those of the copies: its own attributes come first."""
        put: list[tuple[nn.Module, str]] = []
        number: Any = getattr(self._module, "num_experts", None)
        for name, weight in self._weights.items():
            owner, _, key = name.rpartition(".")
            module = self._module.get_submodule(owner)
            module.__dict__[key] = weight
            put.append((module, key))
        if number is not None:
            setattr(self._module, "num_experts", self.count)  # noqa: B010 (nn.Module's stubs allow tensors only)
        try:
            yield
        finally:
            for module, key in put:
                del module.__dict__[key]
            if number is not None:
                setattr(self._module, "num_experts", number)  # noqa: B010

    # ---- give back

    @torch.no_grad()
    def give_back(self) -> None:
        """Add the gradients of all copies to those of their owners; every rank calls it after the last backward."""
        if not (self._any and self._used):
            return
        self._used = False
        sends = [len(each) for each in self._lent]
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                continue
            weight = self._weights[name]
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            returned = self.group.all_to_all(gradient.contiguous(), sends=self._borrowed, receives=sends)
            weight.grad = None
            index = self._index(returned.device)
            for end, count in zip(accumulate(sends), sends, strict=True):
                part = slice(end - count, end)
                assert parameter.grad is not None, "the owner computes a row of zeros if it has no other"
                parameter.grad.index_add_(0, index[part], returned[part])


def find_copies(model: nn.Module) -> list[ExpertCopies]:
    """Return the copies of the layers that are here, in the model's order."""
    layers = find_experts(model).values()
    return [layer.__dict__["expert_copies"] for layer in layers if "expert_copies" in layer.__dict__]


def borrowed_bytes(model: nn.Module, plan: Plan) -> int:
    """Return the bytes of copies, with their gradients, of the rank that borrows most; stages have as many layers.

    >>> from mpkit.models import GPT, place_experts
    >>> model = GPT(layers=1, width=8, heads=2, experts=4)  # 2 x 8 x 32 weights per expert
    >>> model = place_experts(model, {"block0.mlp.experts": [0, 0, 1, 0, 2, 3]})
    >>> borrowed_bytes(model, Plan(dp=2, ep=2)) == 2 * 4 * 2 * 8 * 32
    True

    Args:
        model: the whole model.
        plan: read for ep, etp and precision.
    """
    layers, borrowed = find_experts(model), [0] * plan.ep
    for name, order in placed_copies(model).items() if plan.ep > 1 else ():
        experts = number_of_experts(layers[name])
        of_each = sum(
            p[0].numel() * (p.itemsize if plan.precision == "full" else 2) * (1 + p.requires_grad)
            for p in layers[name].parameters()
        )
        for rank in range(plan.ep):
            copies = ExpertCopies(layers[name], order, experts, FakeGroup(plan.ep, rank))
            borrowed[rank] += copies.count * of_each // (plan.tp if plan.etp == plan.tp else 1)
    return max(borrowed) // plan.pp
