"""The copy's weights in a step: those that the ranks' optimizers have updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from mpkit.strategies.proof.whole_step import Elements
from mpkit.strategies.runtime.evidence import digest_of
from mpkit.strategies.wrappers.loop_proof.agreement import Agreement

__all__ = ["HeldElements", "take_divided", "take_replicated"]


class HeldElements(NamedTuple):
    """What a rank's optimizer updates: some elements of a parameter of the module."""

    where: Elements
    tensor: nn.Parameter


@torch.no_grad()
def take_replicated(
    into: Mapping[str, nn.Parameter], held: Mapping[str, HeldElements], ranks: Agreement
) -> None:
    """Copy this rank's weights, which have to be those of all ranks.

    Args:
        into: the copy's parameters, by name.
        held: what this rank's optimizer updates, by name.
        ranks: are told the digests.
    """
    ranks.digests.append({name: digest_of(each.tensor) for name, each in held.items()})
    for name, parameter in into.items():
        parameter.requires_grad_(held[name].tensor.requires_grad).copy_(held[name].tensor)


@torch.no_grad()
def take_divided(
    into: Mapping[str, nn.Parameter], held: Mapping[str, HeldElements], ranks: Agreement
) -> None:
    """Put the weights together from all ranks' elements; every rank calls it.

    Args:
        into: the copy's parameters, by name.
        held: what this rank's optimizer updates, by name.
        ranks: send theirs.
    """
    for name, parameter in into.items():
        part = held.get(name)
        sent = part and (part.where, part.tensor.detach().cpu().reshape(-1), part.tensor.requires_grad)
        every = [each for each in ranks.all(sent) if each is not None and each[1].numel()]
        whole = torch.zeros(parameter.shape, dtype=every[0][1].dtype if every else parameter.dtype)
        filled = torch.zeros(parameter.shape, dtype=torch.bool)
        for where, values, trained in every:
            parameter.requires_grad_(trained)
            known = where.take(filled, values.numel())
            if bool(known.all()) and not torch.equal(where.take(whole, values.numel()), values):
                ranks.findings.append(
                    f"{name} on rank {where.rank} is not what it is on the ranks before it."
                )
            where.put(values, whole)
            where.put(torch.ones_like(values, dtype=torch.bool), filled)
        if not bool(filled.all()):
            ranks.findings.append(f"{name} has elements that no rank updates.")
        parameter.copy_(whole)
