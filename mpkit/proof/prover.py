"""The prover: a step after another, it does in plain PyTorch what the ranks did, and compares.

    start        the weights, states and buffers that the ranks started the step from; in the first step the model's own
    gradients    loss and gradients of the whole batch, by `mpkit.reference.serial`
    update       the optimizer on the ranks' own gradients: rounding in a gradient cannot grow in it
    compare      the loss, each rank's gradients, weights and buffers, and the copies that ranks compute with

It runs in a thread of the caller's process, so in the world of the notebook, while the ranks train.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mpkit.data.microbatch import Value, batch_size, leaves
from mpkit.errors import NotSerial
from mpkit.launch.packing.packing import dumps
from mpkit.models.hooks import register
from mpkit.parallel.job.feed import Source
from mpkit.parallel.job.job import TrainJob
from mpkit.parallel.runtime.evidence import lost_of
from mpkit.parallel.stage.stage import PRECISIONS
from mpkit.parallel.update.optimizer import described
from mpkit.proof.assembled import Assembled, assembled, files_of
from mpkit.proof.attempt import Attempt, Noise, copy_of
from mpkit.proof.causes import cause_of, cause_of_update
from mpkit.proof.draws import CannotReplay, SharedDraws, StepDraws
from mpkit.proof.rounding import FEW, coarsest, distance, largest
from mpkit.reference.serial import Serial
from mpkit.trace.proof import Proof

__all__ = ["Prover"]


@dataclass
class Difference(Exception):
    """Something differs: what, by how much, and the two values."""

    what: str
    got: float
    wanted: float
    by: float
    cause: str = ""


class Prover:
    """Verifies the steps of one run.

    Args:
        job: the training; its model, loss and optimizer are copied, and stay as they are.
        folder: the folder of the launch.
    """

    def __init__(self, job: TrainJob, folder: Path) -> None:
        self._job, self._folder = job, folder
        given = job.what.model, job.what.given_loss or job.what.loss, job.how.optimizer, job.how.lr_schedule
        model, loss, optimizer, schedule = pickle.loads(dumps(given))
        parameters = dict(model.named_parameters())
        register(job.what.parameter_hooks, parameters)
        function = described(optimizer)
        self._serial = Serial(
            model, loss, function.of, lr_schedule=schedule, max_grad_norm=job.how.max_grad_norm,
            dtype=PRECISIONS.get(job.plan.precision),
        )  # fmt: skip
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._last = job.how.first_step - 1 if job.how.resume is None else None
        # What the ranks' weights have to be before the next step.
        self._known = {name: weight.detach().clone() for name, weight in self._serial.weights.items()}
        self.proof = Proof(why_not=job.how.unverified)

    # ---- a step -------------------------------------------------------------------------------------------

    def ready(self, step: int) -> bool:
        """Return whether all ranks have finished a step, counted from 0."""
        return all(a.exists() or b.exists() for a, b in zip(self._files(step), self._lost(step), strict=True))

    def _files(self, step: int) -> list[Path]:
        return files_of(self._folder, self._job.plan.ranks, step)

    def _lost(self, step: int) -> list[Path]:
        return files_of(self._folder, self._job.plan.ranks, step, lost_of)

    def verify(self, step: int, loss: float) -> None:
        """Compare a step that all ranks have finished.

        Args:
            step: the step, counted from 0.
            loss: the loss that the run reports for it.

        Raises:
            NotSerial: the step is not that of serial training.
        """
        if lost := [rank for rank, path in enumerate(self._lost(step)) if path.exists()]:
            raise CannotReplay(f"there was no space left for what rank {lost[0]} has of it")
        try:
            found = assembled(self._files(step), self._shapes, self._serial.weights)
            self._compare(step, loss, found)
        except SharedDraws as error:
            raise NotSerial(
                f"step {step + 1} is not that of serial training: {error}.", step=step + 1
            ) from None
        except Difference as difference:
            raise self._explained(step, difference) from None
        self._last, self._known = step, found.after

    def _compare(self, step: int, loss: float, found: Assembled) -> None:
        if found.other_draws:
            raise CannotReplay(
                "the forward draws random numbers from Python's or NumPy's generators, which nobody hears; torch.rand "
                "draws those that are repeated here"
            )
        serial, batch = self._serial, self._batch(step)
        # ---- start
        self._start(step, found)
        # ---- gradients
        draws = StepDraws(self._job.plan, batch_size(batch[0]), found.draws)
        attempt = Attempt(serial, copy_of(serial.model), batch, draws, found.scale)
        eps = torch.finfo(coarsest(serial.model, [t for value in batch for t in leaves(value)])).eps
        value, gradients = attempt.run(serial)
        while attempt.scale > 1 and not found.skipped and not _finite(gradients):
            attempt.scale /= 2  # what overflows at once does not in parts
            value, gradients = attempt.run(attempt.again())
        # ---- compare loss and gradients
        noise = Noise(attempt)
        few = FEW * torch.finfo(value.dtype).eps * largest(value)
        try:
            self._same("the loss", torch.tensor(loss, dtype=torch.float64), value, few, lambda: noise.of(""))
            if not found.skipped:
                self._compare_gradients(found, gradients, noise, eps)
        except Difference as difference:
            difference.cause = cause_of(self._job, attempt, found.gradients)
            raise
        if not found.skipped:
            # ---- update
            serial.update(step, found.gradients)
        # ---- compare weights and buffers
        weights = self._compare_weights(found)
        parted = self._compare_buffers(found, attempt, noise, eps)
        off = abs(loss - float(value)) / max(abs(float(value)), torch.finfo(torch.float64).tiny)
        proof = self.proof
        self.proof = replace(
            proof, steps=(*proof.steps, step + 1), weights=max(proof.weights, weights),
            loss=max(proof.loss, off if off == off else 0.0), why_not=parted or proof.why_not,
        )  # fmt: skip

    def _batch(self, step: int) -> tuple[Value, Value]:
        source = cast(Source, self._job.what.batches)
        return source.part(step, slice(0, source.size(step)))

    def _start(self, step: int, found: Assembled) -> None:
        serial = self._serial
        if found.missing:
            raise Difference(f"{found.missing[0]}, of which no rank updates some elements", 0.0, 0.0, 0.0)
        for name, known in self._known.items() if self._last == step - 1 else ():
            self._same(f"{name} before the step", found.before[name], known, 0.0)
        parameters = dict(serial.model.named_parameters())
        for where, frozen in found.frozen:
            with torch.no_grad():
                if self._last != step - 1:
                    where.put(frozen, parameters[where.name])
            own = where.take(parameters[where.name].detach(), frozen.numel())
            self._same(f"{where.name}, which is frozen, on rank {where.rank}", frozen, own, 0.0)
        with torch.no_grad():
            for name, weight in serial.weights.items():
                weight.copy_(found.before[name])
            if self._last != step - 1:
                for name, buffer in serial.model.named_buffers():
                    for held in found.buffers_before:
                        if name in held:
                            buffer.copy_(held[name])
                serial.optimizer.state.clear()
                for name, states in (found.states or {}).items():
                    serial.optimizer.state[serial.weights[name]] = dict(states)
        serial.refresh()
        for rank, name in found.other_replicas(after=False):
            raise Difference(f"{name} on rank {rank}, which is not the one that was updated,", 0.0, 0.0, 0.0)

    def _compare_gradients(
        self, found: Assembled, gradients: dict[str, Tensor | None], noise: Noise, eps: float
    ) -> None:
        for where, got, _ in found.held:
            wanted = gradients[where.name]
            count = found.before[where.name].numel() if got is None else got.numel()
            if wanted is None or got is None:
                one = got if wanted is None else wanted
                if one is not None and largest(one) > 0.0:
                    which = "the ranks" if wanted is None else "serial training"
                    raise Difference(
                        f"the gradient of {where.name}, which only {which} has,", 0.0, 0.0, largest(one)
                    )
                continue
            what = f"the gradient of {where.name} on rank {where.rank}"
            few = FEW * eps * largest(wanted)
            self._same(what, got, where.take(wanted, count), few, partial(noise.of, where.name))

    def _compare_weights(self, found: Assembled) -> float:
        most = 0.0
        for where, _, after in found.held:
            weight = self._serial.weights[where.name]
            wanted = where.take(weight.detach(), after.numel())
            if not wanted.numel():
                continue
            scale = largest(weight)
            by = distance(after, wanted)
            few = FEW * torch.finfo(weight.dtype).eps * scale
            try:
                self._same(f"{where.name} on rank {where.rank} after the update", after, wanted, few)
            except Difference as difference:
                difference.cause = cause_of_update(self._job, where.name)
                raise
            most = max(most, by / scale if scale else 0.0)
        for rank, name in found.other_replicas(after=True):
            raise Difference(f"{name} on rank {rank}, which is not the one that was updated,", 0.0, 0.0, 0.0)
        return most

    def _compare_buffers(self, found: Assembled, attempt: Attempt, noise: Noise, eps: float) -> str:
        """Compare buffers; return words about one that is not that of the whole batch, but of the parts of the plan."""
        wanted = dict(self._serial.model.named_buffers())
        plan, words, after = self._job.plan, "", dict[str, Tensor]()
        in_parts = cache(attempt.buffers_in_parts)
        for rank, held in enumerate(found.buffers):
            for name, got in held.items():
                if name not in wanted or got.shape != wanted[name].shape:
                    continue
                what, more = f"the buffer {name} on rank {rank}", partial(noise.of, f"buffer {name}")
                allowed = FEW * eps * largest(wanted[name]) if got.is_floating_point() else 0.0
                try:
                    self._same(what, got, wanted[name], allowed, more)
                except Difference:
                    if plan.dp * plan.microbatches == 1:
                        raise
                    part = in_parts(plan.mesh.place(rank).dp)[name]
                    self._same(what, got, part, allowed, more)
                    if plan.mesh.place(rank).dp == 0:  # all replicas go on with the first one's
                        after[name] = got
                    words = f"the buffer {name} is that of the parts of the batch, one after another"
        for name, value in after.items():
            wanted[name].copy_(value)
        return words

    def _same(
        self, what: str, got: Tensor, wanted: Tensor, few: float, more: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Compare two tensors.

        Args:
            what: what they are.
            got, wanted: the ranks' and the serial one.
            few: a difference without further questions.
            more: returns what may be added to it.
        """
        by = distance(got, wanted)
        if by <= few or by <= few + more():
            return
        a, b = got.detach().reshape(-1).double(), wanted.detach().reshape(-1).double()
        at = int(torch.nan_to_num((a - b).abs(), nan=float("inf")).argmax())
        raise Difference(what, float(a[at]), float(b[at]), by)

    def _explained(self, step: int, difference: Difference) -> NotSerial:
        values = f"is {difference.got:.6g} and not {difference.wanted:.6g}"
        return NotSerial(
            f"step {step + 1} is not that of serial training: {difference.what} {values}. {difference.cause}".rstrip(),
            step=step + 1,
        )


def _finite(gradients: dict[str, Tensor | None]) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients.values())
