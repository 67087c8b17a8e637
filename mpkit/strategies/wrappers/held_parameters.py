"""The parameters that a wrapper holds: gradients are synchronized of those that it was given, and of no others."""

from __future__ import annotations

from torch import nn

__all__ = ["HeldParameters"]


class HeldParameters:
    """The parameters of a module as they were when it was wrapped.

    Args:
        module: the module.
        wrapper: the wrapper's call, for errors: "mk.ddp".
        allows_unused: whether a parameter may get no gradient, and so may be frozen while others train.
    """

    def __init__(self, module: nn.Module, wrapper: str, *, allows_unused: bool) -> None:
        self._module, self._wrapper, self._allows_unused = module, wrapper, allows_unused
        self._then = self._now()
        self._parameters = dict(self._parameters_by_name())
        self._trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _now(self) -> list[tuple[int, bool]]:
        every = (p for module in self._module.modules() for p in module._parameters.values() if p is not None)
        return [(id(parameter), parameter.requires_grad) for parameter in every]

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def check(self) -> None:
        """Check that they are still those, and that those are frozen that were.

        Raises:
            ValueError: one was added, removed, exchanged, unfrozen, or frozen while others train.
        """
        if self._now() == self._then:
            return
        named, then = self._parameters_by_name(), self._parameters
        for name in (*named, *then):
            if named.get(name) is not then.get(name):
                did = "added" if name not in then else "removed" if name not in named else "exchanged"
                raise ValueError(
                    f"{name} was {did} after {self._wrapper} had wrapped the module, and gradients are synchronized of "
                    f"the parameters that it had: change the module first, then model = {self._wrapper}(module)"
                )
        trained = {name for name, parameter in named.items() if parameter.requires_grad}
        unused = "find_unused_parameters=True"
        if late := sorted(trained - self._trained):
            within = f", with {unused}," if self._wrapper in ("mk.ddp", "mk.fully_shard") else ""
            raise ValueError(
                f"{late[0]} was frozen when {self._wrapper} wrapped the module, and trains now: its gradient would not "
                f"be synchronized. Wrap the module while it trains{within} and then freeze it until it is to train"
            )
        frozen = sorted(self._trained - trained)
        if frozen and trained and not self._allows_unused:
            raise ValueError(
                f"{frozen[0]} was frozen after {self._wrapper} had wrapped the module, and the ranks wait for its "
                f"gradient: {self._wrapper}(module, {unused}) allows that, or freeze it first"
            )
