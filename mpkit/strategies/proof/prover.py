"""The prover: step after step, it does in plain PyTorch what the ranks did, and compares.

    start        the weights, states and buffers from which the ranks started the step; in the first, the model's own
    gradients    loss and gradients of the whole batch, by `mpkit.strategies.reference.serial`
    update       the optimizer on the ranks' own gradients: rounding in a gradient cannot grow in it
    compare      the loss, each rank's gradients, weights and buffers, and the copies that ranks compute with

It runs in a thread of the caller's process, so in the world of the notebook, while the ranks train.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mpkit.errors import NotSerial
from mpkit.strategies.data.microbatch import Value, batch_size, leaves, map_tensors
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.counted import move_loss
from mpkit.strategies.models.heard_draws import CannotReplay
from mpkit.strategies.models.hooks import register
from mpkit.strategies.models.python_state import PythonState
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.causes import cause_of, cause_of_update
from mpkit.strategies.proof.compare import Difference, Noise, run_user_code, same
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.proof.rounding import coarsest, distance, few_of, largest
from mpkit.strategies.proof.whole_step import WholeStep, assemble_step, files_of
from mpkit.strategies.reference.serial import Serial
from mpkit.strategies.runtime.evidence import lost_of
from mpkit.strategies.stage.shard import put_together
from mpkit.strategies.stage.stage import PRECISIONS
from mpkit.strategies.update.optimizer import describe_optimizer
from mpkit.trace.proof import Proof

LEFT = 0.05  # the share of a GPU's memory that is left to the ranks, which may still grow


class Prover:
    """Verifies the steps of one run on copies of its model, loss and optimizer."""

    def __init__(self, job: TrainJob, folder: Path) -> None:
        self._job, self._folder = job, folder
        given = job.what.model, job.what.given_loss or job.what.loss, job.how.optimizer, job.how.lr_schedule
        model, loss, optimizer, schedule = pickle.loads(dumps(given))
        parameters = dict(model.named_parameters())
        register(job.what.parameter_hooks, parameters)
        function = describe_optimizer(optimizer)
        self._serial = Serial(
            model, loss, function.make_optimizer, lr_schedule=schedule, max_grad_norm=job.how.max_grad_norm,
            dtype=PRECISIONS.get(job.plan.precision),
        )  # fmt: skip
        self._state = PythonState(model, loss, self._serial.optimizer)
        self._last = job.how.first_step - 1 if job.how.resume is None else None
        # What the ranks' weights have to be before the next step.
        self._known = {name: weight.detach().clone() for name, weight in self._serial.weights.items()}
        self._chances: dict[int, float] = {}  # that blocks of samples drew the same by accident
        self._device = torch.device("cpu") if job.how.gpu is None else torch.device("cuda", job.how.gpu)
        self.proof = Proof(why_not=job.how.unverified)

    # ---- a step -------------------------------------------------------------------------------------------

    def ready(self, step: int) -> bool:
        """Return whether all ranks have finished a step, counted from 0."""
        pairs = zip(self._files(step), self._lost_files(step), strict=True)
        return all(written.exists() or lost.exists() for written, lost in pairs)

    def _files(self, step: int) -> list[Path]:
        return files_of(self._folder, self._job.plan.ranks, step)

    def _lost_files(self, step: int) -> list[Path]:
        return files_of(self._folder, self._job.plan.ranks, step, lost_of)

    def verify(self, step: int, loss: float | None) -> None:
        """Compare a step, counted from 0, that all ranks have finished; NotSerial if it is not that of serial training.

        `loss` is what the run reports for it; None: the sum of the ranks' shares.
        """
        if lost := [rank for rank, path in enumerate(self._lost_files(step)) if path.exists()]:
            raise CannotReplay(f"there was no space left for what rank {lost[0]} has of it")
        found = assemble_step(self._files(step), self._serial.weights)
        if loss is None:
            loss = self._loss_of(found)
        batch = None
        try:
            batch = self._start(step, found)
            with _on_device(self._device, self._serial):
                inputs, targets = (map_tensors(self._to_device, value) for value in batch)
                self._compare(step, loss, found, (inputs, targets))
        except (SharedDraws, Difference) as difference:
            if found.other_memory:  # which may be why, and which serial training cannot begin with
                raise CannotReplay(
                    f"{found.other_memory[0]} keeps something from step to step that is neither a buffer nor a number. "
                    'A buffer or a number would do; so would verify="all", which compares step after step. As it is, '
                    f"{difference.says if isinstance(difference, Difference) else difference}"
                ) from None
            if batch is not None and not self._reads_again(step, batch):
                raise CannotReplay("the data gives other samples each time that it is read") from None
            says = f"step {step + 1} is not that of serial training: {difference}".rstrip()
            raise NotSerial(says, step=step + 1) from None
        self._last, self._known = step, found.after

    def _loss_of(self, found: WholeStep) -> float:
        """Return the sum of the shares of the ranks with different samples or tokens; stages share theirs."""
        mesh = self._job.plan.mesh
        by_stage: dict[int, float] = {}
        for rank, loss in enumerate(found.of_ranks("loss")):
            place = mesh.place(rank)
            if loss is not None and rank == mesh.rank(*place) and place.tp == 0:
                by_stage[place.pp] = by_stage.get(place.pp, 0.0) + loss
        return next(iter(by_stage.values()))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _compare(self, step: int, loss: float, found: WholeStep, batch: tuple[Value, Value]) -> None:
        serial = self._serial
        # ---- gradients
        found.gradients = {n: g if g is None else self._to_device(g) for n, g in found.gradients.items()}
        drawn, decides = found.of_ranks("draws"), any(found.of_ranks("decides"))
        draws = StepDraws(self._job.plan, batch_size(batch[0]), drawn, decides, self._chances)
        draws.check_places(found.of_ranks("places"))
        attempt = Attempt(serial, batch, draws, found.of_ranks("scale")[0])
        tensors = [t for value in batch for t in leaves(value)]
        few = few_of(coarsest(serial.model, tensors), max(t.numel() for t in tensors))
        value, gradients = attempt.run(serial)
        while attempt.scale > 1 and not found.skipped and not _finite(gradients):
            attempt.scale /= 2  # what overflows at once does not in parts
            value, gradients = attempt.run(attempt.begin_again())
        self._chances = draws.chances
        # ---- compare loss and gradients
        noise = attempt.noise()
        allowed = few_of(value.dtype, 0) * largest(value)
        try:
            reported = torch.tensor(loss, dtype=torch.float64)
            same("the loss", reported, value, allowed, noise)
            if not found.skipped:
                compare_gradients(found, gradients, noise, few)
            elif _finite(gradients) and self._job.what.nominal is None and not attempt.overflows():
                raise Difference(
                    "the ranks left the update out, and no gradient of serial training overflows"
                )
        except Difference as error:
            error.cause = error.cause or cause_of(self._job, attempt, found.gradients, error.says)
            raise
        if not found.skipped:
            # ---- update
            with run_user_code("the update"):
                serial.update(step, found.gradients)
        # ---- compare weights and buffers
        weights = compare_weights(self._job, serial, found)
        words = compare_buffers(self._job, serial, found, attempt, noise, few)
        if found.skipped:
            words = f"step {step + 1} left its update out, since its gradients overflowed in fp16"
        off = abs(loss - float(value)) / max(abs(float(value)), torch.finfo(torch.float64).tiny)
        proof = self.proof
        self.proof = replace(
            proof, steps=(*proof.steps, step + 1), weights=max(proof.weights, weights),
            loss=max(proof.loss, off if off == off else 0.0), why_not=words or proof.why_not,
        )  # fmt: skip

    def _batch(self, step: int) -> tuple[Value, Value]:
        source = self._job.what.batches
        return source.part(step, slice(0, source.size(step)))

    def _reads_again(self, step: int, batch: tuple[Value, Value]) -> bool:
        """Return whether the data gives the same batch again."""
        first, again = ([t for value in each for t in leaves(value)] for each in (batch, self._batch(step)))
        pairs = zip(first, again, strict=True)
        return all(a.shape == b.shape and distance(a, b) == 0.0 for a, b in pairs)

    def _start(self, step: int, found: WholeStep) -> tuple[Value, Value]:
        """Begin the step where the ranks began it, and return its batch."""
        if any(found.of_ranks("other_draws")):
            raise CannotReplay(
                "the forward draws random numbers from Python's or NumPy's generators, which nobody hears; torch.rand "
                "draws those that are repeated here"
            )
        with run_user_code("the data"):
            batch = self._batch(step)
        serial = self._serial
        if found.missing:
            raise Difference(f"no rank updates some elements of {found.missing[0]}")
        changed = self._job.how.on_step is not None and self._last is not None  # perhaps, and on purpose
        for name, known in self._known.items() if self._last == step - 1 and not changed else ():
            same(f"{name} before the step", found.before[name], known, 0.0)
        parameters = dict(serial.model.named_parameters())
        pieces = [(rank, *each) for rank, of in enumerate(found.of_ranks("frozen")) for each in of]
        for name in dict.fromkeys(name for _, name, _ in pieces) if self._last != step - 1 else ():
            of_all = [piece for _, other, piece in pieces if other == name]
            parameters[name].data.copy_(put_together(of_all))
        for rank, name, frozen in pieces:
            own = frozen.take(parameters[name].detach())
            same(f"{name}, which is frozen, on rank {rank}", frozen.tensor, own, 0.0)
        with torch.no_grad():
            for name, weight in serial.weights.items():
                weight.copy_(found.before[name])
            if self._last != step - 1:
                for held in reversed(found.of_ranks("buffers_before")):  # the first replica's, at last
                    for name, buffer in held.items():
                        _set_buffer(serial.model, name, buffer)
                serial.optimizer.state.clear()
                for name, states in (found.states or {}).items():
                    serial.optimizer.state[serial.weights[name]] = dict(states)
                found.other_memory += self._state.restore(found.remembered)
        serial.refresh()
        for rank, name in found.other_replicas(after=False):
            raise Difference(f"rank {rank} begins the step with another {name} than the one that was updated")
        return batch


# ---- what the ranks have


def compare_gradients(
    found: WholeStep, gradients: dict[str, Tensor | None], noise: Noise, few: float
) -> None:
    """Compare each rank's gradients with those of the whole batch; `few` is that of `few_of`."""
    doubt: CannotReplay | None = None
    for rank, name, piece, _, got in found.held:
        wanted = gradients[name]
        if wanted is None or got is None:
            one = got if wanted is None else wanted
            if one is not None and largest(one) > 0.0:
                which = "the ranks have" if wanted is None else "serial training has"
                raise Difference(f"only {which} a gradient of {name}, of up to {largest(one):.3g}")
            continue
        what = f"the gradient of {name} on rank {rank}"
        allowed = few * largest(wanted)
        try:
            same(what, got, piece.take(wanted), allowed, noise, name)
        except CannotReplay as error:  # another gradient may differ by more than repetitions do
            if not noise.repeats_differ:
                raise
            doubt = doubt or error
    if doubt is not None:
        raise doubt


