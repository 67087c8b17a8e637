"""mk.pipeline: a module whose stages are on different ranks, for a loop of one's own.

    divide     an example of a batch shows what goes from stage to stage; each rank keeps the stages that the schedule
               gives it, and drops the weights of the others
    step       runs the schedule on a batch: forwards, backwards, messages (`mpkit.strategies.runtime.pipeline`); the
               gradients of the mean loss over the batch are added to those that there are
    then       optimizer.step(), on each rank its stages

Tied weights that several stages use are updated by the first of these, and sent to the others before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.common.torch_private import _IncompatibleKeys
from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.data.microbatch import batch_size, part, signature, split
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import ForwardDraws
from mpkit.strategies.prepare.copies import copy_model
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.loop import LoopProof
from mpkit.strategies.proof.plain_module import PlainModule
from mpkit.strategies.proof.ranks import HeldTensors, Ranks
from mpkit.strategies.rank_context import Context
from mpkit.strategies.replicas.buffers import broadcast_all
from mpkit.strategies.replicas.tied import TiedWeights
from mpkit.strategies.runtime.pipeline import Pipeline
from mpkit.strategies.runtime.train import place_stages, watch_stages
from mpkit.strategies.stage.gradient_sync import GradientSync, named_parameters
from mpkit.strategies.wrappers.divided import DividedModule, mark_divided, mark_part
from mpkit.strategies.wrappers.wrapper import HeldParameters, check_module, checked_prove, ranks_for
from mpkit.trace.record.silent_recorder import SilentRecorder


@public
def pipeline(
    module: nn.Module, schedule: str | Schedule = ONE_F_ONE_B, *, example: Any, loss: Callable[[Any, Any], Tensor],
    microbatches: int | None = None, virtual_stages: int = 1, recompute: str = "none",
    cut: Sequence[int | str] | None = None, prove: int = 1,
) -> PipelineParallel:  # fmt: skip
    """Divide a module into stages over all ranks, which a schedule runs on micro-batches.

    Every rank calls this at the same time, in a function that `Cluster.run` calls or under torchrun after
    `init_process_group`. Parameters and buffers become the first rank's; then each rank keeps its stages, whose
    parameters it gives to an optimizer. A schedule runs forwards and backwards in an order of its own, so
    `model.step(inputs, targets)` takes the place of a forward, a loss and a backward, as `schedule.step` does in
    torch.distributed.pipelining.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     x, y, _ = torch.ones(4, 2), torch.zeros(4, 2), torch.manual_seed(0)
    ...     module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    ...     model = mk.pipeline(module, "1f1b", example=(x, y), loss=nn.functional.mse_loss)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     before = model.step(x, y)
    ...     optimizer.step()
    ...     return model.step(x, y) < before, list(dict(model.named_parameters()))
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)
    [rank 0] mk.pipeline: equal to plain PyTorch in step 1: gradients within 0
    [(True, ['0.weight', '0.bias']), (True, ['2.weight', '2.bias'])]

    Args:
        module: the whole module; changed in place.
        schedule: its name, as in `mk.Plan`, or a `mk.Schedule`.
        example: (inputs, targets) of a whole batch, of which only the shapes matter, or a list of such pairs if batches
            differ in shape.
        loss: loss(outputs, targets) -> scalar, the mean over the batch.
        microbatches: into how many micro-batches a batch is divided; None for the number of ranks.
        virtual_stages, recompute, cut: as in `mk.Plan`, all of which `Cluster.train` takes.
        prove: the number of first steps whose loss and gradients are compared with plain PyTorch on each rank; 0: none.

    Returns:
        The wrapper. `state_dict()` returns the whole module's on every rank.

    Raises:
        ValueError: there is no process group, the module cannot be divided or has nothing to train, or the schedule
            does not fit the number of ranks.
    """
    _check(module, loss)
    context, comm = ranks_for(module)
    plan = Plan(
        pp=(n := context.world_size), schedule=schedule, microbatches=microbatches or n,
        virtual_stages=virtual_stages, recompute=recompute, cut=cut,
    )  # fmt: skip
    proof = _begin_proof(module, comm, loss, prove)
    broadcast_all(comm, module)
    return PipelineParallel(context, _divide(module, example, plan, loss, context), proof)


def _check(module: Any, loss: Any) -> None:
    check_module(module, "mk.pipeline")
    if not callable(loss):
        raise ValueError(
            f"mk.pipeline(loss={loss!r}): the last stage computes the loss, so it is needed here: "
            "loss=torch.nn.functional.cross_entropy, or any loss(outputs, targets) -> scalar"
        )


def _begin_proof(module: nn.Module, comm: Communicator, loss: Any, steps: int) -> LoopProof | None:
    """Return the proof of the first steps, with a copy of the whole module; None if there are none."""
    if not checked_prove("mk.pipeline", steps):
        return None
    ranks = Ranks("mk.pipeline", comm.ranks, comm.handle)
    return LoopProof("mk.pipeline", ranks, PlainModule(copy_model(module), loss=loss), steps)


def _divide(module: nn.Module, example: Any, plan: Plan, loss: Any, context: Context) -> TrainJob:
    batches = [example] if isinstance(example, tuple) else list(example)
    return prepare(
        module, batches, plan, ranks=plan.pp, steps=len(batches), loss=loss, by_name=context.comm.wire.by_name,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),  # only examined
    )  # fmt: skip


class PipelineParallel(DividedModule):
    """A module whose stages are on different ranks; made by `mk.pipeline`."""

    def __init__(self, context: Context, job: TrainJob, proof: LoopProof | None) -> None:
        super().__init__(job.what.model)
        axes = MeshAxes(context.comm, context.device, job.where.mesh)
        stages, self._rest = place_stages(context, job, axes)
        self._job, self._record, self._comm = job, context.record, axes.communicator_of("pp")
        self._device, self._number = context.device, 0
        self._sync = GradientSync(stages)
        ranks = [self._comm.ranks[place] for place in job.where.schedule.stage_to_rank]
        self._tied = TiedWeights(context, job.where.shared, ranks, self._sync)
        updated = {piece.parameter for piece in self._sync.pieces}
        every = named_parameters(stages).values()
        self._copies = [p for p in every if p not in updated]  # no optimizer has them
        self._pipeline = Pipeline(context, job, axes, self._sync)
        for piece in self._sync.pieces:
            mark_divided(piece.parameter, "parameters", "mk.pipeline")
        self._stale = True  # whether copies of tied weights may be out of date
        self._held = HeldParameters(job.what.model, "mk.pipeline", allows_unused=True)
        if not isinstance(context.record, SilentRecorder):
            watch_stages(context, job, stages)
        self._proof = proof
        if proof is not None:
            pieces = (*self._sync.pieces, *self._sync.frozen)
            parts = {piece.name: piece.part(piece.held) for piece in pieces}
            named = {piece.name: piece.parameter for piece in pieces}
            proof.attach(job.what.model, HeldTensors(named, parts, proof.ranks), listens=False)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank updates, by their names in the whole module, in its order."""
        held = {piece.name: piece.parameter for piece in (*self._sync.pieces, *self._sync.frozen)}
        for name in (name for name in self._job.what.names if name in held):
            yield f"{prefix}.{name}" if prefix else name, held[name]

    # ---- step -----------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any) -> float:
        """Run forwards and backwards of a batch; its gradients are added to those that there are.

        Args:
            inputs, targets: the whole batch, the same on every rank, batch first.

        Returns:
            The mean loss over the batch, on every rank.

        Raises:
            ValueError: no example had these shapes.
        """
        self._held.check()
        self._send_tied()
        if self._proof is not None:
            self._proof.enter((inputs, targets), {})
        heard = ForwardDraws()
        self._pipeline.listen(heard if self._proof is not None and self._proof.active else None)
        microbatches = self._split(inputs, targets)
        before = self._set_aside()
        for copy in self._copies:
            copy.grad = None
        mine = self._record.place()[2] < 0
        with self._record.step(self._number) if mine else self._record.span("pipeline"):
            returned = self._pipeline.step(self._number, microbatches)
            self._tied.sum_gradients()
        self._number += 1
        self._stale = True
        loss = self._divide_by_count(returned, before)
        for piece in self._sync.pieces:
            if piece.held.grad is not None:
                piece.held.grad = mark_part(piece.held.grad)  # other stages have the rest
        if self._proof is not None:
            self._proof.compare_step(loss, heard, partial(StepDraws, self._job.plan, batch_size(inputs)))
        return loss

    def _split(self, inputs: Any, targets: Any) -> list[MicroBatch]:
        size, found = batch_size(inputs), []
        for start, end in split(size, self._job.plan.microbatches):
            which = slice(start, end)
            x, y = part(inputs, which), part(targets, which)
            key = signature(x, y)
            if key not in self._job.where.numbers:
                raise ValueError(
                    f"step was given a batch of {size}, whose micro-batches have shapes that the example had not, so "
                    "nobody knows what goes from stage to stage: mk.pipeline(..., example=[(x, y), (last_x, last_y)]) "
                    "has one batch of each shape; a DataLoader with drop_last=True has one shape"
                )
            found.append(MicroBatch(x, y, key, (end - start) / size))
        return found

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away the existing gradients if this batch's have to be divided by a count first."""
        if self._job.what.nominal is None:
            return []
        aside = [(p.held, p.held.grad) for p in self._sync.pieces if p.held.grad is not None]
        for parameter, _ in aside:
            parameter.grad = None
        return aside

    def _divide_by_count(self, returned: list[float], before: list[tuple[nn.Parameter, Tensor]]) -> float:
        """Return the loss; for one that returns (total, count), divide the gradients by the count."""
        if self._job.what.nominal is None:
            return returned[0]
        total, count = returned
        factor = self._job.what.nominal / count
        for piece in self._sync.pieces:
            if piece.held.grad is not None:
                piece.held.grad.mul_(factor)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total * factor

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Reject a forward by itself: this rank has only a part of the module."""
        raise ValueError(
            "The module's stages are on different ranks, and a schedule runs them: loss = model.step(inputs, targets) "
            "does forward, loss and backward. To evaluate, load model.state_dict() into the module on one rank."
        )

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        return [piece.held.grad for piece in self._sync.pieces if piece.held.grad is not None], []

    def _send_tied(self) -> None:
        """Send tied weights to the stages with copies, where an optimizer may have changed them."""
        if self._stale:
            self._tied.send_weights()
            self._stale = False

    # ---- states ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return the whole module's state on every rank, as copies on the CPU; every rank calls it."""
        self._send_tied()
        mine = self._rest | self._sync.state_dict()
        every = [{name: tensor.detach().to("cpu", copy=True) for name, tensor in mine.items()}]
        if self._comm.size > 1:
            every *= self._comm.size
            dist.all_gather_object(every, every[0], self._comm.handle)
        return {
            prefix + name: next(of_rank[name] for of_rank in every if name in of_rank)
            for name in self._job.what.names
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole module's state, of which each rank takes its stages'.

        Raises:
            ValueError: `assign` is set.
            RuntimeError: names or shapes do not fit, as for any module.
        """
        if assign:
            return super().load_state_dict(state_dict, strict, assign)  # which rejects it
        names = self._job.what.names
        missing = [name for name in names if name not in state_dict]
        unexpected = [name for name in state_dict if name not in names]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict: missing {missing or 'none'}, unexpected {unexpected or 'none'}"
            )
        with torch.no_grad():
            for stage in self._sync.stages.values():
                for name, live in stage.live_state().items():
                    if name in state_dict and isinstance(live, Tensor):
                        live.copy_(state_dict[name])
        self._stale = True
        return _IncompatibleKeys(missing, unexpected)
