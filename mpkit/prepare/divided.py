"""Does a model that is divided over a tensor-parallel group compute what it computes whole?

A TensorPlan says which layers are divided, and the model's forward says nothing of what it does between them: a slice
of a fused projection, a residual added inside of a region or heads counted by another attribute would give other
numbers, and no error. So the first samples go through the model whole, and once through its shards, each in a thread of
its own that stands for a rank; loss and gradients must be the same.

    copies    in float64, with some noise on each weight, so that nothing is hidden behind zeros; without dropout
    threads   t of them, whose collectives meet at a barrier
    compare   the loss; gradients of shards put together, partial sums summed, all others alike on each rank
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.parallel.axis import Arrived
from mpkit.parallel.microbatch import Value, map_tensors, part
from mpkit.parallel.shard import Sharded, put_together
from mpkit.parallel.stage import call
from mpkit.parallel.tensor import shard_model
from mpkit.plan import Plan
from mpkit.prepare.arguments import one_line

__all__ = ["check_divided"]

Loss = Callable[[Any, Any], Any]
Gradients = dict[str, Tensor | None]

LARGEST = 50_000_000
"""Elements of a model that is examined: what its copies take in float64, and compute in a moment."""
PATIENCE = 60.0
"""Seconds after which a thread that waits for the others gives up: they went another way."""
CLOSE = 1e-3
"""The relative error of a gradient that may be rounding: some models compute parts in float32."""


def check_divided(model: nn.Module, batch: tuple[Value, Value], plan: Plan, loss: Loss) -> None:
    """Refuse a TensorPlan by which the model would compute something else.

    The kit's own models are left out, and models without content.

    Args:
        model: whole.
        batch: the first two samples of which are taken.

    Raises:
        ValueError: it would; with the parameter whose gradient differs most.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    own = type(model).__module__.startswith("mpkit.models.") and plan.tensor is None
    if plan.tp == 1 or own or sum(sizes) > LARGEST or not _has_content(model):
        return
    x, y = (map_tensors(_wide, part(value, slice(0, 2))) for value in batch)
    whole = _copy(model)
    try:
        expected = _train(whole, x, y, loss)
    except Exception:  # what computes in one dtype only; the dry run has told what the model itself refuses
        return
    if not all(bool(grad.isfinite().all()) for grad in expected.values() if grad is not None):
        return
    examined = _Examined(whole, plan, x, y, loss)
    found = examined.gradients()
    errors = {name: _error(expected[name], grad, expected) for name, grad in found.items()}
    worst = max(errors.values())
    if worst <= CLOSE or _error_of(_train(whole, x, y, loss), expected) > CLOSE:  # it draws random numbers
        return
    # A mistake within a region is seen in front of it too: the region is what is named.
    inside = {n: r.entry for r in examined.plan_regions for n in errors if n.startswith(f"{r.entry}.")}
    wrong = [name for name in inside if errors[name] > CLOSE] or list(errors)
    name = max(wrong, key=errors.__getitem__)
    region, worst = inside.get(name), errors[name]
    raise ValueError(
        f"Plan(tp={plan.tp}): divided by its TensorPlan, {type(model).__name__} does not compute what it computes "
        f"whole: {'the loss' if not name else 'the gradient of ' + name} differs by {worst:.0%}"
        + (f", in Region(entry={region!r})" if region is not None else "")
        + ". Between column and row layers a forward may treat features or heads one by one only: fused projections "
        "take sections=(1, 1, 1), attributes that count heads local=('num_heads',), arguments that are added after the "
        "row layer apart=('residual',). mk.find_tensor_plan(model) is the plan to begin with; leave this region out, "
        "or train with tp=1."
    )


