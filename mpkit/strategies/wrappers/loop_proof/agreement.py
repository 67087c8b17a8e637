"""Agreement: the ranks tell each other what they have and what they found, by torch.distributed alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.errors import NotSerial
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.runtime.evidence import digest_of

__all__ = ["Agreement"]

REPLICAS = (
    "The ranks' optimizers or hooks have made different updates, or a random number that is not the same on each rank "
    "decides something."
)


class Agreement:
    """What the ranks have to agree on.

    Args:
        wrapper: the wrapper's call, for messages: "mk.ddp".
        comm: the ranks.

    Attributes:
        first: the first rank.
        size: the number of ranks.
        findings: what this rank found that is not as in plain PyTorch.
        digests: of what has to be the same on all ranks, by name, in order.
        training: the mode of the first forward of a step.
        drew: the digest of the state from which this rank drew random numbers for samples of its own.
        notes: what is said besides.
    """

    def __init__(self, wrapper: str, comm: Communicator) -> None:
        self._wrapper, self._comm = wrapper, comm
        self.first, self.size = comm.ranks[0], comm.size
        self.notes: dict[str, None] = {}
        self.findings: list[str] = []
        self.new_step()

    def new_step(self) -> None:
        """Forget the step before."""
        self.digests: list[dict[str, str]] = []
        self.training: bool | None = None
        self.drew = ""

    def note_mode(self, module: nn.Module) -> None:
        """Note the mode of the first forward of a step."""
        self.training = module.training if self.training is None else self.training

    # ---- collectives

    def all(self, mine: Any) -> list[Any]:
        """Return what each rank has."""
        every: list[Any] = [mine] * self._comm.size
        if self._comm.size > 1:
            dist.all_gather_object(every, mine, self._comm.handle)
        return every

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        if self._comm.size > 1:
            values = values.clone()
            dist.all_reduce(
                torch.view_as_real(values) if values.is_complex() else values, group=self._comm.handle
            )
            values /= self._comm.size
        return values

    def most(self, values: Tensor) -> Tensor:
        """Return the largest values of all ranks."""
        if self._comm.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._comm.handle)
        return values

    def any(self, mine: bool, device: torch.device) -> bool:
        """Return whether it is so on any rank."""
        return bool(self.most(torch.tensor([float(mine)], device=device)).item())

    # ---- before the wrap

    def same_model(self, module: nn.Module) -> None:
        """Check that the ranks' models are one, and take the first rank's weights into this one.

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
        for rank, other in zip(self._comm.ranks, self.all(kinds), strict=True):
            for name in (*kinds, *other):
                here, there = kinds.get(name, "missing"), other.get(name, "missing")
                if here != there:
                    raise ValueError(
                        f"{self._wrapper}: the ranks have different models: {name} is {there} on rank {rank}, "
                        f"and {here} on rank {self._comm.rank}. Build the same model, in the same mode, on every rank; "
                        "only its weights become the first rank's"
                    )
        digests = self.all({name: digest_of(tensor) for name, tensor in named})
        differ = next((name for name, _ in named if len({each[name] for each in digests}) > 1), None)
        if differ is not None:
            self.notes[
                f"before the wrap the ranks' weights differed ({differ}); rank {self.first}'s count"
            ] = None
            with torch.no_grad():
                for _, tensor in named:
                    dist.broadcast(tensor, self.first, self._comm.handle)

    # ---- a step

    def why_not(self, mine: str) -> str:
        """Return why the first rank that says so cannot compare the step; "" if all can."""
        return next(filter(None, self.all(mine)), "")

    def agree(self, step: int) -> None:
        """Tell the other ranks what this one found.

        Raises:
            NotSerial: on all ranks: the first finding of any.
        """
        mine = (self.findings, self.digests, self.training, self.drew)
        every = list(zip(self._comm.ranks, self.all(mine), strict=True))
        first = every[0][1]
        found = [(rank, what) for rank, (findings, *_) in every for what in findings]
        for rank, (_, digests, training, _) in every:
            if training != first[2]:
                words = {True: "training", False: "evaluation", None: "no"}
                found.append(
                    (rank, f"the model is in {words[training]} mode, and not as on rank {self.first}.")
                )
            for one, other in zip(digests, first[1], strict=False):
                differ = [name for name in one if name in other and one[name] != other[name]]
                found += [
                    (rank, f"{name} is not that of rank {self.first}. {REPLICAS}") for name in differ[:1]
                ]
        drew = [state for _, (*_, state) in every if state]
        if len(set(drew)) < len(drew):
            self.notes["ranks draw the same random numbers for different samples: seed them by rank"] = None
        if found:
            rank, what = found[0]
            raise NotSerial(
                f"{self._wrapper}: step {step} is not that of plain PyTorch: on rank {rank} {what}".rstrip(),
                step=step,
            )
