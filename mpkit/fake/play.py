"""One rank of many, played alone on tensors without content: what a rank of `trace_fake` does.

Phases:

    build     the model and its batches, under torch's FakeTensorMode: shapes and no memory
    join      leave the real process group, and join a fake one of as many ranks as the plan takes
    count     every operator moves the rank's clock by what it would take on the device (`mpkit.record.counted`)
    train     the strategy's own code, the same that real ranks run; communication takes no time here, the replay puts
              it on the clock

In the fake group (torch.testing._internal.distributed.fake_pg) every call returns at once and changes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private; a test guards both
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from mpkit.devices import Device
from mpkit.fake.kinds import kinds, order
from mpkit.launch.context import Context
from mpkit.parallel.comm import Comm, Group
from mpkit.parallel.microbatch import Value
from mpkit.parallel.train import train
from mpkit.plan import Plan
from mpkit.prepare import TrainJob, prepare
from mpkit.record.counted import CountedRecorder, Counting
from mpkit.trace import RankTrace
from mpkit.trace.files import read_rank

__all__ = ["Played", "Script", "play"]


@dataclass(frozen=True)
class Script:
    """What there is to play.

    Attributes:
        model_fn: makes the model.
        batch: (inputs, targets), of which only the shapes matter; or what makes them.
        plan, loss, optimizer, steps, max_grad_norm: as in `Cluster.train`.
        device: whose time it is.
        rank: which rank to play; None: one of each kind.
    """

    model_fn: Callable[[], nn.Module]
    batch: Any
    plan: Plan
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    max_grad_norm: float | None
    device: Device
    rank: int | None


@dataclass
class Played:
    """What came of it.

    Attributes:
        ranks: what was recorded, by the rank that was played.
        stands_for: by rank, which of the played ones does the same.
        meta: for the Trace.
        error: why it could not be played: the user's mistake, in words.
    """

    ranks: dict[int, RankTrace] = field(default_factory=dict)
    stands_for: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def play(context: Context, script: Script) -> Played | None:
    """Play the ranks that the script asks for, one after the other; what `trace_fake` runs on a rank of its own."""
    if context.rank:
        return None  # of a cluster with more ranks, one is enough
    played, said = Played(), Said()
    try:
        mode = _without_content()
        with mode:
            # ---- build
            job = _job(script, mode)
        played.meta = job.meta
        even = len(job.local) == 1
        played.stands_for = kinds(script.plan, job.meta["batch_size"], script.rank, even=even)
        for rank in order(played.stands_for, script.plan):
            # ---- join
            dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=script.plan.ranks)
            recorded = _play_one(rank, script, job, mode, said)
            if rank in played.stands_for:
                played.ranks[rank] = recorded
    except ValueError as error:
        played.error = str(error)
    return played


Said = dict[tuple[str, int], Tensor]
"""What first ranks broadcast, as far as it was numbers and not tensors without content; by group and number there."""


class FakeComm(Comm):
    """Communication with ranks that are not there: but what a root said, if it was played before, is heard.

    Args:
        rank: the one that is played.
        world_size: of the fake process group.
        recorder: on the clock that counts.
        counting: that clock.
        said: filled by the roots.
    """

    def __init__(
        self, rank: int, world_size: int, recorder: CountedRecorder, counting: Counting, said: Said
    ) -> None:
        super().__init__(rank, world_size, recorder, torch.device("cpu"), "fake")
        self._counting, self._said = counting, said

    def device_mesh(self, device: torch.device, shape: Mapping[str, int]) -> None:
        """None: groups need no one to talk to."""

    def broadcast(self, tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
        """As a Comm's."""
        asked = group or self.world
        call = asked.name, asked.issued
        whole = super().broadcast(tensor, src, group)
        numbers = self._counting.numbers(whole)
        if self.rank == src and numbers is not None:
            self._said[call] = numbers
        elif self.rank != src and call in self._said:
            self._counting.tell(whole, self._said[call])
        return whole


def _play_one(rank: int, script: Script, job: TrainJob, mode: FakeTensorMode, said: Said) -> RankTrace:
    plan, device = script.plan, torch.device("cpu")
    counting = Counting(script.device)
    with tempfile.TemporaryDirectory(prefix="mpkit-fake-") as folder:
        recorder = CountedRecorder(Path(folder), rank, counting)
        with mode:
            # A model for each rank: strategies change it, and checks have left references to the first one, which
            # torch does not let move then.
            job = replace(job, model=script.model_fn())
            comm = FakeComm(rank, plan.ranks, recorder, counting, said)
            # ---- count, train
            with counting:
                train(Context(rank, plan.ranks, device, comm, recorder), job)
        recorder.close("finished")
        return read_rank(Path(folder), rank)


def _without_content() -> FakeTensorMode:
    """A mode in which tensors have no content.

    torch's own keeps a weak reference to each one that it makes, and then does not let their module be moved or cast.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


def _job(script: Script, mode: FakeTensorMode) -> TrainJob:
    """A training on tensors without content, checked and cut as a real one."""
    return prepare(
        script.model_fn(),
        [_batch_of(script, mode)],
        script.plan,
        loss=script.loss,
        optimizer=script.optimizer,
        steps=script.steps,
        ranks=script.plan.ranks,
        max_grad_norm=script.max_grad_norm,
    )


def _batch_of(script: Script, mode: FakeTensorMode) -> tuple[Value, Value]:
    """The batch without its content; called under the fake mode."""
    pair = script.batch() if callable(script.batch) else script.batch
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        kind = type(pair).__name__
        raise ValueError(
            f"batch is {kind}{f' of {len(pair)}' if isinstance(pair, tuple | list) else ''}: a pair (inputs, targets) "
            "of tensors is wanted, of which only the shapes matter, such as (torch.empty(8, 4, device='meta'), "
            "torch.empty(8, 2, device='meta')), or a function that makes one"
        )
    inputs, targets = (tree_map_only(Tensor, lambda tensor: _faked(tensor, mode), value) for value in pair)
    return inputs, targets


def _faked(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    return mode.from_tensor(tensor) if not tensor.is_meta else torch.empty(tensor.shape, dtype=tensor.dtype)