def compare_weights(job: TrainJob, serial: Serial, found: WholeStep) -> float:
    """Compare the updated weights; return the largest difference, relative to the largest weight of its tensor."""
    most = 0.0
    for rank, name, piece, after, _ in found.held:
        weight = serial.weights[name]
        wanted = piece.take(weight.detach())
        if not wanted.numel():
            continue
        scale = largest(weight)
        by = distance(after.to(wanted.device), wanted)
        few = few_of(weight.dtype, 0) * scale
        try:
            same(f"{name} on rank {rank} after the update", after, wanted, few)
        except Difference as difference:
            difference.cause = cause_of_update(job, name)
            raise
        most = max(most, by / scale if scale else 0.0)
    for rank, name in found.other_replicas(after=True):
        raise Difference(f"rank {rank} goes on with another {name} than the one that was updated")
    return most


def compare_buffers(
    job: TrainJob, serial: Serial, found: WholeStep, attempt: Attempt, noise: Noise, few: float
) -> str:
    """Compare buffers; return words about one that is not that of the whole batch, but of the plan's parts."""
    wanted = dict(serial.model.named_buffers())
    plan, words, after = job.plan, "", dict[str, Tensor]()
    in_parts = cache(attempt.buffers_in_parts)
    for rank, held in enumerate(found.of_ranks("buffers")):
        for name, got in held.items():
            if name not in wanted or got.shape != wanted[name].shape:
                continue
            what = f"the buffer {name} on rank {rank}"
            allowed = few * largest(wanted[name]) if got.is_floating_point() or got.is_complex() else 0.0
            try:
                same(what, got, wanted[name], allowed, noise, f"buffer {name}")
            except Difference:
                if plan.dp * plan.microbatches == 1:
                    raise
                part = in_parts(plan.mesh.place(rank).dp)[name]
                same(what, got, part, allowed, noise, f"buffer {name}")
                if plan.mesh.place(rank).dp == 0:  # all replicas go on with the first one's
                    after[name] = got
                words = f"the buffer {name} is that of the parts of the batch, one after another"
    for name, value in after.items():
        wanted[name].copy_(value)
    return words


