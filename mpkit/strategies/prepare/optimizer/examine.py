"""Check, before any rank starts, that an optimizer does the same on the ranks of a plan as on the whole model.

    created  create it for stand-ins of the whole model (`creation`)
    plain    take some steps with it, as in plain PyTorch (`trial`)
    repeats  several ranks: created and stepped again, it ends with the same numbers
    stages   several stages: so do optimizers that each hold some of the parameters
    parts    ZeRO and tensor parallelism: so do optimizers that each hold some elements of the parameters; under ZeRO-1
             some parameters are enough, since each can be whole on one rank

PyTorch's own elementwise optimizers are known to be divisible; one step shows that they can be created. Other
optimizers are tried. An optimizer that cannot be tried is refused where it would be divided, unless it is declared
elementwise (`mpkit.optimizer.elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import _disable_current_modes
from mpkit.plan.plan import Plan
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.arguments import ADAM
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.prepare.optimizer.creation import create_optimizer, is_elementwise
from mpkit.strategies.prepare.optimizer.trial import SCALES, Division, OptimizerTrial
from mpkit.strategies.stage.shard import Shard
from mpkit.strategies.update.optimizer import OptimizerFunction, describe_optimizer, kind_of
from mpkit.strategies.update.whole_model import stand_in, trained_parameters

__all__ = ["check_optimizer"]

Steps = list[dict[str, Tensor]]

DECLARED = "optimizer=mk.optimizer.elementwise(the function)"
"""How an optimizer is declared to treat each element by itself."""


def check_optimizer(resolved: ResolvedPlan, task: Task) -> None:
    """Reject optimizers whose steps on a rank's part of the model are not part of their step on the whole model.

    What else the trial shows, `task.examined` has from then on.

    Raises:
        Rejection: the optimizer cannot be created, or a step depends on more than a rank has.
    """
    plan, (whole, first_names) = resolved.plan, trained_parameters(task.model)
    # Numbers are needed here, even where a rank is simulated without them.
    with quiet(), _disable_current_modes():
        # ---- created
        once = plan.ranks == 1 and plan.microbatches == 1
        made = create_optimizer(
            task.optimizer, task.model, task.given_model, scheduled=task.scheduled, once=once
        )
        if made is None:
            return
        known, function = is_elementwise(made), describe_optimizer(task.optimizer)
        checks = _Checks(function, plan, OptimizerTrial(function, whole, 1 if known else len(SCALES)))
        # ---- plain
        expected = checks.run_plain()
        if expected is None:
            return
        # ---- repeats
        if plan.ranks > 1 and plan.data_parallel != "dp":
            checks.check_repeats(expected)
        # ---- stages
        if plan.pp > 1 and not known:
            checks.check_stages(expected, _updated_by(resolved, first_names))
        # ---- parts
        if (plan.zero or plan.tp > 1 or plan.ep > 1) and not known:
            checks.check_halves(expected)
            whole_of = plan.zero == 1 and plan.tp == plan.ep == 1 and not checks.are_elements_alone(expected)
            if not whole_of:
                checks.check_elements(expected, resolved.sharded[0].shards)
            task.examined = replace(checks.trial.examined, whole=whole_of)
            return
        task.examined = checks.trial.examined


@dataclass
class _Checks:
    """The checks of one optimizer under one plan.

    Attributes:
        trial: the trial of the optimizer, in float64 if it accepts that.
        tolerance: the allowed error of a parameter relative to its update.
    """

    function: OptimizerFunction
    plan: Plan
    trial: OptimizerTrial
    tolerance: float = 1e-6

    @property
    def kind(self) -> str:
        """The optimizer's class."""
        made = self.function.make_optimizer({w.name: stand_in(w) for w in self.trial.whole})
        return kind_of(made)

    def run_plain(self) -> Steps | None:
        """Return the parameters after each step in plain PyTorch; None if they cannot be determined.

        What is then unknown is reported.

        Raises:
            Rejection: a step fails, or the optimizer would be divided and cannot be tried.
        """
        given, self.trial = self.trial, self.trial.in_float64()
        try:
            return self.trial.run()
        except Exception as error:
            in_float64 = error
        self.trial, self.tolerance = given, 1e-3
        try:
            expected = given.run()
        except Exception as error:
            self._refuse_untried(error)
            report(
                f"optimizer: {self.kind} cannot be tried before the ranks start: {one_line(error)}. Whether it repeats "
                "itself on ranks that hold the same parameters, and whether a checkpoint would have all that it "
                "changes, is not known."
            )
            return None
        if self._divides() and not self.function.elementwise:
            report(
                f"optimizer: {self.kind} was tried in the model's own precision, since in float64 it raises "
                f"{one_line(in_float64)}. Since {_who(self.plan)}, each element has to change by itself; what one "
                f"takes from others is noticed above {self.tolerance:.1%} of its update only. If it takes nothing, say "
                f"so: {DECLARED}"
            )
        return expected

    def _refuse_untried(self, error: Exception) -> None:
        """Refuse an optimizer that cannot be tried, unless it is declared elementwise, or large and on one rank whole.

        A large model's optimizer is tried on smaller parameters, which it may refuse where it accepts the model's.
        """
        if self.function.elementwise:
            return
        if not self.trial.smaller:
            raise Rejection(
                f"optimizer: a step of {self.kind} fails on parameters and gradients like the model's: "
                f"{one_line(error)}. Ranks call step() without arguments, when the gradients of the whole batch are "
                f"there. One that takes a step from them works: {ADAM}. If it does on the ranks' GPUs only, and treats "
                f"each element by itself, say so: {DECLARED}"
            ) from None
        if self._divides():
            raise self._cannot_tell(error) from None

    def _divides(self) -> bool:
        """Return whether ranks have parts of what the optimizer of the whole model updates."""
        return self.plan.pp > 1 or self.plan.zero > 0 or self.plan.tp > 1 or self.plan.ep > 1

    def check_repeats(self, expected: Steps) -> None:
        """Check that ranks which hold the same parameters end with the same values.

        Raises:
            Rejection: the optimizer is not deterministic.
        """
        everything: Division = {w.name: None for w in self.trial.whole}
        try:
            again = self.trial.run(seed=1)
        except Exception as error:
            raise Rejection(
                f"optimizer: {self.kind} with {self.plan}: made and stepped a second time it fails, {one_line(error)}, "
                f"and each rank makes its own. One that can be made again works: {ADAM}"
            ) from None
        off, _ = self.trial.off_by(expected, again, everything)
        if off > 1e-3 * self.tolerance:  # torch on several threads need not round alike twice
            raise Rejection(
                f"optimizer: {self.kind} with {self.plan}: made and stepped twice on the same gradients it ends with "
                "other parameters (it draws random numbers, perhaps), and ranks that hold the same would come apart. "
                f"What works: Plan.serial(); or an optimizer that repeats itself, {ADAM}"
            )

    def check_stages(self, expected: Steps, places: Sequence[Sequence[str]]) -> None:
        """Check optimizers that each hold some of the parameters.

        Raises:
            Rejection: they end with values that differ from those of one optimizer that holds all parameters.
        """
        for names in places:
            self._check(expected, dict.fromkeys(names), self._coupled_error)

    def check_halves(self, expected: Steps) -> None:
        """Check optimizers that each hold half of the parameters.

        Raises:
            Rejection: they end with values that differ from those of one optimizer that holds all parameters.
        """
        whole = self.trial.whole
        for half in (0, 1) if len(whole) > 1 else ():
            self._check(expected, {w.name: None for w in whole[half::2]}, self._coupled_error)

    def are_elements_alone(self, expected: Steps) -> bool:
        """Return whether each element changes by itself, as far as can be found out."""
        try:
            self.check_elements(expected, {})
        except Rejection:
            return False
        return True

    def check_elements(self, expected: Steps, shards: Mapping[str, Shard]) -> None:
        """Check optimizers that each hold some elements of the parameters.

        Raises:
            Rejection: they end with values that differ from those of one optimizer that holds all elements.
        """
        whole = self.trial.whole
        for half in (0, 1):
            if self.plan.tp > 1 or self.plan.ep > 1:
                division: dict[str, Any] = {
                    w.name: partial(_rows, dim=shards[w.name].dim, half=half) if w.name in shards else None
                    for w in whole
                }
                self._check(expected, division, self._mixes)
            if self.plan.zero:
                self._check(
                    expected, {w.name: partial(_elements, numel=prod(w.shape), half=half) for w in whole}, self._mixes
                )  # fmt: skip

    def _check(self, expected: Steps, division: Division, wrong: Callable[[str, float], Rejection]) -> None:
        try:
            steps = self.trial.run(division)
        except Exception as error:
            if self.function.elementwise:
                return
            raise self._cannot_tell(error) from None
        off, name = self.trial.off_by(expected, steps, division)
        if off > self.tolerance:
            raise wrong(name, off)

    # ---- messages -----------------------------------------------------------------------------------------

    def _coupled_error(self, name: str, off: float) -> Rejection:
        return Rejection(
            self._refusal(
                f"with {self.kind} what becomes of one parameter depends on others (a norm over all gradients, a "
                f"shared state, its place among them): without them, {name} is off by {_share(off)} of its update",
                f"treats each parameter by itself, {ADAM}, with cluster.train(..., max_grad_norm=1.0) to clip by the "
                "norm over all ranks",
                "one optimizer of the whole model",
            )
        )

    def _mixes(self, name: str, off: float) -> Rejection:
        return Rejection(
            self._refusal(
                f"{self.kind} changes an element by what the others are (a matrix's rows, or its norm): of parts, "
                f"{name} is off by {_share(off)} of its update",
                f"treats each element by itself, {ADAM}",
                "whole parameters",
            )
        )

    def _cannot_tell(self, error: Exception) -> Rejection:
        refusal = self._refusal(
            f"whether {self.kind} treats each element by itself cannot be found out, since it fails on parts: "
            f"{one_line(error)}",
            f"does, {ADAM}",
            "whole parameters",
        )
        return Rejection(f"{refusal}. If it does, say so: {DECLARED}")

    def _refusal(self, why: str, fitting: str, held: str) -> str:
        """Return the words of an error: what was asked, why it cannot be, and the two things that would work.

        Args:
            why: what the optimizer does.
            fitting: what an optimizer has to do that works.
            held: what every rank has to hold for this optimizer.
        """
        owned = ""
        if self.plan.zero > 1 and self.plan.tp == self.plan.ep == 1 and held == "whole parameters":
            owned = f"; or each parameter whole on one rank: {replace(self.plan, zero=1, offload='none')}"
        return (
            f"optimizer: {self.kind} with {self.plan}: {_who(self.plan)}, and {why}. Either an optimizer that "
            f"{fitting}{owned}; or {held} on every rank: Plan.ddp({self.plan.ranks})"
        )


