"""What the ranks of a loop tell each other of their proof, by torch.distributed alone, and what each holds.

A rank's parameters are

whole       on each rank (torch's DDP, ZeroRedundancyOptimizer)
DTensor     torch knows its parts (FSDP2, tensor parallelism by `parallelize_module`)
parts       a wrapper of mpkit's says which elements a rank has (`mk.tensor_parallel`, `mk.pipeline`)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mpkit.errors import NotSerial
from mpkit.strategies.proof.compare import difference_in_words, say
from mpkit.strategies.runtime.evidence import digest_of
from mpkit.strategies.stage.shard import HeldPart, put_together


class Ranks:
    """The ranks of a proof, and what they have to agree on.

    Args:
        who: what they prove, for messages: "mk.ddp".
        ranks: their numbers among all processes.
        group: torch's group of them; None for all.
    """

    def __init__(self, who: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._who, self._group, self.ranks = who, group, tuple(ranks)
        self.rank = dist.get_rank() if len(ranks) > 1 else self.ranks[0]
        self.index = self.ranks.index(self.rank)  # this rank's place among them
        self.notes: dict[str, None] = {}
        self.findings: list[str] = []  # what this rank found that is not as in plain PyTorch
        self.new_step()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def new_step(self) -> None:
        """Forget the step before."""
        self.digests: list[dict[str, str]] = []  # by name, in order: what has to be the same on all ranks
        self.training: bool | None = None  # the mode of the first forward

    def note_mode(self, module: nn.Module) -> None:
        """Note the mode of the first forward of a step."""
        self.training = module.training if self.training is None else self.training

    # ---- collectives

    def all(self, mine: Any) -> list[Any]:
        """Return what each rank has."""
        every: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(every, mine, self._group)
        return every

    def each(self, mine: Tensor) -> Tensor:
        """Return each rank's tensor of this shape, [ranks, ...]."""
        if self.size == 1:
            return mine[None]
        plain = torch.view_as_real(mine) if mine.is_complex() else mine
        every = [torch.empty_like(plain) for _ in self.ranks]
        dist.all_gather(every, plain.contiguous(), self._group)
        made = torch.stack(every)
        return torch.view_as_complex(made) if mine.is_complex() else made

    def mean(self, mine: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        if self.size == 1:
            return mine
        made = mine.clone()
        dist.all_reduce(torch.view_as_real(made) if made.is_complex() else made, group=self._group)
        return made / self.size

    def most(self, values: Tensor) -> Tensor:
        """Return the largest values of all ranks."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def any(self, mine: bool) -> bool:
        """Return whether it is so on any rank."""
        return any(self.all(mine))

    # ---- the models

    def same_model(self, module: nn.Module) -> None:
        """Check that the ranks' plain modules are one, and take the first rank's weights into this one."""
        named = [*module.named_parameters(), *module.named_buffers()]
        trains = {True: "trained", False: "not trained"}
        kinds = {name: f"{list(t.shape)} in {t.dtype}, {trains[t.requires_grad]}," for name, t in named}
        for name, inner in module.named_modules():
            kinds[name or "the model"] = f"in {'training' if inner.training else 'evaluation'} mode"
        for rank, other in zip(self.ranks, self.all(kinds), strict=True):
            for name in (*kinds, *other):
                here, there = kinds.get(name, "missing"), other.get(name, "missing")
                if here != there:
                    raise ValueError(
                        f"{self._who}: the ranks have different models: {name} is {there} on rank {rank}, "
                        f"and {here} on rank {self.rank}. Build the same model, in the same mode, on every rank; "
                        "only its weights become the first rank's"
                    )
        digests = self.all({name: digest_of(tensor) for name, tensor in named})
        differ = next((name for name, _ in named if len({each[name] for each in digests}) > 1), None)
        if differ is not None:
            first = self.ranks[0]
            self.notes[f"before the wrap the ranks' weights differed ({differ}); rank {first}'s count"] = None
            with torch.no_grad():
                for _, tensor in named:
                    dist.broadcast(tensor, first, self._group)

    # ---- a step

    def why_not(self, mine: str) -> str:
        """Return why the first rank that says so cannot compare the step; "" if all can."""
        return next(filter(None, self.all(mine)), "")

    def agree(self, step: int) -> None:
        """Tell the other ranks this one's findings; raise NotSerial, on all ranks, with the first finding of any."""
        every = list(zip(self.ranks, self.all((self.findings, self.digests, self.training)), strict=True))
        first = every[0][1]
        found = [(rank, what) for rank, (findings, *_) in every for what in findings]
        for rank, (_, digests, training) in every:
            if training != first[2]:
                words = {True: "training", False: "evaluation", None: "no"}
                says = f"the model is in {words[training]} mode, and not as on rank {self.ranks[0]}."
                found.append((rank, says))
            for one, other in zip(digests, first[1], strict=False):
                differ = [name for name in one if name in other and one[name] != other[name]]
                says = f"is not that of rank {self.ranks[0]}. {say('replicas')}"
                found += [(rank, f"{name} {says}") for name in differ[:1]]
        if found:
            rank, what = found[0]
            says = f"{self._who}: step {step} is not that of plain PyTorch: on rank {rank} {what}"
            raise NotSerial(says.rstrip(), step=step)


# ---- what a rank holds


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every rank that holds a part calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, as a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor)


