"""LoopProof: the first steps of a wrapped module in a loop of one's own, compared with those of the plain module.

attach      the wrapped module has to have the plain one's weights, which are the same on all ranks
forward     the plain module does it too: outputs and buffers have to be equal
backward    the plain module's, from the gradients that the wrapped outputs received
step        when the optimizer begins: the gradients have to be the mean over the ranks of the plain ones
            (`step_gradients`); when it ends: all ranks have to hold the same weights, from which the next step begins
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.common.torch_private import _current_graph_task_id, _execution_engine, _will_engine_execute_node
from mpkit.plan.plan import Plan
from mpkit.strategies.models.heard_draws import CannotReplay, ForwardDraws, HeardDraws
from mpkit.strategies.models.hooks import hooks_on, is_ours
from mpkit.strategies.models.nested_values import flatten, is_opaque, rebuild
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.proof.held_tensors import HeldTensors, kept, local, whole
from mpkit.strategies.proof.kept_values import kept_attributes, kept_of_graph, tensors_of
from mpkit.strategies.proof.noise import run_user_code
from mpkit.strategies.proof.plain_module import CLOSE, PlainForward, PlainModule, Received
from mpkit.strategies.proof.ranks import Ranks
from mpkit.strategies.proof.rounding import FEW, coarsest, distance, largest
from mpkit.strategies.proof.step_gradients import StepGradients, compare_step, largest_difference
from mpkit.strategies.runtime.evidence import digest_of
from mpkit.strategies.tensor.vocabulary import DividedLogits
from mpkit.trace.proof import number_steps, power

__all__ = ["LoopProof"]

SEEDS = (
    "The ranks have built other weights (another seed per rank), and this wrapper does not send the first rank's. What "
    "works: torch.manual_seed(0) on every rank before the model is built; then torch.manual_seed(rank) for dropout"
)
ELSE = (
    "It computed with other weights, buffers or random numbers, or depends on something that is not in the module: "
    "the rank, a global, the process group."
)


class LoopProof:
    """Compares the first steps of a wrapped module with plain PyTorch.

    Args:
        who: what is proved, for messages: "mk.ddp".
        ranks: all ranks that train the module.
        plain: the module without a wrapper.
        steps: how many.
        tp: those of them that share a batch, and draw random numbers for their parts of it; None: none do.
        synchronizes: whether the forward that runs has the first rank's buffers on all ranks.

    Attributes:
        ranks: as given.
        active: whether there are steps to compare.
        line: what was found, once all steps are compared.
    """

    def __init__(
        self, who: str, ranks: Ranks, plain: PlainModule, steps: int, *,
        tp: Ranks | None = None, synchronizes: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        self._who, self.ranks, self._plain, self._steps = who, ranks, plain, steps
        self._tp, self._synchronizes = tp, synchronizes
        self.active, self.line = True, ""
        self._handles: list[Any] = []
        self._heard: Any = None
        self._step, self._worst, self._depth = 1, 0.0, 0
        self._weights_before: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self.ranks.same_model(plain.module)
        self._new_step()

    def _new_step(self) -> None:
        self._begun, self._compared, self._why_not = False, False, ""
        self._now: PlainForward | None = None
        self._drew = ""
        self._wrong_output: tuple[list[Tensor], list[Tensor]] | None = None
        self._seen: list[list[Received]] = []  # of each backward, the forwards that it went through
        self._pending: dict[int, Received] = {}
        self._task, self._had = -1, False
        self._gradients = StepGradients(apart=getattr(self, "_apart", False))
        self.ranks.new_step()

    # ---- attach

    def attach(self, module: nn.Module, held: HeldTensors, *, listens: bool = True) -> None:
        """Begin with the wrapped module; every rank calls it.

        Args:
            module: the module whose forward is called, within all wrappers.
            held: what this rank's optimizer updates.
            listens: whether forwards, backwards and steps are heard; otherwise `compare_step` is told of them.
        """
        self._module, self._held = module, held
        before = held.take_weights(self._plain.parameters)
        for name, now in self._plain.parameters.items():
            if not torch.equal(before[name], now.detach()):
                difference = largest_difference(now, before[name])
                self.ranks.findings.append(
                    f"{name}, once wrapped, is not what it is in rank {self.ranks.ranks[0]}'s plain module: "
                    f"{difference}. {SEEDS}"
                )
                break
        self.ranks.findings += self._plain.follow(module)
        self._agree()
        parameters = held.named.items()
        self._hooks = {name: _hooks_of(parameter) for name, parameter in parameters}
        self._nodes = [
            torch.autograd.graph.get_gradient_edge(p).node for _, p in parameters if p.requires_grad
        ]
        self._apart = any(hasattr(inner, "set_requires_gradient_sync") for inner in module.modules())
        self._new_step()
        if not listens:
            return
        self._handles = [
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
            *(p.register_hook(partial(self._hear_past, n)) for n, p in parameters if p.requires_grad),
        ]

    def _take_weights(self) -> None:
        before = self._held.take_weights(self._plain.parameters)
        if any(not torch.equal(before[name], now) for name, now in self._plain.parameters.items()):
            self._weights_before = before

    # ---- forward

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.active:
            for handle in self._handles:  # not where it closes, within a hook
                handle.remove()
            return
        self.enter(args, kwargs)
        if self._now is not None and self._tp is not None:
            drawn: list[Tensor] = []
            self._heard = HeardDraws(drawn), drawn
            self._heard[0].__enter__()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what there is before a forward."""
        self._now = None
        if not self.active or not torch.is_grad_enabled():
            return
        self._finish_backward()
        if self._compared:
            self._new_step()
        elif self._gradients.own and self._held.versions() != self._versions:
            self._close(
                "not verified: something else than step() of one of torch's optimizers has changed the weights; "
                "compare(), a method of what mk.prove returns, compares the gradients before that"
            )
            return
        if not self._begun:
            self._take_weights()
            self._begun, self._versions = True, self._held.versions()
        if any(map(is_opaque, flatten((args, kwargs))[0])):
            self._why_not = "forward takes an iterator, a generator or a function, which cannot be read twice"
        if not self._why_not:
            self.ranks.note_mode(self._module)
            self._now = self._plain.note_start(self._module, args, kwargs)
            if self._synchronizes():
                self.ranks.digests.append(
                    {f"the buffer {n}": digest_of(b) for n, b in self._now.buffers.items()}
                )

    def _leave(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        """Repeat the forward in plain PyTorch and compare; return the output, whose backward is heard."""
        seen, self._now = self._now, None
        if self._heard is not None:
            self._heard[0].__exit__(None, None, None)
        if seen is None or output is None:
            return None
        if self._tp is not None:
            drawn = [each.cpu() for each in self._heard[1]]
            seen.draws = StepDraws(Plan(tp=self._tp.size), 1, [{(0, 0): of} for of in self._tp.all(drawn)])
            self._heard = None
        made = tensors_of((output, kept_of_graph(self._module)))
        if not self._forward(seen, [_whole_output(tensor).detach() for tensor in made]):
            return None
        copies = {
            id(tensor): self._hear(tensor.clone(), seen, place)
            for place, tensor in enumerate(made)
            if tensor.grad_fn is not None
        }
        modules = dict(self._module.named_modules())
        for name, key, leaves, shape in kept_attributes(self._module):
            if any(id(leaf) in copies for leaf in leaves):
                modules[name].__dict__[key] = rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])
        leaves, shape = flatten(output)
        return rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])

    def _forward(self, seen: PlainForward, got: list[Tensor]) -> bool:
        """Repeat a forward, and compare; return whether that is possible."""
        try:
            with run_user_code("forward"):
                seen.outputs = self._plain.forward(seen)
            self._compare_forward(seen, got)
        except (CannotReplay, SharedDraws) as error:
            if isinstance(error, SharedDraws):
                self.ranks.findings.append(f"{error}.")
            self._why_not = str(error)
        return not self._why_not

    def _compare_forward(self, seen: PlainForward, got: list[Tensor]) -> None:
        if self._tp is None and self._plain.drew(seen):
            self._drew = self._drew or digest_of(seen.random.cpu)
        wanted = seen.outputs
        if [t.shape for t in got] != [t.shape for t in wanted]:
            shapes, others = ([list(t.shape) for t in each] for each in (got, wanted))
            self.ranks.findings.append(
                f"the outputs of forward have the shapes {shapes}, and {others} in plain PyTorch."
            )
            return
        named = dict(self._module.named_buffers())
        pairs = [(f"output {i}", one, other) for i, (one, other) in enumerate(zip(got, wanted, strict=True))]
        for name, buffer in self._plain.module.named_buffers():
            if name in named and named[name].shape == buffer.shape:  # and not divided
                pairs.append((f"buffer {name}", whole(named[name]), buffer))
        eps, noise = torch.finfo(self._plain.dtype_of(seen)).eps, self._plain.noise_of_forward(seen)
        for what, one, other in pairs:
            few = FEW * eps * largest(other) if one.is_floating_point() or one.is_complex() else 0.0
            by = distance(one, other)
            if by > few and by > few + noise.spread(what):
                said = f"the {what} after forward" if what.startswith("buffer") else f"{what} of forward"
                said = "the output of forward" if len(got) == 1 and what == "output 0" else said
                self._wrong_output = got, wanted
                cause = self._cause_of_forward(seen, got)
                self.ranks.findings.append(f"{said}: {largest_difference(one, other)}. {cause}")
                return

    def _cause_of_forward(self, seen: PlainForward, got: list[Tensor]) -> str:
        for name, training in (("training", True), ("evaluation", False)):
            if self._plain.explains(seen, got, training=training) and training != self._plain_mode(seen):
                return f"The wrapped module computed in {name} mode."
        if self._weights_before and self._plain.explains(seen, got, weights=self._weights_before):
            return (
                "It computed with the weights from before the last update: the shards, or the copies that it computes "
                "with, are stale, since nobody has gathered or sent them again after optimizer.step()."
            )
        return ELSE

    def _plain_mode(self, seen: PlainForward) -> bool:
        return bool(seen.modes[""]["training"])

    def _hear(self, output: Tensor, seen: PlainForward, place: int) -> Tensor:
        """Hear the gradient that reaches an output of a forward; of divided logits, those of all ranks' parts."""

        def receive(gradient: Tensor) -> None:
            if not self.active or not self._reaches_parameters():
                return
            if torch.is_grad_enabled():
                self._why_not = (
                    "second derivatives (create_graph=True) reach the parameters past the model's outputs"
                )
            if _current_graph_task_id() != self._task:
                self._begin_backward()
            gradient = gradient.detach().clone()
            if isinstance(output, DividedLogits):
                gradient = torch.cat(
                    [part.to(gradient.device) for part in self.ranks.all(gradient.cpu())], -1
                )
            self._pending.setdefault(id(seen), (seen, {}))[1][place] = whole(gradient)

        output.register_hook(receive)
        return output

    # ---- backward

    def _reaches_parameters(self) -> bool:
        """Return whether the backward that runs accumulates gradients, and is not torch.autograd.grad."""
        if self._apart:
            return True
        try:
            return any(_will_engine_execute_node(node) for node in self._nodes)
        except RuntimeError:  # torch.autograd.grad with respect to a parameter
            return False

    def _begin_backward(self) -> None:
        self._finish_backward()
        self._task = _current_graph_task_id()
        there = {n: kept(p.grad) for n, p in self._held.named.items()}
        if not _any_there(there):
            if self._had:  # zeroed since the backward before
                self._seen, self._gradients = [], StepGradients(apart=self._apart)
        elif not self._gradients.own:
            self._gradients.before = there

        def last(again: bool = True) -> None:
            if again:  # after what torch's wrappers do at the end
                _execution_engine.queue_callback(partial(last, False))
                return
            held = self._held.named.items()
            after = {n: kept(p.grad) for n, p in held}
            self._gradients.after = after
            self._had = _any_there(after)

        _execution_engine.queue_callback(last)

    def _hear_past(self, name: str, gradient: Tensor) -> None:
        """Hear what autograd is about to accumulate."""
        if self.active and not self._compared:
            past, made = self._gradients.past, gradient.detach().clone()
            past[name] = past[name] + made if name in past else made

    def _finish_backward(self) -> None:
        """Do the plain module's backward of the last one."""
        received, self._pending = list(self._pending.values()), {}
        if not received or self._why_not:
            return
        try:
            with run_user_code("backward"):
                self._gradients.own.append(self._plain.backward(received))
            self._seen.append(received)
        except CannotReplay as error:
            self._why_not = str(error)

    # ---- step

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(parameter) for parameter in self._held.named.values()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or not self._is_ours(optimizer):
            return
        self._depth += 1
        if self._depth == 1 and not self._compared:
            self._finish_backward()
            if self._gradients.own or self._why_not:
                self._compare()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or not self._is_ours(optimizer):
            return
        self._depth -= 1
        if self._depth or not self._compared:
            return
        self.ranks.new_step()
        if not self._held.divided:
            self._take_weights()
        self._agree()
        self._close_if_done()

    def compare(self) -> None:
        """Compare the gradients as they are; a loop without one of torch's optimizers calls it before it updates.

        Raises:
            NotSerial: on all ranks: the step is not that of plain PyTorch.
        """
        self._finish_backward()
        if self.active:
            self._compare()
            self._close_if_done()

    def compare_step(self, loss: float, heard: ForwardDraws, draws: Callable[[list[Any]], StepDraws]) -> None:
        """Do a whole step in plain PyTorch, which the ranks did together after `enter`, and compare.

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
            seen.draws = draws(self.ranks.all(drawn))
            if heard.others.drawn:
                self._why_not = (
                    "the forward draws random numbers from Python's or NumPy's generators, not from torch's"
                )
            if self._forward(seen, [torch.tensor(loss)]):
                self._pending[id(seen)] = seen, {0: torch.ones_like(seen.outputs[0])}
                held = self._held.named.items()
                self._gradients.after = {n: kept(p.grad) for n, p in held}
        self.compare()

    def _compare(self) -> None:
        if any(_hooks_of(p) != self._hooks[name] for name, p in self._held.named.items()):
            self._why_not = (
                "a hook was registered on a parameter after the wrap, which the plain module has not"
            )
        self._explain_outputs()
        if self.ranks.any(bool(self.ranks.findings)):
            self._agree()
        if why_not := self.ranks.why_not(self._why_not):
            self._close(f"not verified: {why_not}")
            return
        self._agree()
        dtypes = [self._plain.dtype_of(seen) for received in self._seen for seen, _ in received]
        eps = max(torch.finfo(d).eps for d in (*dtypes, coarsest(self._held.named.values())))
        noise = self._plain.noise_of_backwards(self._seen)
        verdict = compare_step(self._gradients, self._plain.parameters, self._held, self.ranks, noise, eps)
        if verdict.why_not:
            self._close(f"not verified: {verdict.why_not}")
            return
        self.ranks.findings += verdict.findings
        self._worst = max(self._worst, verdict.worst)
        if verdict.note:
            self.ranks.notes[verdict.note] = None
        self._agree()
        self._step, self._compared = self._step + 1, True

    def _explain_outputs(self) -> None:
        """Add what only all ranks together know of the forwards: shared random numbers, and sums that are missing."""
        every = self.ranks.all((self._drew, self._wrong_output is not None))
        drew = [state for state, _ in every if state]
        if len(set(drew)) < len(drew):
            self.ranks.findings.append(
                "ranks draw the same random numbers for different samples, so they drop out the same elements. What "
                "works: torch.manual_seed(rank) once the model is built"
            )
        if not all(wrong for _, wrong in every) or self._wrong_output is None:
            return
        got, wanted = self._wrong_output
        total = self.ranks.mean(got[0].double()) * self.ranks.size
        if distance(total, wanted[0].double()) <= CLOSE * largest(wanted[0]):
            self.ranks.findings[-1] = self.ranks.findings[-1].removesuffix(ELSE) + (
                "It is this rank's part of a sum: the reduction over the ranks is missing in the forward."
            )

    def _agree(self) -> None:
        active, self.active = self.active, False
        self.ranks.agree(self._step)
        self.active = active

    def _close_if_done(self) -> None:
        if self.active and self._step > self._steps:
            steps = number_steps(tuple(range(1, self._steps + 1)))
            self._close(f"equal to plain PyTorch in {steps}: gradients within {power(self._worst)}")

    def _close(self, line: str) -> None:
        self.active = False
        self.line = "; ".join([f"{self._who}: {line}", *self.ranks.notes])
        self._gradients, self._seen, self._weights_before = StepGradients(), [], {}
        if self.ranks.index == 0:
            print(self.line, flush=True)


def _whole_output(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, DividedLogits) else whole(tensor)


def _any_there(gradients: dict[str, Tensor | None]) -> bool:
    return any(g is not None and bool((local(g) != 0).any()) for g in gradients.values())


def _hooks_of(parameter: nn.Parameter) -> int:
    return sum(not is_ours(hook.function) for hook in hooks_on({"": parameter}))
