"""Evidence: what a rank holds of a verified step, in files that the caller's process compares.

    begin       before the step: digests of the weights that the rank computes with, and the elements that it updates;
                if the step before was not verified, also their optimizer states, and what model and loss remember;
                from here on, what forwards draw at random is heard
    gradients   as the optimizer will see them, before they are clipped; in any step, which parameters have one for
                the first time (`FirstTimes`)
    end         after the step: the elements that it updates, digests as above, and the buffers; the file is complete

Nothing is sent: each rank writes what it has, and `mpkit.strategies.proof` reads the files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.common.disk import FULL, write_whole
from mpkit.common.launch_folder import APART, LAUNCHED, part, read_difference
from mpkit.errors import NotSerial
from mpkit.strategies.checkpoint.parts import save_new
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws
from mpkit.strategies.models.python_state import PythonState
from mpkit.strategies.models.step_facts import FIRST_TIMES, FirstTimes, StepFacts
from mpkit.strategies.runtime.rank_state import buffers
from mpkit.strategies.stage.gradient_sync import Piece, named_parameters
from mpkit.strategies.stage.shard import HeldPart

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context
    from mpkit.strategies.runtime.train import Training


LOOK_EVERY = 0.005
"""Seconds between two looks for the verdict that a checkpoint waits for."""


def evidence_of(step: int) -> str:
    """Return the name of a rank's file for a step, counted from 0."""
    return f"proof-{step}"


def lost_of(step: int) -> str:
    """Return the name of a rank's empty file for a step that had no space for its evidence."""
    return f"proof-{step}.lost"


def verdict_of(step: int) -> str:
    """Return the name of the file that says that a step equals serial training, or why that is not known."""
    return f"verdict-{step}"


