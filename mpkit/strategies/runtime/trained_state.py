"""The trained weights, as a rank returns them: on the CPU, under the model's own names.

gather    the state as the rank computes with it; parts of what tensor or expert parallelism divides
masters   in 16 bits, instead of each trained weight the part of its fp32 master that this rank updates: bf16 has lost
          two thirds of its digits, and with them what the last steps changed

What several ranks hold alike is returned from the first of them only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mpkit.strategies.stage.shard import MasterPart, PartOfWhole

if TYPE_CHECKING:
    from mpkit.strategies.runtime.train import Training

__all__ = ["TrainedState", "trained_state"]

State = dict[str, Any]
"""Whole tensors, a `PartOfWhole`, a `MasterPart`, or a state of a module's own, by name."""


class TrainedState(NamedTuple):
    """A rank's part of the trained model's state dict, on the CPU; and of the same with averaged weights, if asked."""

    state: State
    averaged: State | None


def trained_state(training: Training, *, averaged: bool) -> TrainedState:
    """Return a rank's part of the trained model; every rank calls it, after the last step."""
    state = _state_of(training)
    if not averaged:
        return TrainedState(state, None)
    state = {name: _copy(value) for name, value in state.items()}  # they may be the model's own memory
    training.update.take_average()
    return TrainedState(state, _state_of(training))


def _state_of(training: Training) -> State:
    # ---- gather
    state: State = {}
    sharded = next(iter(training.sync.stages.values())).sharded
    for name, value in (training.rest | training.sync.state_dict()).items():
        if training.axes.leads(but=sharded.axis_of(name)):
            shard = sharded.shards.get(name)
            state[name] = value if shard is None else PartOfWhole(shard, value)
    return _with_masters(training, state) if training.update.masters.narrow else state


def _with_masters(training: Training, state: State) -> State:
    """Replace trained weights by parts of their masters, under every name that they have."""
    first_of, names = training.first_names, dict[str, list[str]]()
    for name, first in first_of.items():
        names.setdefault(first, []).append(name)
    sync, parts = training.sync, dict[str, MasterPart]()
    held = [pair for stage in sync.stages.values() for pair in stage.named_parameters()]
    trained = {first_of[name] for name, parameter in held if parameter.requires_grad}
    # ---- masters
    for piece in sync.pieces:
        leads = sync.divided or piece.name in state
        if piece.start == piece.end or not leads or not training.axes.leads(but=piece.axis):
            continue
        master = training.update.masters.master_of(piece).detach().cpu().reshape(-1)
        part = MasterPart(tuple(piece.shape), piece.shard, piece.start, master)
        parts |= dict.fromkeys(names[first_of[piece.name]], part)
    return {name: value for name, value in state.items() if first_of.get(name) not in trained} | parts


def _copy(value: Any) -> Any:
    if isinstance(value, PartOfWhole | MasterPart):
        return value._replace(tensor=value.tensor.clone())
    return value.clone() if isinstance(value, Tensor) else value  # a state of a module's own
