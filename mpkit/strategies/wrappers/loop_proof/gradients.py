"""The gradients of one step of a wrapped module and of its plain copy, heard on their way.

received    the gradients of the wrapped forwards' outputs, from which the copy's backward begins
inside      what the wrapped backward adds to a parameter's gradient through the module's outputs
heard       a parameter's gradient once autograd has accumulated it on this rank, before strategies get it
outside     heard - inside: what was there before, and what the loop computes from the parameters by itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import _current_graph_task_id
from mpkit.strategies.models.hooks import hooks_on, is_ours
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.tensor.logits import DividedLogits
from mpkit.strategies.wrappers.loop_proof.attributes import kept_attributes
from mpkit.strategies.wrappers.loop_proof.plain_copy import PlainCopy, PlainForward, Seen, add_gradients, wide
from mpkit.strategies.wrappers.loop_proof.weights import HeldElements

__all__ = ["StepGradients"]

OfAll = Callable[[Any], list[Any]]


class StepGradients:
    """The gradients of a step.

    Args:
        plain: the copy.

    Attributes:
        held: what this rank's optimizer updates, by name.
        copied: the copy's gradients, by name.
        seen: the forwards of which backwards were made.
        heard: this rank's gradients; where nobody hears them, what was there before the backward.
        why_not: why the step cannot be compared; "" if it can.
    """

    def __init__(self, plain: PlainCopy) -> None:
        self.plain = plain
        self.held: dict[str, HeldElements] = {}
        self.why_not = ""
        self._names: dict[int, str] = {}  # of the parameters that are heard
        self._summed: frozenset[str] = frozenset()
        self._handles: list[Any] = []
        self._task, self._open = -1, False
        self._received: dict[int, dict[int, tuple[PlainForward, dict[int, Tensor]]]] = {}
        self._inside_now: dict[str, Tensor] = {}
        self._total_now: dict[str, Tensor] = {}
        self._early: dict[str, Tensor] = {}  # of a backward that has not begun
        self._early_task = -1
        self._hooks: dict[str, int] = {}  # number of hooks on each parameter
        self.heard: dict[str, Tensor | None] = {}
        self._before: dict[str, Tensor | None] = {}
        self.new_step()

    def new_step(self) -> None:
        """Forget the step before."""
        self.seen: list[Seen] = []
        self.copied: dict[str, Tensor] = {}
        self._inside: dict[str, Tensor] = {}

    # ---- hear

    @property
    def hears(self) -> bool:
        """Whether gradients are heard where they accumulate."""
        return bool(self._names)

    def attach(self, held: Sequence[HeldElements]) -> None:
        """Begin with what this rank's optimizer updates."""
        self.held = {each.where.name: each for each in held}
        self._hooks = {name: _hooks_of(each.tensor) for name, each in self.held.items()}

    def hear_parameters(self, module: nn.Module, summed: frozenset[str] = frozenset()) -> None:
        """Hear gradients where they accumulate, before hooks that are registered later.

        Args:
            module: its parameters.
            summed: names of those whose gradients a hook sums over the ranks before.
        """
        self._summed = summed
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
                self._handles.append(parameter.register_hook(partial(self._ready, name)))

    def _ready(self, name: str, gradient: Tensor) -> None:
        """Hear a gradient that autograd is about to accumulate."""
        if not self._open:
            if _current_graph_task_id() != self._early_task:
                self._early_task, self._early = _current_graph_task_id(), {}
            add_gradients(self._early, {name: wide(gradient)})
            return
        add_gradients(self._total_now, {name: wide(gradient)})
        if _current_graph_task_id() != self._task:  # of a reentrant checkpoint in the module
            add_gradients(self._inside_now, {name: wide(gradient)})

    def hear_outputs(
        self, module: nn.Module, seen: PlainForward, output: Any, made: list[Tensor], of_all: OfAll
    ) -> Any:
        """Return what a forward returned, with copies in place of its tensors, whose gradients are heard.

        Args:
            module: its layers' kept tensors get copies too.
            seen: the forward.
            output: what it returned.
            made: the tensors of it, and those that layers keep.
            of_all: returns what all ranks have.
        """
        copies = {
            id(tensor): self._hear(tensor.clone(), seen, place, of_all)
            for place, tensor in enumerate(made)
            if tensor.grad_fn is not None
        }
        self._hear_inside(seen, copies.values())
        modules = dict(module.named_modules())
        for name, key, leaves, shape in kept_attributes(module):
            if any(id(leaf) in copies for leaf in leaves):
                modules[name].__dict__[key] = rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])
        leaves, shape = flatten(output)
        return rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])

    def _hear(self, output: Tensor, seen: PlainForward, place: int, of_all: OfAll) -> Tensor:
        """Hear the gradients that reach an output of a forward; of divided logits, those of all ranks' parts."""

        def receive(gradient: Tensor) -> None:
            if torch.is_grad_enabled():
                self.why_not = (
                    "second derivatives (create_graph=True) reach the parameters past the model's outputs"
                )
            task = self._received.setdefault(_current_graph_task_id(), {})
            gradient = gradient.detach().clone()
            if isinstance(output, DividedLogits):
                gradient = torch.cat([part.to(gradient.device) for part in of_all(gradient.cpu())], -1)
            task.setdefault(id(seen), (seen, {}))[1][place] = gradient

        output.register_hook(receive)
        return output

    def receive(self, seen: PlainForward, gradients: dict[int, Tensor]) -> None:
        """Take the gradients of a forward's outputs, of which no backward tells."""
        self._received.setdefault(self._task, {})[id(seen)] = seen, gradients

    def _hear_inside(self, seen: PlainForward, outputs: Iterable[Tensor]) -> None:
        """Hear what a forward's own operators add to the gradients of parameters."""
        if not self._names:
            return
        before = {leaf.grad_fn for leaf in flatten((seen.args, seen.kwargs))[0] if isinstance(leaf, Tensor)}
        todo = [output.grad_fn for output in outputs]
        while todo:
            node = todo.pop()
            metadata: Any = getattr(node, "metadata", {})
            if node is None or node in before or "mpkit_heard" in metadata:
                continue
            metadata["mpkit_heard"] = True
            into = {}
            for i, (following, _) in enumerate(node.next_functions):
                variable = getattr(following, "variable", None)
                if variable is None:
                    todo.append(following)
                elif id(variable) in self._names:
                    into[i] = self._names[id(variable)]
            if into:
                node.register_hook(partial(self._add_contribution, into))

    def _add_contribution(self, into: dict[int, str], made: Sequence[Tensor | None], _: Any) -> None:
        for i, name in into.items():
            gradient = made[i]
            if gradient is not None and self._open:
                add_gradients(self._inside_now, {name: wide(gradient)})

    # ---- backward

    def begin(self) -> None:
        """Begin a backward."""
        self._task, self._open = _current_graph_task_id(), True
        self._inside_now = {}
        self._total_now = self._early if self._early_task == self._task else {}
        self.heard = {
            name: None if each.tensor.grad is None else wide(each.tensor.grad)
            for name, each in self.held.items()
        }
        self._before = dict(self.heard)

    def end(self, scale: float) -> None:
        """Do the copy's backward."""
        self._open = False
        add_gradients(self._inside, self._inside_now)
        if self._names:
            self.heard = {
                name: self._total_now.get(name) if before is None else before + self._total_now.get(name, 0)
                for name, before in self._before.items()
            }
        if any(_hooks_of(each.tensor) != self._hooks.get(name, 0) for name, each in self.held.items()):
            self.why_not = "a hook was registered on a parameter after the wrap, which the copy has not"
        received = list(self._received.get(self._task, {}).values())
        self._received.clear()
        for seen, gradients in received:
            self.plain.backward(seen, gradients, scale)
            self.seen.append((seen, gradients, scale))
        add_gradients(self.copied, self.plain.take(scale))

    def gradient_outside(self, name: str) -> Tensor | None:
        """Return what this rank's gradient has besides what comes through the module's outputs."""
        heard, inside = self.heard.get(name), self._inside.get(name)
        if name in self._summed:
            return self._before.get(name)
        if heard is None or inside is None:
            return heard
        return torch.nan_to_num(heard - inside, 0.0, 0.0, 0.0) if not heard.is_complex() else heard - inside

    def close(self) -> None:
        """Hear nothing any more."""
        for handle in self._handles:
            handle.remove()


def _hooks_of(parameter: nn.Parameter) -> int:
    return sum(not is_ours(hook.function) for hook in hooks_on({"": parameter}))
