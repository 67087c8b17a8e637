"""Ranks: what the ranks of a loop tell each other of their proof, by torch.distributed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.errors import NotSerial
from mpkit.strategies.runtime.evidence import digest_of

__all__ = ["Ranks"]

REPLICAS = (
    "The ranks' optimizers or hooks have made different updates, a shard that one rank updates has not reached the "
    "others, or a random number that is not the same on each rank decides something."
)


class Ranks:
    """The ranks of a proof, and what they have to agree on.

    Args:
        who: what they prove, for messages: "mk.ddp".
        ranks: their numbers among all processes.
        group: torch's group of them; None for all.

    Attributes:
        index: this rank's place among them.
        findings: what this rank found that is not as in plain PyTorch.
        digests: of what has to be the same on all ranks, by name, in order.
        training: the mode of the first forward of a step.
        notes: what is said besides.
    """

    def __init__(self, who: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._who, self._group, self.ranks = who, group, tuple(ranks)
        self.rank = dist.get_rank() if len(ranks) > 1 else self.ranks[0]
        self.index = self.ranks.index(self.rank)
        self.notes: dict[str, None] = {}
        self.findings: list[str] = []
        self.new_step()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def new_step(self) -> None:
        """Forget the step before."""
        self.digests: list[dict[str, str]] = []
        self.training: bool | None = None

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
        """Check that the ranks' plain modules are one, and take the first rank's weights into this one.

        Raises:
            ValueError: on all ranks: they are different.
        """
        named = [*module.named_parameters(), *module.named_buffers()]
        kinds = {
            name: f"{list(t.shape)} in {t.dtype}, {'trained' if t.requires_grad else 'not trained'},"
            for name, t in named
        }
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
        """Tell the other ranks what this one found.

        Raises:
            NotSerial: on all ranks: the first finding of any.
        """
        every = list(zip(self.ranks, self.all((self.findings, self.digests, self.training)), strict=True))
        first = every[0][1]
        found = [(rank, what) for rank, (findings, *_) in every for what in findings]
        for rank, (_, digests, training) in every:
            if training != first[2]:
                words = {True: "training", False: "evaluation", None: "no"}
                found.append(
                    (rank, f"the model is in {words[training]} mode, and not as on rank {self.ranks[0]}.")
                )
            for one, other in zip(digests, first[1], strict=False):
                differ = [name for name in one if name in other and one[name] != other[name]]
                found += [
                    (rank, f"{name} is not that of rank {self.ranks[0]}. {REPLICAS}") for name in differ[:1]
                ]
        if found:
            rank, what = found[0]
            raise NotSerial(
                f"{self._who}: step {step} is not that of plain PyTorch: on rank {rank} {what}".rstrip(),
                step=step,
            )