# ---- helpers


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer a value, and perhaps another shape, since buffers may grow."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    buffer = owner._buffers.get(last)
    if buffer is not None and buffer.shape == value.shape:
        buffer.copy_(value)
    elif last in owner._buffers:
        owner._buffers[last] = value.clone()


def _finite(gradients: dict[str, Tensor | None]) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients.values())


# ---- beside the ranks: on the GPU of the last one, with the kernels that the ranks use


@contextmanager
def _on_device(device: torch.device, serial: Serial) -> Iterator[None]:
    """Have a serial training on a device inside the block; afterwards it is in this process's memory.

    It takes what is free on the ranks' GPU, less what they may still need, or raises an OutOfMemoryError.
    """
    if device.type == "cpu":
        yield
        return
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    ours = torch.cuda.memory_reserved(device) + free
    torch.cuda.set_per_process_memory_fraction(max(0.0, ours / total - LEFT), device)
    try:
        _move(serial, device)
        yield
    finally:
        _move(serial, torch.device("cpu"))
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(before, device)


def _move(serial: Serial, device: torch.device) -> None:
    serial.model.to(device).zero_grad()
    move_loss(serial.loss, device)
    for weight in serial.weights.values():
        weight.data, weight.grad = weight.data.to(device), None
    steps = any(group.get("fused") or group.get("capturable") for group in serial.optimizer.param_groups)
    for state in serial.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dim() or steps):
                state[key] = value.to(device)
