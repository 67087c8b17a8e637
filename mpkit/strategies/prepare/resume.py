"""Checks of checkpoints before any rank starts: where to save them, and whether training can resume from one."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from mpkit.strategies.checkpoint.files import PARTIAL, CheckpointSaving, Resume, candidates, read_head
from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, DamagedCheckpoint
from mpkit.strategies.checkpoint.parts import SavedParts
from mpkit.strategies.data.batches import check_integer
from mpkit.strategies.prepare.optimizer import OptimizerTraits

EXAMPLE = 'checkpoint_every=100, checkpoint_dir="checkpoints"'


def check_saving(every: Any, folder: Any, keep: Any) -> CheckpointSaving | None:
    """Return when and where to save checkpoints; None: never."""
    if every is None and folder is None:
        return None
    if every is None or folder is None:
        given = "checkpoint_dir" if every is None else "checkpoint_every"
        raise ValueError(f"{given} alone: checkpoints need both a number of steps and a folder: {EXAMPLE}")
    steps = check_integer("checkpoint_every", every, 1, 100)
    keep = check_integer("checkpoint_keep", keep, 1, 2)
    path = _path("checkpoint_dir", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.listdir(path)
        probe = tempfile.TemporaryDirectory(
            prefix="probe-", suffix=PARTIAL, dir=path, ignore_cleanup_errors=True
        )
        probe.cleanup()
    except OSError as error:
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} cannot be written to ({error.strerror or error}): a folder that every "
            f"rank can write to is wanted, such as {EXAMPLE}"
        ) from None
    return CheckpointSaving(steps, str(path), keep)


def name_training(saving: CheckpointSaving, resume: Resume | None) -> CheckpointSaving:
    """Return where to save, and by what name: that of the training that is resumed, if it goes on in its own folder."""
    if resume is None or not os.path.samefile(Path(resume.path).parent, saving.folder):
        return replace(saving, training=uuid4().hex)
    return replace(saving, training=resume.head.training or uuid4().hex, resumes=True)


def _path(name: str, value: Any) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except (TypeError, RuntimeError):
        raise ValueError(f"{name}={value!r}: a path is wanted, such as {name}='checkpoints'") from None


# ---- which checkpoint ----------------------------------------------------------------------------------------


def find_checkpoint(resume_from: Any, say: Callable[[str], None] = print) -> Resume:
    """Return the checkpoint at a path, which must be complete, or the newest complete one in a folder of them."""
    path = _path("resume_from", resume_from)
    saves = f"cluster.train(..., {EXAMPLE}) saves them"
    if not path.is_dir():
        raise ValueError(f"resume_from={str(path)!r}: there is no such folder; {saves}")
    if path.name.endswith(PARTIAL):
        raise ValueError(
            f"resume_from={str(path)!r} is a checkpoint whose writing was cut short. The folder above it, "
            f"resume_from={str(path.parent)!r}, gives the newest whole one."
        )
    if (path / HEAD).exists() or any(path.glob("rank-*.pt")):
        try:
            return _whole(path)
        except DamagedCheckpoint as damage:
            raise ValueError(
                f"resume_from={str(path)!r} is a damaged checkpoint: {damage}. "
                f"resume_from={str(path.parent)!r} takes the newest whole one beside it, if there is one."
            ) from None
    damages = []
    for candidate in candidates(path):
        try:
            checkpoint = _whole(candidate)
        except DamagedCheckpoint as damage:
            damages.append(f"{candidate.name}: {damage}")
            continue
        for line in damages:
            say(f"mpkit: passed over a damaged checkpoint, {line}. Going on from {candidate.name}.")
        return checkpoint
    if damages:
        raise ValueError(f"resume_from={str(path)!r}: no checkpoint there is whole. " + "; ".join(damages))
    raise ValueError(f"resume_from={str(path)!r}: no checkpoint is there (step-00000010, say); {saves}")


def _whole(path: Path) -> Resume:
    head = read_head(path)
    SavedParts(path, head.files)  # raises where a file is none that a rank writes
    return Resume(str(path), head)


# ---- does it fit ---------------------------------------------------------------------------------------------


def facts_of(model: nn.Module, examined: OptimizerTraits) -> dict[str, Any]:
    """Return what a checkpoint and a training must have in common: names, shapes and dtypes; the optimizer's kind."""
    parameters = dict(model.named_parameters())
    trained: dict[str, torch.Tensor] = {name: p for name, p in parameters.items() if p.requires_grad}
    others: dict[str, torch.Tensor] = {name: p for name, p in parameters.items() if name not in trained}
    for name, value in model.state_dict(keep_vars=True).items():
        tied = isinstance(value, nn.Parameter) and value.requires_grad
        if name not in parameters and isinstance(value, torch.Tensor) and not tied:
            others[name] = value
    facts = {"optimizer": examined.kind, "states": list(examined.states)}
    return facts | {
        key: {name: _form(value) for name, value in of.items()}
        for key, of in (("trained", trained), ("others", others))
    }


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def take_up(resume: Resume, facts: dict[str, Any], steps: int) -> Resume:
    """Return the checkpoint if this training can resume from it; otherwise raise a ValueError."""
    head, where = resume.head, f"The checkpoint {resume.path}"
    for what, ours in (("trained", facts["trained"]), ("others", facts["others"])):
        _compare(where, head, what, ours)
    theirs = head.facts
    if theirs.get("optimizer") and facts["optimizer"] and theirs["optimizer"] != facts["optimizer"]:
        raise ValueError(
            f"{where} was written with {theirs['optimizer']}, and this training has {facts['optimizer']}, to which its "
            f"states ({', '.join(theirs['states']) or 'none'}) mean nothing. To go on, the same: "
            f"optimizer=lambda params: torch.optim.{theirs['optimizer']}(params, ...); its lr and the like may differ."
        )
    lacking = sorted(set(facts["states"]) - set(theirs.get("states", [])))
    if lacking and theirs.get("optimizer"):
        raise ValueError(
            f"{where} lacks the optimizer state {', '.join(lacking)}, which {facts['optimizer']} keeps as it is set up "
            f"now; it holds {', '.join(theirs['states']) or 'none'}. To go on, set it up as it was then (momentum, "
            "amsgrad and the like)."
        )
    if head.step > steps:
        raise ValueError(
            f"{where} is that of step {head.step}, and steps={steps} counts from the very beginning: "
            f"steps={head.step + steps} would do {steps} more."
        )
    return resume


def _compare(where: str, head: CheckpointHead, what: str, ours: Mapping[str, str]) -> None:
    theirs: Mapping[str, str] = head.facts.get(what, {})
    if dict(theirs) == dict(ours):
        return
    changed = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    differ = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in changed]
    differ += [f"{name} is only there" for name in theirs if name not in ours]
    differ += [f"{name} is only here" for name in ours if name not in theirs]
    more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
    kind = "parameters that are trained" if what == "trained" else "frozen parameters and buffers"
    raise ValueError(
        f"{where} is of another model; its {kind}: {', '.join(differ[:3])}{more}. It goes on with the model that "
        "it was written with, whatever the plan and the number of ranks."
    )
