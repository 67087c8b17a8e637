"""Checkpoints of a training: all ranks write them together, and any other division of the ranks resumes from them.

Saving, after every k-th step:

    collect    what this rank holds (`rank_state`); nothing is gathered
    write      one file per rank (`mpkit.strategies.checkpoint.parts`); one of the ranks writes what several hold
    seal       each rank reads its file back for a digest, and rank 0 collects the digests
    publish    rank 0 gives the checkpoint its name (`mpkit.strategies.checkpoint.files`) and deletes the oldest one

Resuming:

    room       allocate tensors for what this rank needs: other pieces, if the plan is another
    read       its parts of the files, or of the whole that all parts make
    put back   weights, optimizer, loss scale; random states if there are as many ranks
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpkit.errors import MpkitError
from mpkit.strategies.checkpoint.files import (
    CheckpointSaving,
    FolderLock,
    Resume,
    clean,
    digest,
    partial_of,
    publish,
)
from mpkit.strategies.checkpoint.head import CheckpointHead, DamagedCheckpoint
from mpkit.strategies.checkpoint.parts import SavedParts, name_of, write_rank
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.randomness import RandomState, seed_all
from mpkit.strategies.runtime.rank_state import held_entries, put_back, room_for
from mpkit.strategies.stage.shard import HeldPart
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context
    from mpkit.strategies.runtime.train import Training


OTHER_DRAWS = 1_000_003
"""Times the step: added to the seed if random states are not restored, so that no step repeats another's draws."""


class Checkpoints:
    """One rank's part in saving a training and in resuming it."""

    def __init__(self, context: Context, job: TrainJob, axes: MeshAxes, training: Training) -> None:
        self._context, self._job, self._training = context, job, training
        self._record = context.record
        place, self._leads = axes.place, axes.leads
        self._first = place.dp == place.cp == 0 and axes.leads()
        if job.how.saving is None and job.how.resume is None:
            return
        # Plans and digests are sent as objects, for which nccl would need the GPU.
        self._group = dist.new_group(backend="gloo") if context.device.type == "cuda" else None
        if job.how.resume is not None:
            self._resume(job.how.resume)
        if job.how.saving is not None:
            context.comm.barrier()  # every rank has read what is set aside now
            if context.rank == 0:
                folder = Path(job.how.saving.folder)
                self._lock = FolderLock(folder, joins=True)  # held until this process ends
                clean(folder, job.how.first_step)
            context.comm.barrier()

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint after a step, if one is due."""
        saving = self._job.how.saving
        if saving is not None and (step + 1) % saving.every == 0:
            self._training.evidence.wait(step)
            op = self._record.begin(Kind.COMPUTE, "checkpoint")
            try:
                nbytes = self._save(saving, step + 1)
            except OSError as error:
                raise MpkitError(
                    f"The checkpoint of step {step + 1} could not be finished in {saving.folder}: {error}"
                ) from None
            self._record.end(op, nbytes=nbytes)

    def _save(self, saving: CheckpointSaving, step: int) -> int:
        """Save a checkpoint, and return the number of bytes that this rank wrote."""
        context = self._context
        partial = partial_of(Path(saving.folder), step)
        # ---- collect
        state = held_entries(self._training, first=self._first, leads=self._leads)
        drawn = RandomState.now(context.device).pack()
        state[f"random/{context.rank}"] = HeldPart(drawn, tuple(drawn.shape))
        if self._training.after.state:
            kept = pack_kept(self._training.after.state)
            state[f"callback/{context.rank}"] = HeldPart(kept, tuple(kept.shape))
        # ---- write
        file = partial / name_of(context.rank)
        try:
            if context.rank == 0:  # no rank writes before it has heard from this one
                partial.mkdir()
            write_rank(file, self._share_writing(state))
        except OSError as error:
            with suppress(OSError):
                file.unlink()  # its space is wanted
            raise MpkitError(
                f"The checkpoint of step {step} could not be written to {partial}: on rank {context.rank}, {error!r}"
            ) from None
        # ---- seal
        digests = {file.name: digest(file)}
        everybody: list[dict[str, tuple[int, str]]] = [{}] * context.world_size
        dist.gather_object(digests, everybody if context.rank == 0 else None, group=self._group)
        # ---- publish
        if context.rank == 0:
            update = self._training.update
            head = CheckpointHead(
                step=step,
                plan=json.loads(self._job.plan.to_json()),
                world_size=context.world_size,
                facts=self._job.how.facts,
                scaler={"scale": update.scaler.scale, "good": update.scaler.good},
                skipped=update.skipped,
                training=saving.training,
                files={name: told for files in everybody for name, told in files.items()},
            )
            publish(partial, head, saving)
        return sum(nbytes for nbytes, _ in digests.values())

    def _share_writing(self, state: dict[str, HeldPart]) -> dict[str, HeldPart]:
        """Return what this rank writes; ranks that hold the same entries write an equal number of them each."""
        mine = [(name, part.place, part.tensor.numel()) for name, part in state.items()]
        everybody: list[list[Any]] = [[]] * self._context.world_size
        dist.all_gather_object(everybody, mine, group=self._group)
        holders: dict[Any, list[int]] = {}
        for rank, held in enumerate(everybody):
            for key in held:
                holders.setdefault(key, []).append(rank)
        writer = {key: ranks[i % len(ranks)] for i, (key, ranks) in enumerate(holders.items())}
        pairs = zip(mine, state.values(), strict=True)
        return {key[0]: part for key, part in pairs if writer[key] == self._context.rank}

    def _resume(self, resume: Resume) -> None:
        context, head, update = self._context, resume.head, self._training.update
        op = self._record.begin(Kind.COMPUTE, "resume")
        # ---- room
        same_ranks = head.world_size == context.world_size
        random, callback = f"random/{context.rank}", f"callback/{context.rank if same_ranks else 0}"
        try:
            saved = SavedParts(Path(resume.path), head.files)
            state = room_for(self._training, saved)
            for name in (*([random] if same_ranks else ()), *([callback] if callback in saved else ())):
                numel = saved.numel(name)
                state[name] = HeldPart(torch.empty(numel, dtype=torch.uint8), (numel,))
            # ---- read
            for name, part in state.items():
                saved.read(name, part)
        except DamagedCheckpoint as damage:
            raise MpkitError(f"The checkpoint {resume.path} could not be read: {damage}") from None
        # ---- put back
        put_back(self._training, state)
        if callback in state:
            self._training.after.state.update(json.loads(bytes(state[callback].tensor.tolist())))
        if update.scaler.enabled and head.scaler["scale"] != 1.0:
            update.scaler.scale, update.scaler.good = head.scaler["scale"], head.scaler["good"]
        update.skipped = head.skipped
        if same_ranks:
            RandomState.unpack(state[random].tensor, context.device).restore()
        else:
            seed_all(self._job.how.seed + context.rank + OTHER_DRAWS * head.step, context.device)
        self._record.end(op)


def pack_kept(kept: dict[str, Any]) -> torch.Tensor:
    """Return the state of `on_step` as the bytes of a JSON text."""
    try:
        text = json.dumps(kept)
    except (TypeError, ValueError) as error:
        raise MpkitError(
            f"ctx.state is saved in checkpoints, as JSON, and {error}: numbers, strings, lists and dicts of these can "
            "be kept there, such as float(tensor)"
        ) from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