def kept(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of what a rank has of a gradient."""
    if gradient is None:
        return None
    return (gradient if isinstance(gradient, DTensor) else local(gradient)).detach().clone()


class HeldTensors:
    """The parameters of a wrapped module on this rank.

    Args:
        named: what this rank's optimizer updates, by the names in the plain module.
        parts: their place in the plain module's parameters; None where each is whole, or a DTensor.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], parts: Mapping[str, HeldPart] | None, ranks: Ranks
    ) -> None:
        self.named, self._parts, self._ranks = dict(named), parts, ranks

    @property
    def divided(self) -> bool:
        """Whether a wrapper of mpkit's has divided the parameters, so that ranks hold other elements."""
        return self._parts is not None

    def versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [parameter._version for parameter in self.named.values()]

    def part(self, name: str, of: Tensor) -> Tensor | None:
        """Return a rank's part of a whole tensor, flat; None if it has none of it."""
        if self._parts is None:
            return of.reshape(-1)
        part = self._parts.get(name)
        return None if part is None or not part.tensor.numel() else part.take(of)

    @torch.no_grad()
    def take_weights(self, into: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Copy the whole weights into the plain parameters, and return what those were; every rank calls it."""
        before = {name: parameter.detach().clone() for name, parameter in into.items()}
        if self._parts is not None:
            for name, parameter in into.items():
                self._put_together(name, parameter)
            return before
        digests = {}
        for name, parameter in into.items():
            parameter.requires_grad_(self.named[name].requires_grad).copy_(whole(self.named[name].detach()))
            digests[name] = digest_of(parameter)
        self._ranks.digests.append(digests)
        return before

    def check_wrapped(self, plain: Mapping[str, nn.Parameter]) -> None:
        """Find a weight that wrapping has changed, and take the wrapped ones into the plain parameters."""
        for name, before in self.take_weights(plain).items():
            if not torch.equal(before, plain[name].detach()):
                self._ranks.findings.append(
                    f"{name}, once wrapped, is not what it is in rank {self._ranks.ranks[0]}'s plain module: an "
                    f"element is {difference_in_words(plain[name], before)}. {say('seeds')}"
                )
                return

    def _put_together(self, name: str, parameter: nn.Parameter) -> None:
        mine, part = self.named.get(name), (self._parts or {}).get(name)
        sent = part and mine is not None and (
            part._replace(tensor=mine.detach().cpu().reshape(-1)), mine.requires_grad
        )  # fmt: skip
        of_ranks = zip(self._ranks.ranks, self._ranks.all(sent), strict=True)
        every = [(rank, *each) for rank, each in of_ranks if each]
        parts = [each._replace(tensor=torch.ones_like(each.tensor, dtype=torch.bool)) for _, each, _ in every]
        if not parts or not bool(put_together(parts).all()):
            self._ranks.findings.append(f"{name} has elements that no rank updates.")
            return
        made = put_together([each for _, each, _ in reversed(every)])
        for rank, each, trained in every:
            parameter.requires_grad_(trained)
            if not torch.equal(each.take(made), each.tensor):
                self._ranks.findings.append(
                    f"{name} on rank {rank} is not what it is on the ranks before it."
                )
        parameter.copy_(made)
