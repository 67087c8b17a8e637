"""A forward's outputs and buffers, and a step's gradients, compared with those of the plain copy.

    few      roundings of the largest element by which two results may differ without further questions
    noise    beyond that, how far the copy's own results are apart when they are repeated with other roundings

as in `mpkit.strategies.proof.rounding`. The gradient that is expected on this rank is

    averaged    the mean over ranks of the copy's and what is outside (`gradients`), where a rank hears its own
                gradients; else what was there before and the mean of the copy's
    otherwise   the copy's and what is outside; of divided parameters this rank's elements
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor, nn

from mpkit.strategies.proof.rounding import FEW, SPREADS, coarsest, distance, largest
from mpkit.strategies.wrappers.loop_proof.agreement import Agreement
from mpkit.strategies.wrappers.loop_proof.attributes import settings
from mpkit.strategies.wrappers.loop_proof.gradients import StepGradients
from mpkit.strategies.wrappers.loop_proof.plain_copy import CLOSE, PlainCopy, PlainForward, wide

__all__ = ["compare_forward", "compare_gradients", "compare_start", "largest_difference"]


def compare_start(plain: PlainCopy, module: nn.Module, before: Mapping[str, Tensor], first: int) -> list[str]:
    """Compare the wrapped module with what it was before.

    Args:
        plain: the copy, with the weights that it has now, and the modes that it had.
        module: the wrapped module.
        before: the weights that the first rank had.
        first: that rank.

    Returns:
        What is not as before.
    """
    modes = settings(plain.module)
    found = [
        f"{name or 'the model'} is in another mode than before the wrap."
        for name, now in settings(module).items()
        if name in modes and now["training"] != modes[name]["training"]
    ]
    for name, tensor in plain.parameters.items():
        if not torch.equal(before[name], tensor.detach()):
            found.append(
                f"{name}, once wrapped, is not what it was on rank {first}: {largest_difference(tensor, before[name])}."
            )
    return found


def compare_forward(
    plain: PlainCopy, seen: PlainForward, module: nn.Module, outputs: list[Tensor]
) -> list[str]:
    """Compare a forward of the wrapped module with the copy's.

    Args:
        plain: the copy, after its forward.
        seen: the forward.
        module: the wrapped module, whose buffers are compared.
        outputs: the tensors that it returned.

    Returns:
        What is not as in plain PyTorch; at most one.
    """
    if [t.shape for t in outputs] != [t.shape for t in seen.outputs]:
        shapes, others = ([list(t.shape) for t in each] for each in (outputs, seen.outputs))
        return [f"the outputs of forward have the shapes {shapes}, and {others} in plain PyTorch."]
    named, eps = dict(module.named_buffers()), plain.eps(seen)
    alone = len(outputs) == 1
    pairs = [
        ("the output of forward" if alone else f"output {i} of forward", one, other)
        for i, (one, other) in enumerate(zip(outputs, seen.outputs, strict=True))
    ]
    for name, buffer in plain.module.named_buffers():
        whole = name in seen.buffers and named[name].shape == buffer.shape  # and not divided
        pairs.append((f"the buffer {name} after forward", named[name] if whole else buffer, buffer))
    noise: list[float] = []
    for i, (what, one, other) in enumerate(pairs):
        few = FEW * eps * largest(other) if one.is_floating_point() or one.is_complex() else 0.0
        by = distance(one, other)
        if by > few:
            noise = noise or plain.noise_of_forward(seen)
            if by > few + SPREADS * noise[i]:
                return [f"{what}: {largest_difference(one, other)}. {plain.mode_of(seen, outputs)}"]
    return []


def largest_difference(one: Tensor, other: Tensor) -> str:
    """Return in words by which element two tensors differ most.

    >>> largest_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    'an element is 2 and not 2.5'
    """
    a, b = one.detach().reshape(-1), other.detach().reshape(-1)
    a, b = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b))
    at = int(torch.nan_to_num((a - b).abs(), nan=inf).argmax())
    return f"an element is {a[at].item():.6g} and not {b[at].item():.6g}"


@dataclass
class Differences:
    """What a rank's gradients are beside the expected ones.

    Attributes:
        found: name, difference, what is few, and the words.
        worst: the largest difference, relative to the largest element.
        factors: how many times as large each gradient is; 0 if it is no multiple.
        own: whether each is this rank's own.
    """

    found: list[tuple[str, float, float, str]] = field(default_factory=list)
    worst: float = 0.0
    factors: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)

    def add(self, name: str, got: Tensor, wanted: Tensor, own: Tensor, size: float, few: float) -> None:
        """Compare one gradient."""
        by = distance(got, wanted)
        self.worst = max(self.worst, by / size if size else 0.0)
        if by > few:
            self.found.append((name, by, few, f"the gradient of {name}: {largest_difference(got, wanted)}."))
        if wanted.numel() and largest(wanted) > 0:
            top = int(wanted.abs().argmax())
            factor = got[top] / wanted[top]
            multiple = distance(got, wanted * factor) <= CLOSE * largest(got)
            self.factors.append(float(factor.real) if multiple else 0.0)
            self.own.append(distance(got, own) <= CLOSE * size)

    @property
    def cause(self) -> str:
        """The likely cause, with what would work."""
        if self.own and all(self.own):
            return "The gradients are this rank's own: the mean over the ranks is missing."
        factor = self.factors[0] if self.factors else 0.0
        if (
            factor
            and abs(factor - 1) > CLOSE
            and all(abs(f - factor) <= CLOSE * abs(factor) for f in self.factors)
        ):
            return f"All gradients are {factor:.6g} times as large: a sum in place of a mean, or the reverse."
        return (
            "Outputs and buffers are equal, so the backward or the reduction over the ranks makes something else of "
            "it: a hook, a checkpoint or an autograd.Function that looks at other ranks or at the whole batch. Without "
            "it the step is that of plain PyTorch; or wrap the module without prove=, if the difference is meant"
        )


def compare_gradients(
    step: StepGradients, ranks: Agreement, average: bool, dropped: bool, scale: float
) -> tuple[list[str], float]:
    """Compare the gradients of a step; every rank calls it.

    Args:
        step: the step.
        ranks: all ranks.
        average: whether the wrapper averages gradients over them.
        dropped: whether the wrapper dropped the gradients, since they are not finite.
        scale: the factor of the gradients in the last backward.

    Returns:
        What is not as in plain PyTorch on this rank, at most one; and the largest relative difference.
    """
    device = step.plain.device
    names = [name for name, parameter in step.plain.parameters.items() if parameter.requires_grad]
    sizes = ranks.most(torch.tensor(_sizes(step, names), dtype=torch.float64, device=device)).cpu()
    if dropped:
        return _explain_dropped(step, ranks, float(sizes[:, 0].max()) * scale), 0.0
    eps = max((step.plain.eps(seen) for seen, *_ in step.seen), default=0.0)
    eps = max(eps, torch.finfo(coarsest([held.tensor for held in step.held.values()])).eps)
    differ = Differences()
    for name, (size, there) in zip(names, sizes.tolist(), strict=True):
        wanted, own = _expected_elements(step, ranks, name, average)
        if wanted is None or own is None:
            continue
        got = _own_gradient(step, name, average)
        if got is not None and there:
            alone = own if average and ranks.size > 1 else wanted * inf
            differ.add(name, got.reshape(-1), wanted, alone, size, FEW * eps * size)
        elif got is None and there:
            differ.found.append((name, inf, 0.0, f"{name} has no gradient, and has one in plain PyTorch."))
        elif got is not None and largest(got) > 0:
            differ.found.append((name, inf, 0.0, f"{name} has a gradient, and has none in plain PyTorch."))
    if not ranks.any(bool(differ.found), device):
        return [], differ.worst
    noise = step.plain.noise(step.seen, step.copied)
    spread = ranks.most(
        torch.tensor([noise[name] for name in names], dtype=torch.float64, device=device)
    ).tolist()
    allowed = dict(zip(names, spread, strict=True))
    beyond = [text for name, by, few, text in differ.found if by > few + SPREADS * allowed[name]]
    return [f"{text} {differ.cause}" for text in beyond[:1]], differ.worst


def _sizes(step: StepGradients, names: list[str]) -> list[list[float]]:
    """Return the largest element of each gradient on this rank, and whether there is any."""
    terms = [[each for each in (step.copied.get(n), step.heard.get(n)) if each is not None] for n in names]
    return [[max(map(largest, of), default=0.0), float(bool(of))] for of in terms]


def _expected_elements(
    step: StepGradients, ranks: Agreement, name: str, average: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the expected elements on this rank, flat, and what they are without the other ranks."""
    outside, own = step.gradient_outside(name), step.copied.get(name)
    if own is None:
        own = wide(torch.zeros_like(step.plain.parameters[name]))
    within = average and step.hears and outside is not None
    own = own + outside if within and outside is not None else own
    whole = ranks.mean(own) if average else own
    part = step.held.get(name)
    if part is None or not part.tensor.numel():
        return None, None
    wanted, alone = (part.where.take(each, part.tensor.numel()) for each in (whole, own))
    if outside is not None and not within:
        wanted, alone = wanted + outside.reshape(-1), alone + outside.reshape(-1)
    return wanted, alone


def _own_gradient(step: StepGradients, name: str, average: bool) -> Tensor | None:
    """Return this rank's gradient: as it was heard, before a wrapper around this one averages it, or as it is."""
    if step.hears and not average:
        return step.heard.get(name)
    gradient = step.held[name].tensor.grad
    return None if gradient is None else wide(gradient)


def _explain_dropped(step: StepGradients, ranks: Agreement, largest_scaled: float) -> list[str]:
    finite = all(bool(gradient.isfinite().all()) for gradient in step.copied.values())
    near = 2 * ranks.size * largest_scaled > torch.finfo(torch.float16).max
    if ranks.any(not finite, step.plain.device) or near:
        return []
    return ["the gradients were dropped, since one was not finite, and all are finite in plain PyTorch."]
