"""A rank's part of a training: the entries of a checkpoint, and the trained weights that the run returns.

The entries of a checkpoint, by name:

    weight/NAME           a trained parameter, as its optimizer has it: in fp32 where the model is in 16 bits
    model/NAME            any other parameter, and the buffers
    state/KEY/NAME        the optimizer's state KEY for that parameter, element by element
    single/KEY/NAME       a state that is one number, such as Adam's count of steps, in a tensor
    number/KEY/NAME       the same, if the optimizer keeps a plain number
    random/RANK           the random states of a rank
    callback/RANK         what `on_step` keeps on a rank, if anything, as the bytes of a JSON text

Each entry is one tensor of the whole model, to which every rank contributes the elements that it holds.

Ranks return the trained weights on the CPU, under the model's own names, and replicated ones from the first rank only.
In 16 bits, a model has lost two thirds of the digits, and with them the changes of the last steps: there each rank
returns the part of the fp32 masters that it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.strategies.checkpoint.parts import SavedParts
from mpkit.strategies.models.chain import prefix_of
from mpkit.strategies.stage.gradient_sync import Piece
from mpkit.strategies.stage.shard import HeldPart

if TYPE_CHECKING:
    from mpkit.strategies.runtime.train import Training


State = dict[str, HeldPart]

Returned = dict[str, Any]
"""Whole tensors, a `HeldPart`, or a state of a module's own, by name."""


def held_entries(training: Training, *, first: bool, leads: Callable[[str], bool]) -> State:
    """Return this rank's part of the entries of a checkpoint.

    Args:
        first: whether this rank is the first of its replicas, whose buffers are saved.
        leads: whether this rank saves what lies along an axis (`MeshAxes.leads`). Only one tp rank saves parameters
            that tp leaves whole, since ZeRO may divide them elsewhere on the other tp ranks.
    """
    state: State = {}
    update = training.update
    for piece in training.sync.pieces:
        if piece.start == piece.end or not leads(piece.axis):
            continue
        master = update.masters.master_of(piece)
        state[f"weight/{piece.name}"] = piece.part(master)
        states = update.optimizer.state.get(master, {}) if update.optimizer is not None else {}
        for key, value in states.items():
            state |= _state(piece, master, key, value)
    for piece in training.sync.frozen:
        if piece.start < piece.end and leads(piece.axis):
            state[f"model/{piece.name}"] = piece.part(piece.held)
    if first:
        for name, tensor in buffers(training):
            state[f"model/{name}"] = HeldPart(_flat(tensor), tuple(tensor.shape))
    return state


