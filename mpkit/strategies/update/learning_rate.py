"""Learning rates for larger batches: how to scale a rate that was tuned for a smaller one.

    linear    k times the batch, k times the rate: one step then goes as far as k steps did (Goyal et al., "Accurate,
              Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.1), with a warm-up (section 2.2)
    sqrt      k times the batch, sqrt(k) times the rate: the variance of a step stays the same (Krizhevsky, "One
              weird trick for parallelizing convolutional neural networks", 2014; Hoffer et al., "Train longer,
              generalize better", NeurIPS 2017)

Both are rules of thumb. `print(rule)` says what a rule did.
"""

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

from mpkit.common.tracebacks import public


@dataclass(frozen=True)
class ScalingRule:
    """A learning rate for one batch size, derived from a rate for another.

    Attributes:
        name: "linear" or "square root".
        lr: the rate to give to the optimizer.
        base_lr, base_batch: the tuned rate, and the samples per step that it was tuned for.
        batch: samples per step now, over all ranks.
        warmup_steps: the number of steps in which the rate rises from `base_lr` to `lr`.
    """

    name: str
    lr: float
    base_lr: float
    base_batch: int
    batch: int
    warmup_steps: int

    def schedule(self, step: int) -> float:
        """Return the factor of the rate in a step, counted from 0: `cluster.train(..., lr_schedule=rule.schedule)`.

        The rate starts at `base_lr` and rises by the same amount in each step of the warm-up; then the factor is 1.

        >>> rule = linear_scaling(lr=0.1, base_batch=32, batch=128, warmup_steps=3)
        >>> [rule.lr * rule.schedule(step) for step in range(5)]
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.4]
        """
        if step >= self.warmup_steps:
            return 1.0
        first = self.base_lr / self.lr
        return first + (1.0 - first) * step / self.warmup_steps

    def __str__(self) -> str:
        k = self.batch / self.base_batch
        times = f"{k:.4g} times the batch ({self.base_batch} -> {self.batch})"
        by = f"{self.lr / self.base_lr:.4g} times the learning rate ({self.base_lr:g} -> {self.lr:.4g})"
        why = "a gradient averaged over more samples is less noisy, and the variance of a step stays the same"
        source, warm = "Krizhevsky 2014; Hoffer et al. 2017", " No warm-up."
        if self.name == "linear":
            why = f"a step goes as far as {k:.4g} small ones did, if the gradient changes little in between"
            source = "Goyal et al. 2017, section 2.1"
        if self.warmup_steps:
            warm = (
                f" It warms up from {self.base_lr:g} in {self.warmup_steps} steps, since early on the weights change "
                "fast (Goyal et al. 2017, section 2.2)."
            )
        return f"{self.name.capitalize()} scaling: {times}, {by}: {why} ({source}).{warm}"


@public
def linear_scaling(lr: float, base_batch: int, batch: int, warmup_steps: int = 0) -> ScalingRule:
    """Scale the rate linearly: lr x batch / base_batch, with a gradual warm-up. Meant for SGD.

    Args:
        lr: the rate tuned for `base_batch`.
        base_batch: samples per step that the rate was tuned for.
        batch: samples per step now: those of all ranks and all micro-batches.
        warmup_steps: the number of steps in which the rate rises; Goyal et al. use 5 epochs.

    Raises:
        ValueError: an argument is not a valid number.

    >>> rule = linear_scaling(lr=0.1, base_batch=32, batch=128, warmup_steps=100)
    >>> rule.lr, rule.schedule(0), rule.schedule(100)
    (0.4, 0.25, 1.0)
    >>> print(rule)
    Linear scaling: 4 times the batch (32 -> 128), 4 times the learning rate (0.1 -> 0.4): a step goes as far as 4 small
    ones did, if the gradient changes little in between (Goyal et al. 2017, section 2.1). It warms up from 0.1 in 100
    steps, since early on the weights change fast (Goyal et al. 2017, section 2.2).
    """
    return _scaling_rule("linear", "linear_scaling", lr, base_batch, batch, warmup_steps)


@public
def sqrt_scaling(lr: float, base_batch: int, batch: int, warmup_steps: int = 0) -> ScalingRule:
    """Scale the rate with the square root: lr x sqrt(batch / base_batch). Often used with Adam and its relatives.

    Arguments and errors are those of `linear_scaling`.

    >>> rule = sqrt_scaling(lr=1e-3, base_batch=32, batch=128)
    >>> rule.lr, rule.schedule(0)
    (0.002, 1.0)
    >>> print(rule)
    Square root scaling: 4 times the batch (32 -> 128), 2 times the learning rate (0.001 -> 0.002): a gradient averaged
    over more samples is less noisy, and the variance of a step stays the same (Krizhevsky 2014; Hoffer et al.
    2017). No warm-up.
    """
    return _scaling_rule("square root", "sqrt_scaling", lr, base_batch, batch, warmup_steps)


def _scaling_rule(
    name: str, function: str, lr: Any, base_batch: Any, batch: Any, warmup_steps: Any
) -> ScalingRule:
    good = f"mk.{function}(lr=0.1, base_batch=32, batch=128, warmup_steps=100)"
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not lr > 0 or not isfinite(lr):
        raise ValueError(
            f"{function}(lr={lr!r}): the rate that was tuned is a number above 0, such as {good}"
        )
    numbers = ("base_batch", base_batch, 1), ("batch", batch, 1), ("warmup_steps", warmup_steps, 0)
    for what, value, least in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = f"{what} is a whole number, {least} or more, such as {good}"
            raise ValueError(f"{function}({what}={value!r}): {wanted}")
    k = batch / base_batch
    return ScalingRule(name, lr * (k if name == "linear" else sqrt(k)), lr, base_batch, batch, warmup_steps)
