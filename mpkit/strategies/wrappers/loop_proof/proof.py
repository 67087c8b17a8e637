"""LoopProof: what a wrapper calls so that its first steps are compared with plain PyTorch.

wrap        a copy of the module is made before, with the first rank's weights; the wrapped one has to have the same
forward     the copy does it too: outputs and buffers have to be equal
backward    the copy's, from the same gradients of outputs
step        in the backward that synchronizes: the copy's gradients, averaged over the ranks by torch.distributed
            alone, have to be the wrapped ones; where weights are divided, each rank's part of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.errors import NotSerial
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.heard_draws import CannotReplay, ForwardDraws, HeardDraws
from mpkit.strategies.models.nested_values import flatten, is_opaque
from mpkit.strategies.proof.attempt import run_user_code
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.runtime.evidence import digest_of
from mpkit.strategies.tensor.logits import DividedLogits
from mpkit.strategies.wrappers.loop_proof.agreement import Agreement
from mpkit.strategies.wrappers.loop_proof.attributes import kept_of_graph, tensors_of
from mpkit.strategies.wrappers.loop_proof.comparison import compare_forward, compare_gradients, compare_start
from mpkit.strategies.wrappers.loop_proof.gradients import StepGradients
from mpkit.strategies.wrappers.loop_proof.plain_copy import PlainCopy, PlainForward
from mpkit.strategies.wrappers.loop_proof.weights import HeldElements, take_divided, take_replicated
from mpkit.trace.proof import number_steps, power

__all__ = ["LoopProof"]


class LoopProof:
    """Compares the first steps of a wrapped module with plain PyTorch.

    Args:
        wrapper: the wrapper's call, for messages: "mk.ddp".
        steps: how many.
        module: the module, before it is wrapped; a copy is made.
        comm: the ranks that average gradients, or hold the other parts.
        dtype: the dtype of 16 bits in which the wrapper computes.
        average: whether gradients are averaged over the ranks.
        divided: whether the ranks hold different elements.
        loss: of a step that has it, and takes (inputs, targets).

    Attributes:
        active: whether there are steps to compare.
        line: what was found, once all steps are compared.
    """

    def __init__(
        self, wrapper: str, steps: int, module: nn.Module, comm: Communicator, *,
        dtype: torch.dtype | None = None, average: bool = True, divided: bool = False,
        loss: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._wrapper, self._steps, self._speaks = wrapper, steps, comm.index == 0
        self._average, self._divided, self._size = average, divided, comm.size
        self.active, self.line = steps > 0, ""
        if not self.active:
            return
        self._ranks = Agreement(wrapper, comm)
        self._ranks.same_model(module)
        self._plain = PlainCopy(module, dtype, loss)
        self._gradients = StepGradients(self._plain)
        self._step, self._worst = 1, 0.0
        self._new_step()

    def _new_step(self) -> None:
        self._begun, self._why_not, self._held_back = False, "", False
        self._now: PlainForward | None = None
        self._ranks.new_step()
        self._gradients.new_step()

    # ---- wrap

    def hear(self, module: nn.Module, summed: frozenset[str] = frozenset()) -> None:
        """Hear gradients where they accumulate; called before a strategy registers hooks of its own.

        Args:
            module: its parameters.
            summed: names of those whose gradients a hook sums over the ranks.
        """
        if self.active:
            self._gradients.hear_parameters(module, summed)

    def attach(self, module: nn.Module, held: Sequence[HeldElements]) -> None:
        """Begin with the wrapped module; every rank calls it.

        Args:
            module: the module, in which parameters have the names that they had before.
            held: what this rank's optimizer updates.
        """
        if not self.active:
            return
        self._module = module
        self._gradients.attach(held)
        before = {name: p.detach().clone() for name, p in self._plain.parameters.items()}
        self._take_weights()
        self._ranks.findings += compare_start(self._plain, module, before, self._ranks.first)
        self._plain.follow(module)
        self._agree()
        self._new_step()

    def _take_weights(self) -> None:
        take = take_divided if self._divided else take_replicated
        take(self._plain.parameters, self._gradients.held, self._ranks)
        self._begun = True

    def _weights_versions(self) -> list[int]:
        return [parameter._version for parameter in self._module.parameters()]

    # ---- forward

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what there is before a forward."""
        self._now = None
        if not self.active or not torch.is_grad_enabled():
            return
        if not self._begun:
            self._take_weights()
            self._versions = self._weights_versions()
        if self._held_back and self._weights_versions() != self._versions:
            self.active = False
            raise NotSerial(
                f"{self._wrapper}: step {self._step} is not that of plain PyTorch: weights changed after backwards "
                "within no_sync() alone, whose gradients no backward has averaged, so each rank updates by its own. "
                "The last backward before optimizer.step() has to be outside of no_sync()",
                step=self._step,
            )
        if any(map(is_opaque, flatten((args, kwargs))[0])):
            self._why_not = "forward takes an iterator, a generator or a function, which cannot be read twice"
        if not self._why_not:
            self._ranks.note_mode(self._module)
            self._now = self._plain.note_start(self._module, args, kwargs)

    def note_buffers(self, *, last: bool = True) -> None:
        """Note the buffers, which are those of the first rank if this is a forward that synchronizes them."""
        if self._now is None:
            return
        self._now.buffers = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}
        if last:
            named = self._module.named_buffers()
            self._ranks.digests.append({f"the buffer {name}": digest_of(buffer) for name, buffer in named})

    def hear_draws(self) -> AbstractContextManager[Any]:
        """Return a context in which random numbers are heard, where ranks draw their own for their parts."""
        self._heard: list[Tensor] = []
        return nullcontext() if self._now is None else HeardDraws(self._heard)

    def leave(self, output: Any) -> Any:
        """Repeat the forward in plain PyTorch and compare; return the output, whose backward is heard."""
        seen, self._now = self._now, None
        if seen is None or output is None:
            return output
        got = tensors_of((output, kept_of_graph(self._module)))
        if self._average and self._plain.drew(seen):
            self._ranks.drew = self._ranks.drew or digest_of(seen.random.cpu)
        if not self._average:
            heard = [{(0, 0): draws} for draws in self._ranks.all([drawn.cpu() for drawn in self._heard])]
            seen.draws = StepDraws(Plan(tp=self._size), 1, heard)
            if len(got) > len(tensors_of(output)):
                self._why_not = (
                    "a layer keeps a tensor of its forward, of which this rank may have a part only"
                )
        if not self._forward(seen, [t.whole().detach() if isinstance(t, DividedLogits) else t for t in got]):
            return output
        return self._gradients.hear_outputs(self._module, seen, output, got, self._ranks.all)

    def _forward(self, seen: PlainForward, got: list[Tensor]) -> bool:
        """Repeat a forward, and compare; return whether that is possible."""
        if not self._why_not:
            try:
                with run_user_code("forward"):
                    seen.outputs = self._plain.forward(seen)
                self._ranks.findings += compare_forward(self._plain, seen, self._module, got)
            except (CannotReplay, SharedDraws) as error:
                self._why_not = str(error)
        return not self._why_not

    # ---- backward, step

    def begin(self) -> None:
        """Begin a backward."""
        if self.active:
            self._gradients.begin()

    def end(self, *, last: bool = True, scale: float = 1.0, dropped: bool = False) -> None:
        """End a backward, and compare the step if it is the last one.

        Args:
            last: whether the gradients are complete.
            scale: the factor of gradients in it.
            dropped: whether they were dropped, since they are not finite.

        Raises:
            NotSerial: the step is not that of plain PyTorch.
        """
        if not self.active:
            return
        try:
            with run_user_code("backward"):
                self._gradients.end(scale)
        except CannotReplay as error:
            self._why_not = str(error)
        self._why_not = self._why_not or self._gradients.why_not
        self._held_back = not last
        if last:
            self._compare(scale, dropped)

    def compare_step(self, loss: float, heard: ForwardDraws, draws: Callable[[list[Any]], StepDraws]) -> None:
        """Do a whole step in plain PyTorch, which the ranks did together after `enter` and `begin`, and compare.

        Args:
            loss: what the step returned.
            heard: what this rank drew at random in it.
            draws: returns what all ranks drew as that of the whole batch.
        """
        seen, self._now = self._now, None
        if not self.active:
            return
        if seen is not None:
            drawn = {place: [each.cpu() for each in of] for place, of in heard.draws.items()}
            seen.draws = draws(self._ranks.all(drawn))
            if heard.others.drawn:
                self._why_not = (
                    "the forward draws random numbers from Python's or NumPy's generators, not from torch's"
                )
            if self._forward(seen, [torch.tensor(loss)]):
                self._gradients.receive(seen, {0: torch.ones_like(seen.outputs[0])})
        self.end()

    def _compare(self, scale: float, dropped: bool) -> None:
        if why_not := self._ranks.why_not(self._why_not):
            self._close(f"not verified: {why_not}")
            return
        found, worst = compare_gradients(self._gradients, self._ranks, self._average, dropped, scale)
        self._ranks.findings += found
        self._worst = max(self._worst, worst)
        self._agree()
        self._step += 1
        self._new_step()
        if self._step > self._steps:
            steps = number_steps(tuple(range(1, self._steps + 1)))
            self._close(f"equal to plain PyTorch in {steps}: gradients within {power(self._worst)}")

    def _agree(self) -> None:
        self.active = False
        self._ranks.agree(self._step)
        self.active = True

    def _close(self, line: str) -> None:
        self.active = False
        self._gradients.close()
        self.line = "; ".join([f"{self._wrapper}: {line}", *self._ranks.notes])
        if self._speaks:
            print(self.line, flush=True)