def _state(piece: Piece, master: nn.Parameter, key: str, value: Any) -> State:
    """Return the entry of one of the optimizer's states for a piece."""
    if value is None:
        return {}
    if isinstance(value, (bool, int, float)):
        dtype = torch.float64 if isinstance(value, float) else None  # bool and int have their own
        return {f"number/{key}/{piece.name}": HeldPart(torch.tensor([value], dtype=dtype), (1,))}
    if isinstance(value, Tensor) and value.shape == master.shape and key != "step":
        return {f"state/{key}/{piece.name}": piece.part(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {f"single/{key}/{piece.name}": HeldPart(_flat(value), (1,))}
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise MpkitError(
        f"The optimizer keeps a {key} of {shape} for {piece.name}, of which this rank has {list(master.shape)}: such a "
        "state cannot be divided among ranks, and so is not saved. Optimizers that keep a value an element work, such "
        "as torch.optim.AdamW or SGD."
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous()  # copies only what is not contiguous


def buffers(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of this rank's layers, and the part of the model's state that belongs to no layer."""
    for stage in training.sync.stages.values():
        for prefix, layer in zip(stage.names, stage.layers, strict=True):
            for name, value in layer.state_dict(prefix=prefix_of(prefix), keep_vars=True).items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel():
                    yield name, value
    for name, value in training.rest.items():
        if value.numel():
            yield name, value


def room_for(training: Training, saved: SavedParts) -> State:
    """Allocate tensors for this rank's part of a checkpoint."""
    state: State = {}
    keys: dict[str, list[str]] = {}  # names of the states of each parameter
    for name in saved.names:
        if name.startswith(("state/", "single/", "number/")):
            keys.setdefault(name.split("/", 2)[2], []).append(name)
    for piece in training.sync.pieces:
        if piece.start == piece.end:
            continue
        master = training.update.masters.master_of(piece)
        state[f"weight/{piece.name}"] = _room(piece, master.dtype)
        for name in keys.get(piece.name, []):
            dtype = saved.dtype(name)
            divided = name.startswith("state/")
            state[name] = _room(piece, dtype) if divided else HeldPart(torch.empty(1, dtype=dtype), (1,))
    for piece in training.sync.frozen:
        if piece.start < piece.end:
            state[f"model/{piece.name}"] = _room(piece, piece.held.dtype)
    for name, tensor in buffers(training):
        room = torch.empty(tensor.numel(), dtype=tensor.dtype)
        state[f"model/{name}"] = HeldPart(room, tuple(tensor.shape))
    return state


def _room(piece: Piece, dtype: torch.dtype) -> HeldPart:
    return piece.part(torch.empty(piece.end - piece.start, dtype=dtype))


@torch.no_grad()
def put_back(training: Training, state: State) -> None:
    """Copy what was loaded into the training."""
    update = training.update
    pieces = (piece for piece in training.sync.pieces if piece.start < piece.end)
    masters = {piece.name: update.masters.master_of(piece) for piece in pieces}
    for name, master in masters.items():
        master.copy_(state[f"weight/{name}"].tensor.view(master.shape))
    for name, loaded in state.items():
        kind, *rest = name.split("/", 2)
        if kind in ("state", "single", "number"):
            assert update.optimizer is not None
            _put_state(update.optimizer, masters[rest[1]], kind, rest[0], loaded.tensor)
    for piece in training.sync.frozen:
        if piece.start < piece.end:
            piece.held.copy_(state[f"model/{piece.name}"].tensor.view(piece.held.shape))
    for name, tensor in buffers(training):
        tensor.copy_(state[f"model/{name}"].tensor.view(tuple(tensor.shape)))
    update.renew()


def _put_state(
    optimizer: torch.optim.Optimizer, master: nn.Parameter, kind: str, key: str, value: Tensor
) -> None:
    if kind == "state":
        optimizer.state[master][key] = value.view(master.shape).to(master.device)
    elif kind == "number":
        optimizer.state[master][key] = value.item()
    else:  # torch keeps these on the host, unless one of these options is set
        (group,) = (g for g in optimizer.param_groups if any(p is master for p in g["params"]))
        on_device = group.get("capturable") or group.get("fused")
        optimizer.state[master][key] = value.view(()).to(master.device if on_device else "cpu")


class TrainedState(NamedTuple):
    """A rank's part of the trained model's state dict, on the CPU, and that with averaged weights, if requested."""

    state: Returned
    averaged: Returned | None


def trained_state(training: Training, *, averaged: bool) -> TrainedState:
    """Return a rank's part of the trained model; every rank calls it, after the last step."""
    state = _state_of(training)
    if not averaged:
        return TrainedState(state, None)
    state = {name: _copy(value) for name, value in state.items()}  # may be the model's own memory
    training.update.take_average()
    return TrainedState(state, _state_of(training))


def _state_of(training: Training) -> Returned:
    # ---- gather
    state: Returned = {}
    sharded = next(iter(training.sync.stages.values())).sharded
    for name, value in (training.rest | training.sync.state_dict()).items():
        if training.axes.leads(but=sharded.axis_of(name)):
            shard = sharded.shards.get(name)
            state[name] = value if shard is None else HeldPart.of_shard(shard, value)
    return _with_masters(training, state) if training.update.masters.narrow else state


def _with_masters(training: Training, state: Returned) -> Returned:
    """Replace trained weights by parts of their masters, under all their names."""
    first_of, names = training.first_names, dict[str, list[str]]()
    for name, first in first_of.items():
        names.setdefault(first, []).append(name)
    sync, parts = training.sync, dict[str, HeldPart]()
    held = [pair for stage in sync.stages.values() for pair in stage.named_parameters()]
    trained = {first_of[name] for name, parameter in held if parameter.requires_grad}
    # ---- masters
    for piece in sync.pieces:
        leads = sync.divided or piece.name in state
        if piece.start == piece.end or not leads or not training.axes.leads(but=piece.axis):
            continue
        part = piece.part(training.update.masters.master_of(piece).cpu())
        parts |= dict.fromkeys(names[first_of[piece.name]], part)
    return {name: value for name, value in state.items() if first_of.get(name) not in trained} | parts


def _copy(value: Any) -> Any:
    if isinstance(value, HeldPart):
        return value._replace(tensor=value.tensor.clone())
    return value.clone() if isinstance(value, Tensor) else value  # a state of a module's own
