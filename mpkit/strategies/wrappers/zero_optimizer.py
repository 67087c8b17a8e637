"""mk.zero_optimizer: P_os around an optimizer of torch's: each rank updates some of the parameters, and sends them.

    own     every parameter belongs to one rank, the largest first, each to the rank that has least
    step    a rank's own optimizer updates its parameters, and has states for these only
    send    each rank broadcasts what it has updated

Gradients are the same on all ranks before: `mk.ddp` averages them, or all ranks compute the same. Parameters are
updated whole, so this takes any optimizer that treats each parameter by itself, Muon and Adafactor too.
`mk.fully_shard(stage=1)` divides the states evenly to the element, and reduces gradients to the shards only.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section
5.1; torch's ZeroRedundancyOptimizer divides in the same way.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.tracebacks import public
from mpkit.strategies.data_parallel.broadcast import broadcast_tensors
from mpkit.strategies.prepare.shared_memory import find_overlap
from mpkit.strategies.wrappers.divided_optimizer import check_optimizers
from mpkit.strategies.wrappers.replicas import Group, context_on, replicas_of
from mpkit.trace.record.hooks import watch_optimizer

__all__ = ["ZeroOptimizer", "zero_optimizer"]

APART = ("params", "param_names")
"""Entries of a parameter group that differ between ranks."""


@public
def zero_optimizer(
    optimizer_class: Any, params: Iterable[Any], *, group: Group = None, **kwargs: Any
) -> ZeroOptimizer:
    """Make an optimizer whose states are divided among ranks: with AdamW, 8 bytes per parameter become 8 / n.

    Every rank calls this at the same time, with the same parameters, which become the first rank's. Each step ends with
    the same weights on all ranks.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     model = mk.ddp(nn.Linear(4, 2))
    ...     optimizer = mk.zero_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    ...     model(torch.full((2, 4), float(ctx.rank))).square().mean().backward()
    ...     optimizer.step()
    ...     return [tuple(parameter.shape) for parameter in optimizer.state]
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)
    [[(2, 4)], [(2,)]]

    Args:
        optimizer_class: torch.optim.AdamW, or any other that treats each parameter by itself.
        params: as for the optimizer: parameters, (name, parameter) pairs, or groups of them.
        group: the ranks among which states are divided: a communicator, torch's process group, or a DeviceMesh of one
            axis; None for all.
        kwargs: given to the optimizer.

    Raises:
        ValueError: there is no process group, no class, no parameters, or they are shares of `mk.fully_shard`.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ValueError(
            f"mk.zero_optimizer takes a class first, and was given {optimizer_class!r}: "
            "mk.zero_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)"
        )
    if isinstance(params, nn.Module):
        raise ValueError(
            "mk.zero_optimizer takes parameters, as the optimizer does, and was given a module: "
            f"mk.zero_optimizer(torch.optim.{optimizer_class.__name__}, model.parameters(), ...)"
        )
    return ZeroOptimizer(optimizer_class, params, group, kwargs)


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer that updates this rank's parameters, and receives the others; made by `mk.zero_optimizer`.

    `param_groups` are those of all parameters, so schedulers work; `state` is that of this rank's.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        group: Group,
        options: dict[str, Any],
    ) -> None:
        self._local: torch.optim.Optimizer | None = None
        super().__init__(params, {})
        first: Tensor = self.param_groups[0]["params"][0]
        context = context_on(first.device)
        self._replicas, self._device = replicas_of(context, group), first.device
        # ---- own
        self._owner: dict[Tensor, int] = {}
        self._held = [0] * self._replicas.size  # elements that each rank updates
        self._assign(self._every())
        broadcast_tensors(self._replicas, [parameter.detach() for parameter in self._every()])
        self._local = optimizer_class([self._mine(each) for each in self.param_groups], **options)
        self._adopt()
        if self._replicas.size > 1:
            check_optimizers(self._local, "parameters", "mk.zero_optimizer")
        watch_optimizer(context.record, self._local)

    def _every(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _assign(self, parameters: list[Tensor]) -> None:
        """Give each parameter to the rank that updates the fewest elements so far, the largest first."""
        if any(getattr(parameter, "is_share", False) for parameter in parameters):
            raise ValueError(
                "mk.zero_optimizer was given shares of mk.fully_shard, which divides the optimizer's states already: "
                "torch.optim.AdamW(model.parameters()) does there"
            )
        if pair := find_overlap(dict(enumerate(self._every()))):
            raise ValueError(
                f"mk.zero_optimizer: parameters {pair[0]} and {pair[1]} are different tensors in the same memory, and "
                "two ranks would update it. What works: one parameter in both places of the model; or "
                ".detach().clone(), if they are to be separate"
            )
        for parameter in sorted(parameters, key=lambda each: -each.numel()):
            owner = min(range(self._replicas.size), key=self._held.__getitem__)
            self._owner[parameter] = owner
            self._held[owner] += parameter.numel() if parameter.requires_grad else 0

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with those of its parameters that this rank updates."""
        mine = [p for p in group["params"] if self._owner[p] == self._replicas.index]
        return {**{key: value for key, value in group.items() if key not in APART}, "params": mine}

    def _adopt(self) -> None:
        """Take over what the rank's optimizer has filled in: defaults, and its states."""
        assert self._local is not None
        self.defaults = self._local.defaults
        self.state = self._local.state
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            for key, value in local.items():
                if key not in APART:
                    group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as for any optimizer; every rank calls it."""
        super().add_param_group(param_group)
        if self._local is not None:
            group = self.param_groups[-1]
            self._assign(group["params"])
            broadcast_tensors(self._replicas, [parameter.detach() for parameter in group["params"]])
            self._local.add_param_group(self._mine(group))
            self._adopt()

    # ---- step, send

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's parameters, and receive the others; every rank calls it.

        Args:
            closure: computes the loss anew, with its gradients.
        """
        assert self._local is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # ---- step: with what schedulers have set
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update({key: value for key, value in group.items() if key not in APART})
        self._local.step()
        # ---- send
        trained = [parameter for parameter in self._every() if parameter.requires_grad]
        for owner in range(self._replicas.size):
            updated = [parameter.detach() for parameter in trained if self._owner[parameter] == owner]
            broadcast_tensors(self._replicas, updated, owner)
        return loss

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parameters, on the CPU, as an optimizer without ranks has them.

        Every rank calls it.
        """
        number = {parameter: i for i, parameter in enumerate(self._every())}
        mine = {number[parameter]: state for parameter, state in self.state.items()}
        states: dict[int, Any] = {}
        for owner in range(self._replicas.size):
            states |= self._broadcast_from(owner, mine)
        numbers = iter(range(len(number)))
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [next(numbers) for _ in g["params"]]}
            for g in self.param_groups
        ]
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def _broadcast_from(self, owner: int, mine: Any) -> Any:
        """Return one rank's value on all ranks."""
        packed, sends = io.BytesIO(), owner == self._replicas.index
        if sends:
            torch.save(mine, packed)
        content = torch.frombuffer(bytearray(packed.getvalue() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([content.numel()], device=self._device)
        self._replicas.broadcast(size, owner)
        content = content if sends else torch.empty(int(size.item()), dtype=torch.uint8)
        content = self._replicas.broadcast(content.to(self._device), owner).cpu()
        return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all parameters, of which this rank keeps its own; every rank calls it."""
        super().load_state_dict(state_dict)
        loaded = dict(self.state)
        assert self._local is not None
        self._local.state.clear()
        mine = {parameter for group in self._local.param_groups for parameter in group["params"]}
        self._local.state.update({p: state for p, state in loaded.items() if p in mine})
        self.state = self._local.state
