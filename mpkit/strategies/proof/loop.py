"""LoopProof: the first steps of a wrapped module in a loop of one's own, compared with those of the plain module.

attach      the wrapped module has to have the plain one's weights, which are the same on all ranks
forward     its inputs and outputs are noted
backward    the gradients that the wrapped outputs receive are noted, and those of parameters at its end
step        when the optimizer begins, the plain module does the same forwards and backwards: outputs and buffers have
            to be equal, and the gradients the mean over the ranks of the plain ones (`step_gradients`); when it ends,
            all ranks have to hold the same weights, from which the next step begins
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.common.torch_private import _execution_engine
from mpkit.plan.plan import Plan
from mpkit.strategies.models.heard_draws import CannotReplay, ForwardDraws, HeardDraws
from mpkit.strategies.models.hooks import hooks_on, is_ours
from mpkit.strategies.models.nested_values import flatten, is_opaque, rebuild
from mpkit.strategies.proof.backwards import ModuleBackwards
from mpkit.strategies.proof.compare import Difference, Noise, run_user_code, same, say
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.proof.plain_module import (
    CLOSE,
    PlainForward,
    PlainModule,
    kept_attributes,
    kept_of_graph,
    tensors_of,
)
from mpkit.strategies.proof.ranks import HeldTensors, Ranks, kept, local, whole
from mpkit.strategies.proof.rounding import FEW, coarsest, distance, largest
from mpkit.strategies.proof.step_gradients import StepComparison, StepGradients
from mpkit.strategies.runtime.evidence import digest_of
from mpkit.strategies.tensor.vocabulary import DividedLogits
from mpkit.trace.proof import number_steps, power


class LoopProof:
    """Compares the first steps of a wrapped module with plain PyTorch.

    Args:
        who: what is proved, for messages: "mk.ddp".
        tp: the ranks that share a batch and draw random numbers for their parts of it; None: there are none.
        synchronizes: whether the forward that runs has the first rank's buffers on all ranks.
    """

    def __init__(
        self, who: str, ranks: Ranks, plain: PlainModule, steps: int, *,
        tp: Ranks | None = None, synchronizes: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        self._who, self.ranks, self._plain, self._steps = who, ranks, plain, steps
        self._tp, self._synchronizes = tp, synchronizes
        self.active = True  # whether there are steps to compare
        self.line = ""  # the result, once all steps are compared
        self._handles: list[Any] = []
        self._hearing: Any = None  # HeardDraws
        self._step, self._worst, self._depth, self._apart = 1, 0.0, 0, False
        self._weights_before: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self.ranks.same_model(plain.module)
        self._new_step()

    def _new_step(self) -> None:
        self._begun, self._compared, self._why_not = False, False, ""
        self._now: PlainForward | None = None
        self._forwards: list[PlainForward] = []
        self._drew = ""
        self._wrong_output: tuple[Tensor, Tensor] | None = None
        self._had = False  # whether there were gradients at the end of the last backward
        self._gradients = StepGradients(apart=self._apart)
        self.ranks.new_step()

    # ---- attach

    def attach(self, module: nn.Module, held: HeldTensors, *, listens: bool = True) -> None:
        """Begin with the wrapped module; every rank calls it.

        Unless it `listens` to forwards, backwards and steps, `compare_step` is told of them.
        """
        self._module, self._held = module, held
        held.check_wrapped(self._plain.parameters)
        self.ranks.findings += self._plain.follow(module)
        self._agree()
        self._hooks = {name: _hooks_of(parameter) for name, parameter in held.named.items()}
        self._apart = any(hasattr(inner, "set_requires_gradient_sync") for inner in module.modules())
        self._new_step()
        if not listens:
            return
        self._backwards = ModuleBackwards(
            held.named.values(), self._begin_backward, self._end_backward, apart=self._apart
        )
        trained = {name: p for name, p in held.named.items() if p.requires_grad}
        self._handles = [
            self._backwards,
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
            *(p.register_hook(partial(self._hear_past, name)) for name, p in trained.items()),
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
            self._drawn: list[Tensor] = []
            self._hearing = HeardDraws(self._drawn)
            self._hearing.__enter__()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the state before a forward."""
        self._now = None
        if not self.active or not torch.is_grad_enabled():
            return
        if self._compared:
            self._new_step()
        elif any(self._gradients.heard) and self._held.versions() != self._versions:
            self._close(
                "not verified: something else than step() of one of torch's optimizers has changed the weights; "
                "compare(), a method of what mk.prove returns, compares the gradients before that"
            )
            return
        if not self._begun:
            self._take_weights()
            self._begun, self._versions = True, self._held.versions()
            self._gradients.before = {} if self._handles else self._gradients_now()
        if any(map(is_opaque, flatten((args, kwargs))[0])):
            self._why_not = (
                "forward takes an iterator, or an object with tensors, which cannot be looked into"
            )
        if not self._why_not:
            self.ranks.note_mode(self._module)
            self._now = self._plain.note_start(self._module, args, kwargs)
            if self._synchronizes():
                buffers = self._now.buffers.items()
                self.ranks.digests.append({f"the buffer {name}": digest_of(b) for name, b in buffers})

    def _leave(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        """Note the outputs of a forward, and return copies whose backward is heard."""
        seen, self._now = self._now, None
        if self._hearing is not None:
            self._hearing.__exit__(None, None, None)
            self._hearing = None
        if seen is None or output is None:
            return None
        made = tensors_of((output, kept_of_graph(self._module)))
        if self._tp is not None:
            drawn = self._tp.all([each.cpu() for each in self._drawn])
            seen.draws = StepDraws(Plan(tp=self._tp.size), 1, [{(0, 0): of_rank} for of_rank in drawn])
        elif self._plain.drew(seen):
            self._drew = self._drew or digest_of(seen.random.torch[0])
        outputs = [each.whole() if isinstance(each, DividedLogits) else whole(each) for each in made]
        seen.got = {f"output {i}": each.detach().clone() for i, each in enumerate(outputs)}
        seen.got |= {f"buffer {n}": whole(b).detach().clone() for n, b in self._module.named_buffers()}
        self._forwards.append(seen)
        copies = {
            id(tensor): self._hear(tensor.clone(), len(self._forwards) - 1, place)
            for place, tensor in enumerate(made)
            if tensor.grad_fn is not None
        }
        modules = dict(self._module.named_modules())
        for name, key, leaves, shape in kept_attributes(self._module):
            if any(id(leaf) in copies for leaf in leaves):
                modules[name].__dict__[key] = rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])
        leaves, shape = flatten(output)
        return rebuild(shape, [copies.get(id(leaf), leaf) for leaf in leaves])

    # ---- backward

    def _hear(self, output: Tensor, forward: int, place: int) -> Tensor:
        """Hear the gradient that reaches an output of a forward; for divided logits, those of all ranks' parts."""

        def receive(gradient: Tensor) -> None:
            if not self.active or self._compared or not self._backwards.arrive():
                return
            if torch.is_grad_enabled():
                what = "second derivatives (create_graph=True)"
                self._why_not = f"{what} reach the parameters past the model's outputs"
            gradient = gradient.detach().clone()
            if isinstance(output, DividedLogits):
                parts = self.ranks.all(gradient.cpu())
                gradient = torch.cat([part.to(gradient.device) for part in parts], -1)
            self._gradients.heard[-1].setdefault(forward, {})[place] = whole(gradient)

        output.register_hook(receive)
        return output

    def _begin_backward(self) -> None:
        if not self.active or self._compared:
            return
        there = self._gradients_now()
        if not _any_there(there):
            if self._had:  # zeroed since the backward before
                self._gradients = StepGradients(apart=self._apart)
        elif not any(self._gradients.heard):
            self._gradients.before = there
        self._gradients.heard.append({})

    def _end_backward(self) -> None:
        if self.active and not self._compared:  # torch's wrappers queue what they do at the end before this
            _execution_engine.queue_callback(self._note_gradients)

    def _note_gradients(self) -> None:
        self._gradients.after = self._gradients_now()
        self._had = _any_there(self._gradients.after)

    def _gradients_now(self) -> dict[str, Tensor | None]:
        return {name: kept(parameter.grad) for name, parameter in self._held.named.items()}

    def _hear_past(self, name: str, gradient: Tensor) -> None:
        """Hear what autograd is about to accumulate."""
        if self.active and not self._compared:
            past, made = self._gradients.past, gradient.detach().clone()
            past[name] = past[name] + made if name in past else made

    # ---- step

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(parameter) for parameter in self._held.named.values()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.active or not self._is_ours(optimizer):
            return
        self._depth += 1
        if self._depth == 1 and not self._compared and (any(self._gradients.heard) or self._why_not):
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
        if self.active:
            self._compare()
            self._close_if_done()

    def compare_step(self, loss: float, heard: ForwardDraws, draws: Callable[[list[Any]], StepDraws]) -> None:
        """Repeat in plain PyTorch the step that the ranks did together after `enter`, and compare.

        `draws` turns what all ranks drew into the draws of the whole batch.
        """
        seen, self._now = self._now, None
        if not self.active:
            return
        if seen is not None:
            drawn = {place: [each.cpu() for each in of] for place, of in heard.draws.items()}
            seen.draws = draws(self.ranks.all(drawn))
            seen.got = {"output 0": torch.tensor(loss)}
            self._forwards.append(seen)
            if heard.others.drawn:
                others = "Python's or NumPy's generators, not from torch's"
                self._why_not = f"the forward draws random numbers from {others}"
            self._gradients.heard.append({0: {0: torch.ones(())}})
            self._gradients.after = self._gradients_now()
        self.compare()

    def _compare(self) -> None:
        if any(_hooks_of(p) != self._hooks[name] for name, p in self._held.named.items()):
            self._why_not = (
                "a hook was registered on a parameter after the wrap, which the plain module has not"
            )
        step, heard = self._gradients, [received for received in self._gradients.heard if received]
        dtype = self._plain.dtype_of(self._forwards)
        steps = partial(self._plain.repeat, self._forwards, heard)

        def repeat(seed: int | None) -> dict[str, Tensor]:
            made, own = steps(seed)
            results = {f"{name} of {i}": each for i, of in enumerate(made) for name, each in of.items()}
            for gradients in own:
                for name, gradient in gradients.items():
                    results[name] = results[name] + gradient if name in results else gradient
            return results

        noise = Noise(repeat, dtype)
        try:
            if not self._why_not:
                with run_user_code("the step"):
                    made, step.own = steps()
                self._check_forwards(made, noise, torch.finfo(dtype).eps)
        except (CannotReplay, SharedDraws) as error:
            self.ranks.findings += [f"{error}."] if isinstance(error, SharedDraws) else []
            self._why_not = str(error)
        self._explain_outputs()
        if self.ranks.any(bool(self.ranks.findings)):
            self._agree()
        if why_not := self.ranks.why_not(self._why_not):
            self._close(f"not verified: {why_not}")
            return
        self._agree()
        eps = max(torch.finfo(each).eps for each in (dtype, coarsest(self._held.named.values())))
        comparison = StepComparison(step, self._plain.parameters, self._held, self.ranks)
        verdict = comparison.verdict(noise, eps)
        if verdict.why_not:
            self._close(f"not verified: {verdict.why_not}")
            return
        self.ranks.findings += [verdict.finding] if verdict.finding else []
        self._worst = max(self._worst, verdict.worst)
        if verdict.note:
            self.ranks.notes[verdict.note] = None
        self._agree()
        self._step, self._compared = self._step + 1, True

    def _check_forwards(self, made: list[dict[str, Tensor]], noise: Noise, eps: float) -> None:
        """Compare the outputs and buffers of each forward, up to the first difference."""
        for number, (seen, wanted) in enumerate(zip(self._forwards, made, strict=True)):
            outputs = [tensor for name, tensor in wanted.items() if name.startswith("output ")]
            shapes, others = ([list(tensor.shape) for tensor in each] for each in (seen.outputs, outputs))
            if shapes != others:
                says = f"the outputs of forward have the shapes {shapes}, and {others} in plain PyTorch."
                self.ranks.findings.append(says)
                return
            for name, other in wanted.items():
                one = seen.got.get(name)
                if one is None or one.shape != other.shape:  # a buffer that is divided
                    continue
                what = f"the {name} after forward" if name.startswith("buffer ") else f"{name} of forward"
                few = FEW * eps * largest(other) if one.is_floating_point() or one.is_complex() else 0.0
                try:
                    same(what, one, other, few, noise, f"{name} of {number}")
                except Difference as difference:
                    self._wrong_output = (seen.outputs[0], outputs[0]) if outputs else None
                    self.ranks.findings.append(f"{difference.says}. {self._cause_of_forward(seen)}")
                    return

    def _cause_of_forward(self, seen: PlainForward) -> str:
        for mode, training in (("training", True), ("evaluation", False)):
            was = bool(seen.modes[""]["training"])
            if training != was and self._plain.explains(seen, training=training):
                return f"The wrapped module computed in {mode} mode."
        if self._weights_before and self._plain.explains(seen, weights=self._weights_before):
            return say("stale")
        return say("other_forward")

    def _explain_outputs(self) -> None:
        """Add what only all ranks together know of the forwards: shared random numbers, and missing sums."""
        every = self.ranks.all((self._drew, self._wrong_output is not None))
        drew = [state for state, _ in every if state]
        if len(set(drew)) < len(drew):
            self.ranks.findings.append(say("same_mask"))
        if not all(wrong for _, wrong in every) or self._wrong_output is None:
            return
        got, wanted = self._wrong_output
        total = self.ranks.mean(got.double()) * self.ranks.size
        if distance(total, wanted.double()) <= CLOSE * largest(wanted):
            finding = self.ranks.findings[-1].removesuffix(say("other_forward"))
            self.ranks.findings[-1] = finding + say("partial_sum")

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
        self._gradients, self._forwards, self._weights_before = StepGradients(), [], {}
        if self.ranks.index == 0:
            print(self.line, flush=True)


def _any_there(gradients: dict[str, Tensor | None]) -> bool:
    return any(g is not None and bool((local(g) != 0).any()) for g in gradients.values())


def _hooks_of(parameter: nn.Parameter) -> int:
    return sum(not is_ours(hook.function) for hook in hooks_on({"": parameter}))