class _Examined:
    """The shards' gradients, put together."""

    def __init__(self, whole: nn.Module, plan: Plan, x: Value, y: Value, loss: Loss) -> None:
        self._plan, self._whole = plan, whole
        self._batch = x, y, loss
        self._meeting = _Meeting(plan.tp)
        self._found: dict[int, tuple[Sharded, Gradients]] = {}
        self._errors: list[Exception] = []

    def gradients(self) -> Gradients:
        """By name; the loss is named ""."""
        threads = [threading.Thread(target=self._rank, args=(i,)) for i in range(self._plan.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise ValueError(
                f"Plan(tp={self._plan.tp}): {type(self._whole).__name__}, divided by its TensorPlan, refuses the "
                f"data: {one_line(self._errors[0])}"
            )
        if len(self._found) < self._plan.tp:
            raise ValueError(
                f"Plan(tp={self._plan.tp}): {type(self._whole).__name__}, divided by its TensorPlan, would go another "
                "way on each rank, and they would wait for each other: what of its forward depends on values has to be "
                "the same on all. Leave those layers out of the TensorPlan, or train with tp=1."
            )
        shards = [self._found[i] for i in range(self._plan.tp)]
        sharded = shards[0][0]
        self.plan_regions = sharded.plan.regions
        found: Gradients = {}
        for name in shards[0][1]:
            parts = [gradients[name] for _, gradients in shards]
            known = [grad for grad in parts if grad is not None]
            if len(known) < len(parts):
                found[name] = sum(known) if known else None  # type: ignore[assignment]
            elif name in sharded.shards:
                found[name] = put_together([one.shards[name] for one, _ in shards], known)
            elif name in sharded.partial:
                found[name] = torch.stack(known).sum(0)
            else:  # alike on each rank: the one that is farthest from the first
                found[name] = max(known, key=lambda grad: float((grad - known[0]).abs().max()))
        return found

    def _rank(self, index: int) -> None:
        try:
            model, plan = copy.deepcopy(self._whole), self._plan
            model.zero_grad()
            sharded = shard_model(
                model, _Seat(self._meeting, index), plan.tensor, sequence=plan.sequence_parallel
            )
            x, y, loss = self._batch
            self._found[index] = sharded, _train(model, x, y, loss)
        except threading.BrokenBarrierError:
            pass  # another one has failed
        except Exception as error:
            self._errors.append(error)
            self._meeting.barrier.abort()


class _Meeting:
    """Where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Everybody's, by place."""
        self.brought[index] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class _Seat:
    """A `Line` of threads, as one of them sees it."""

    def __init__(self, meeting: _Meeting, index: int) -> None:
        self._meeting, self.size, self.index = meeting, meeting.size, index

    def __deepcopy__(self, _: object) -> _Seat:
        return self

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        brought = torch.stack(self._meeting.exchange(self.index, tensor))
        if op in ("max", "min"):
            return tensor.copy_(brought.amax(0) if op == "max" else brought.amin(0))
        return tensor.copy_(brought.sum(0) / (self.size if op == "mean" else 1))

    def start_all_reduce(self, tensor: Tensor) -> Arrived:
        return Arrived(self.all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.index, tensor))

    def start_all_gather(self, tensor: Tensor) -> Arrived:
        return Arrived(self.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        total = torch.stack(self._meeting.exchange(self.index, tensor)).sum(0)
        return total.chunk(self.size)[self.index].clone()

    def start_reduce_scatter(self, tensor: Tensor) -> Arrived:
        return Arrived(self.reduce_scatter(tensor))

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Arrived:
        raise NotImplementedError("tensor parallelism sends nothing to one rank")

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Arrived:
        raise NotImplementedError("tensor parallelism sends nothing to one rank")


# ---- copies, and what they compute ---------------------------------------------------------------------------


def _has_content(model: nn.Module) -> bool:
    return all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())


def _copy(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model).to(torch.float64).eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise, dtype=torch.float64), alpha=0.05)
    return made


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _train(model: nn.Module, x: Value, y: Value, loss: Loss) -> Gradients:
    """The loss, named "", and the gradients."""
    model.zero_grad()
    with torch.enable_grad():
        value = loss(call(model, map_tensors(torch.clone, x), first=True), map_tensors(torch.clone, y))
        value = value[0] if isinstance(value, tuple) else value  # a sum, and what it counts
        value.backward()
    found: Gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    found[""] = value.detach()
    return found


def _error(expected: Tensor | None, found: Tensor | None, scale: Gradients) -> float:
    """Of a gradient, relative to its largest element, or to a millionth of the largest of all."""
    if expected is None or found is None:
        other = found if expected is None else expected
        return 0.0 if other is None or not bool(other.any()) else 1.0
    largest = max(float(grad.abs().max()) for grad in scale.values() if grad is not None and grad.numel())
    size = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-6 * largest)
    error = float((found - expected).abs().max()) if expected.numel() else 0.0
    if error != error:
        return float("inf")
    return error / size if size > 0 else 0.0


def _error_of(found: Gradients, expected: Gradients) -> float:
    return max(_error(expected[name], grad, expected) for name, grad in found.items())