def _who(plan: Plan) -> str:
    if plan.zero:
        return "ZeRO gives each rank a part of a parameter's elements, in one dimension"
    if plan.ep > 1:
        return "expert parallelism gives each rank some of a parameter's experts"
    if plan.tp > 1:
        return "tensor parallelism gives each rank a part of a parameter's rows or columns"
    return "the rank of a stage has an optimizer of its own, for the stage's parameters"


def _share(off: float) -> str:
    return f"{off:.1%}" if off >= 1e-3 else f"{off:.1g}"


def _elements(whole: Tensor, *, numel: int, half: int) -> Tensor:
    """Return the first two fifths of the elements, or the rest, in one dimension as under ZeRO."""
    at = -(-2 * numel // 5)
    return whole.reshape(-1)[at:] if half else whole.reshape(-1)[:at]


def _rows(whole: Tensor, *, dim: int, half: int) -> Tensor:
    """Return the first half of a dimension, or the rest."""
    at = -(-whole.shape[dim] // 2)
    return whole.narrow(dim, at, whole.shape[dim] - at) if half else whole.narrow(dim, 0, at)


def _updated_by(resolved: ResolvedPlan, first_names: Mapping[str, str]) -> list[list[str]]:
    """Return, by place along pp, the parameters that it updates; a tied one belongs to the first stage that has it.

    Args:
        first_names: the first name of each parameter, by any of its names.
    """
    seen: set[str] = set()
    by_place: list[list[str]] = [[] for _ in range(resolved.mesh.pp)]
    for place, names in zip(resolved.schedule.stage_to_rank, resolved.held, strict=True):
        for name in dict.fromkeys(first_names[n] for n in names):
            if name not in seen:
                seen.add(name)
                by_place[place].append(name)
    return by_place