class RankEvidence:
    """One rank's evidence.

    Ranks that a launcher started cannot be ended from outside, so they look for a difference themselves, and wait at
    the end until all steps are compared. Ranks without a common folder (on several machines) send their files to the
    first one, whose process compares them; where all ranks wait, it tells the others the result.
    """

    def __init__(self, context: Context, job: TrainJob, training: Training) -> None:
        self._folder, self._rank = context.record.folder, context.rank
        launched = self._folder / LAUNCHED
        self._launched = launched.read_text() if launched.exists() else ""
        self._training, self._steps = training, job.how.verified
        self._comm, self._apart = context.comm, self._launched == APART
        self._now: dict[str, Any] | None = None
        self._heard = ForwardDraws()
        self._last: int | None = None  # the latest step that was verified
        self._step = 0
        self._used: list[str] = []
        if self._steps:
            path, modules = part(self._folder, self._rank, FIRST_TIMES), dict(job.what.model.named_modules())
            loss, optimizer = job.what.given_loss or job.what.loss, training.update.optimizer
            self._remembered = PythonState(job.what.model, loss, optimizer)
            self._first_times, self._facts = FirstTimes(path, modules), StepFacts()
            training.pipeline.watch(self._facts)
            if optimizer is not None and not type(optimizer).__module__.startswith("torch.optim."):
                self._listen_to(optimizer)

    def _listen_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the user's own optimizer computes."""
        around: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            around.append(self._facts.of_optimizer())
            around[-1].__enter__()

        def leave(*_: Any) -> None:
            around.pop().__exit__(None, None, None)

        optimizer.register_step_pre_hook(enter)
        optimizer.register_step_post_hook(leave)

    def begin(self, step: int) -> None:
        """Note what a verified step starts from."""
        self._step = step
        if self._launched and not self._apart:
            self._raise_difference()
        if self._steps:
            self._facts.begin_step(compared=step in self._steps)
        if step not in self._steps:
            return
        anew = self._last != step - 1
        states = anew and self._training.update.optimizer is not None
        pieces = [self._elements(piece, states=states) for piece in self._training.sync.pieces]
        held = {name: tensor.clone() for name, tensor in self._buffers().items()}
        self._heard = ForwardDraws()
        fixed = self._training.sync.frozen if states else ()
        frozen = [(self._name(piece.name), piece.part(_on_host(piece.held))) for piece in fixed]
        self._now = {
            "pieces": pieces, "frozen": frozen, "before": self._digests(), "buffers_before": held,
            "gradients": {}, "remembered": self._remembered.find_changes() if anew else ({}, []),
        }  # fmt: skip
        self._training.pipeline.listen(self._heard)

    def gradients(self, gradients: Mapping[Piece, Tensor]) -> None:
        """Note the gradients of the whole batch, before they are clipped."""
        if self._steps:
            self._used = [self._name(piece.name) for piece in gradients]
        if self._now is not None:
            self._now["gradients"] = {self._name(p.name): _on_host(g) for p, g in gradients.items()}

    def end(self, step: int, scale: float, *, skipped: bool) -> None:
        """Note what the step led to, and write the file."""
        if self._steps:
            trained = (self._name(piece.name) for piece in self._training.sync.pieces)
            compared = self._now is not None
            self._first_times.note(step, self._used, trained, self._facts.collect(), compared=compared)
        if self._now is None:
            return
        self._facts.may_act_later = self._facts.may_act_later or self._remembered.find_changes() != ({}, [])
        self._training.pipeline.listen(None)
        heard, master_of = self._heard, self._training.update.masters.master_of
        self._now |= {
            "after": [_on_host(master_of(piece)) for piece in self._training.sync.pieces],
            "digests": self._digests(), "buffers": self._buffers(),
            "draws": heard.draws, "other_draws": heard.others.drawn, "places": heard.others.places,
            "decides": heard.decides, "loss": self._training.loss, "scale": scale, "skipped": skipped,
        }  # fmt: skip
        try:
            self._write(part(self._folder, self._rank, evidence_of(step)))
        except OSError as error:
            if error.errno not in FULL:
                raise
            part(self._folder, self._rank, lost_of(step)).touch()
        self._now, self._last = None, step
        if self._apart:
            self._send(evidence_of(step), lost_of(step))

    def _write(self, path: Path) -> None:
        """Write a step's file, completely or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        try:
            save_new(partial, self._now)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)

    def wait(self, step: int) -> None:
        """Wait for the verdict on each verified step up to this one; a difference ends all ranks, which all call it."""
        if self._apart:
            self._wait_for_first(step)
        else:
            self._wait_here(step)

    def _wait_here(self, step: int) -> None:
        for verified in self._steps:
            if verified <= step:
                while not (self._folder / verdict_of(verified)).exists():
                    self._raise_difference()
                    time.sleep(LOOK_EVERY)

    def finish(self) -> None:
        """End the evidence; called after the last step."""
        if self._launched:
            if self._apart:
                self._send(FIRST_TIMES)
            self.wait(self._step)
            if not self._apart:
                self._raise_difference()

    # ---- without a folder in common

    def _send(self, *names: str) -> None:
        """Send files of this rank to the first one, which writes them beside its own; every rank calls it."""
        if not self._steps:
            return
        paths = {name: part(self._folder, self._rank, name) for name in names}
        mine = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
        if self._comm.index:  # before they are sent, since the first rank may write into this folder
            for name in mine:
                paths[name].unlink()
        every: list[Any] | None = [None] * self._comm.size if self._comm.index == 0 else None
        dist.gather_object(mine, every, dst=self._comm.ranks[0], group=self._comm.handle)
        for rank, files in zip(self._comm.ranks, every or (), strict=False):
            for name, content in files.items() if rank != self._rank else ():
                write_whole(part(self._folder, rank, name), content)

    def _wait_for_first(self, step: int) -> None:
        """Wait for the verdicts of the first rank's process, and raise its error on all ranks."""
        found: list[Any] = [None]
        if self._comm.index == 0:
            try:
                self._wait_here(step)
                self._raise_difference()
            except NotSerial as difference:
                found = [(str(difference), difference.step)]
        dist.broadcast_object_list(found, src=self._comm.ranks[0], group=self._comm.handle)
        if found[0] is not None:
            message, number = found[0]
            raise NotSerial(message, step=number)

    def _raise_difference(self) -> None:
        difference = read_difference(self._folder)
        if difference is not None:
            raise difference

    def _name(self, name: str) -> str:
        return self._training.first_names[name]

    def _elements(self, piece: Piece, *, states: bool) -> tuple[str, HeldPart, dict[str, Any] | None]:
        """Return a piece's parameter, its elements, and their states in the optimizer, if wanted."""
        master, optimizer = self._training.update.masters.master_of(piece), self._training.update.optimizer
        values: dict[str, Any] | None = None
        if states and optimizer is not None:
            kept = optimizer.state.get(master, {})
            values = {key: _on_host(v) if isinstance(v, Tensor) else v for key, v in kept.items()}
        return self._name(piece.name), piece.part(_on_host(master)), values

    def _buffers(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in buffers(self._training)}

    def _digests(self) -> dict[str, tuple[Any, str, str]]:
        """Return the shard, dtype and digest of each parameter, by name, unless ZeRO has freed it."""
        shards = next(iter(self._training.sync.stages.values())).sharded.shards
        return {
            self._name(name): (shards.get(name), str(parameter.dtype), digest_of(parameter))
            for name, parameter in named_parameters(self._training.sync.stages).items()
            if parameter.untyped_storage().nbytes()
        }


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's elements.

    >>> digest_of(torch.zeros(2, 2)) == digest_of(torch.zeros(4)) != digest_of(torch.ones(4))
    True
    """
    held: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(held, digest_size=16).hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
