"""mk.tensor_parallel: each layer divided by width over the ranks, for a loop of one's own.

divide       the module's parameters become this rank's parts of them, in place (`mpkit.strategies.tensor`)
forward      on the same inputs on every rank; what regions exchange is theirs
backward     every rank has the gradients of its parts; those of whole parameters are the same everywhere
then         optimizer.step(), on each rank its parts: nothing is averaged, since all compute the same batch
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.tracebacks import public
from mpkit.plan.tensor_plan import TensorPlan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.prepare.checks import find_shared_memory, find_wrong_embedding, raise_rejection
from mpkit.strategies.replicas.buffers import broadcast_all
from mpkit.strategies.stage.shard import HeldPart, Shard, put_together
from mpkit.strategies.tensor.known_plans import find_tensor_plan
from mpkit.strategies.tensor.resolve import check
from mpkit.strategies.tensor.shards import shard_model, shards_of
from mpkit.strategies.wrappers.divided import DividedModule, mark_divided
from mpkit.strategies.wrappers.wrapper import Group, HeldParameters, check_module, ranks_for


class TensorParallel(DividedModule):
    """A module of which each rank holds a part of each layer; made by `mk.tensor_parallel`.

    Args:
        shards: for each rank of the group, which part of which parameter it holds, by every name.
    """

    def __init__(self, module: nn.Module, shards: list[dict[str, Shard]], comm: Communicator) -> None:
        super().__init__(module)
        self._shards, self._comm = shards, comm
        for name, parameter in module.named_parameters():
            if name in shards[0] and parameter.requires_grad:
                mark_divided(parameter, "elements", "mk.tensor_parallel")
        self._held = HeldParameters(module, "mk.tensor_parallel", allows_unused=True)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if torch.is_grad_enabled():
            self._held.check()
        return self.module(*args, **kwargs)

    @property
    def holders(self) -> Communicator:
        """The ranks that hold the other parts, and this one."""
        return self._comm

    def held_parts(self) -> dict[str, HeldPart]:
        """Return this rank's elements of the module's parameters, by name."""
        mine, parts = self._shards[self._comm.index], dict[str, HeldPart]()
        for name, p in self.module.named_parameters():
            whole = HeldPart(p.detach().reshape(-1), tuple(p.shape))
            parts[name] = HeldPart.of_shard(mine[name], p.detach()) if name in mine else whole
        return parts

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        named = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        mine = [gradient for name, gradient in named.items() if name in self._shards[0]]
        return mine, [gradient for name, gradient in named.items() if name not in self._shards[0]]

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return the whole module's state on every rank; every rank calls it. Divided tensors are copies."""
        state = self.module.state_dict(*args, prefix=prefix, **kwargs)
        for name in self._shards[0]:
            if prefix + name in state:
                state[prefix + name] = self._whole(name, state[prefix + name])
        return state

    @torch.no_grad()
    def _whole(self, name: str, local: Tensor) -> Tensor:
        shards = [of_rank[name] for of_rank in self._shards]
        sizes = [torch.Size(shard.shape).numel() for shard in shards]
        padded = local.new_zeros(max(sizes))
        padded[: local.numel()] = local.reshape(-1)
        parts = self._comm.all_gather(padded).chunk(self._comm.size)
        held = zip(shards, parts, sizes, strict=True)
        return put_together([HeldPart.of_shard(shard, part[:size]) for shard, part, size in held])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole module's state, of which each rank takes its parts.

        Raises:
            ValueError: `assign` is set.
            RuntimeError: names or shapes do not fit, as for any module.
        """
        mine = self._shards[self._comm.index]
        fits = {n for n, s in mine.items() if n in state_dict and tuple(state_dict[n].shape) == s.whole}
        local = {n: mine[n].take(value) if n in fits else value for n, value in state_dict.items()}
        return super().load_state_dict(local, strict, assign)


@public
def tensor_parallel(
    module: nn.Module, plan: TensorPlan | None = None, *, group: Group = None
) -> TensorParallel:
    """Divide each layer of a module over the ranks, which then compute together what it computed on one.

    Every rank calls this at the same time, in a function that `Cluster.run` calls or under torchrun after
    `init_process_group`. Parameters and buffers become the first rank's; then each rank keeps its parts, which it gives
    to an optimizer. All ranks call the module with the same inputs and have the same outputs, so gradients need no
    averaging.

    >>> import mpkit as mk
    >>> from mpkit.models import MLP
    >>> def train(ctx):
    ...     torch.manual_seed(ctx.rank)  # the first rank's weights count
    ...     model = mk.tensor_parallel(MLP(2, 3))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.ones(1, 2)).square().mean().backward()
    ...     optimizer.step()
    ...     return model(torch.ones(1, 2)).tolist()
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     first, second = cluster.run(train)
    >>> first == second
    True

    Args:
        module: the whole module; changed in place.
        plan: what to divide; None for `mk.tensor.find_tensor_plan(module)`.
        group: the ranks that share the module: a communicator, torch's process group, or a DeviceMesh of one axis; None
            for all. `mk.ddp(mk.tensor_parallel(module, group=tp), group=dp)` is a mesh of both.

    Returns:
        The wrapper: `model.module` is the module. `state_dict()` returns whole tensors on every rank, and
        `clip_grad_norm_` clips by the norm over all ranks.

    Raises:
        ValueError: there is no process group, the module cannot be divided in this way, or it is wrapped already.
    """
    check_module(module, "mk.tensor_parallel")
    _, comm = ranks_for(module, group)
    raise_rejection(find_wrong_embedding(module, shared=comm.size > 1) or find_shared_memory(module))
    broadcast_all(comm, module)
    shards: list[dict[str, Shard]] = [{}]
    if comm.size > 1:
        plan = find_tensor_plan(module) if plan is None else plan
        resolved = check(module, comm.size, plan)
        of_ranks = [shards_of(module, FakeGroup(comm.size, i), resolved) for i in range(comm.size)]
        shards = [each.found for each in of_ranks]
    partial_sums = shard_model(module, comm, plan).partial
    for name, parameter in module.named_parameters():
        if name in partial_sums and parameter.requires_grad:
            parameter.register_hook(lambda gradient: comm.all_reduce(gradient.clone()))
    return TensorParallel(module, shards, comm)
