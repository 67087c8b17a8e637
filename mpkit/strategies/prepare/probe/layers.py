"""Find the layer whose output for a sample depends on the other samples of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.models.nested import flatten
from mpkit.strategies.prepare.probe.compare import same_rows
from mpkit.strategies.prepare.probe.trial import ProbeTrial

__all__ = ["first_that_differs"]

Calls = list[tuple[str, list[Any]]]


def first_that_differs(trial: ProbeTrial, parts: Sequence[Sequence[int]], tolerance: float) -> str | None:
    """Return the name of the innermost module whose output differs first; None if all are the same."""
    everybody = sorted(i for part in parts for i in part)
    whole = _calls(trial, [everybody])[0]
    split = _calls(trial, parts)
    for i, (name, leaves) in enumerate(whole):
        others = [calls[i] if i < len(calls) else ("", []) for calls in split]
        if any(other[0] != name or len(other[1]) != len(leaves) for other in others):
            return name
        for j, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not same_rows(
                leaf, [other[1][j] for other in others], parts, tolerance
            ):
                return name
    return None


def _calls(trial: ProbeTrial, parts: Sequence[Sequence[int]]) -> list[Calls]:
    """Return, by part, the outputs of each module in the order of the calls."""
    all_calls: list[Calls] = []

    def watch(model: nn.Module) -> None:
        calls: Calls = []
        all_calls.append(calls)

        def hook(name: str) -> Any:
            def record_output(_: nn.Module, __: Any, output: Any) -> None:
                leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flatten(output)[0]]
                calls.append((name, leaves))

            return record_output

        for name, module in model.named_modules():
            module.register_forward_hook(hook(name))

    with torch.no_grad():
        trial.run(parts, watch=watch)
    return all_calls
