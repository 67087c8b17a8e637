"""Count how far a reader follows a plan and a micro-batch through the code: python -m scripts.count_stops.

    plan        the functions of mpkit that are handed the Plan or the ResolvedPlan, from `Cluster.train` to the last
                check: stops, the modules and folders that they lie in, and how often the walk goes back to a folder.
                What is asked of the plan itself (its own methods) is no stop. The rows of the table of checks are one:
                any of them can be read without the others. A function to which a check hands the plan on is a stop.
    forward     the frames of mpkit from the training loop to the model's own forward
    wire        the frames of mpkit from a gradient's hook to torch.distributed
    launch      the functions of mpkit from `Cluster.run(fn)` to fn: those on the stack when the fork server is asked
                for ranks, and those on a rank's when it calls fn, without the decorators of public methods

The walk is that of a real training of a small chain with a pipeline of two stages, and with DDP for the wire.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.process.fork_server import ForkServerClient
from mpkit.strategies.job.job import ResolvedPlan
from mpkit.strategies.prepare.checks import CHECKS, find_rejection
from mpkit.strategies.prepare.prepare import prepare

ROOT = Path(mk.__file__).parent
HOW: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "steps": 1}


class Probe(nn.Linear):
    """A layer that notes the frames above its forward."""

    frames: ClassVar[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and note who called."""
        Probe.frames = list(frames_of(sys._getframe(1), until="step"))
        return super().forward(x)


def frames_of(frame: FrameType | None, until: str) -> Iterator[str]:
    """Yield the functions of mpkit from a frame up to the training loop's."""
    while frame is not None:
        code = frame.f_code
        if Path(code.co_filename).is_relative_to(ROOT):
            yield code.co_qualname if sys.version_info >= (3, 11) else code.co_name
            if code.co_name == until and code.co_filename.endswith("runtime/train.py"):
                return
        frame = frame.f_back


def walk_of_plan(plan: mk.Plan) -> list[tuple[str, str]]:
    """Return (module, function) for each function that is handed the plan, in the order of the first calls."""
    stops: dict[tuple[str, str], None] = {}
    rows = {check.find.__code__ for check in CHECKS}
    ended = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal ended
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        ended = ended or (event == "return" and code is find_rejection.__code__)
        if event != "call" or ended or not path.is_relative_to(ROOT) or code in rows:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(n), (mk.Plan, ResolvedPlan)) for n in names if n != "self"):
            stops.setdefault((path.relative_to(ROOT).as_posix(), code.co_name))

    model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [(torch.ones(4, 4), torch.ones(4, 4))]
    with mk.Cluster(ranks=plan.ranks, device="cpu") as cluster:
        sys.setprofile(note)
        try:
            run = cluster.train(model, data, plan, **HOW)
        finally:
            sys.setprofile(None)
        run.wait()
    return list(stops)


def frames_on_a_rank(ctx: Any, plan: mk.Plan) -> tuple[list[str], list[str]]:
    """Return the frames of a forward, and those of a bucket's all-reduce."""
    from mpkit.strategies.runtime.train import Training

    reduced: list[str] = []
    original = dist.all_reduce

    def watched(*args: Any, **how: Any) -> Any:
        reduced[:] = reduced or frames_of(sys._getframe(1), until="_on_grad_ready")
        return original(*args, **how)

    data = [(torch.ones(4, 4), torch.ones(4, 4))]
    job = prepare(nn.Sequential(Probe(4, 4), Probe(4, 4)), data, plan, ranks=plan.ranks, **HOW)
    training = Training(ctx, job)
    dist.all_reduce = watched
    try:
        training.step(0)
    finally:
        dist.all_reduce = original
    hook = next((i for i, name in enumerate(reduced) if name.endswith("._on_grad_ready")), -1)
    return Probe.frames, reduced[: hook + 1]


def functions_on_stack(frame: FrameType | None) -> list[str]:
    """Return "module: function" of mpkit's functions on a stack, the outermost first."""
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.parent.name != "common":
            found.append(f"{path.relative_to(ROOT)}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def hops_of_launch(cluster: mk.Cluster) -> list[str]:
    """Return the functions from `Cluster.run(fn)` to fn: here, and on a rank."""
    asked: list[str] = []
    tell = ForkServerClient.tell

    def note(self: ForkServerClient, do: str, **command: Any) -> None:
        if do == "launch":
            asked[:] = functions_on_stack(sys._getframe(1))
        tell(self, do, **command)

    ForkServerClient.tell = note  # type: ignore[method-assign]
    try:
        on_rank = cluster.run(lambda ctx: functions_on_stack(sys._getframe(1)))[0]
    finally:
        ForkServerClient.tell = tell  # type: ignore[method-assign]
    return asked + on_rank


def main() -> None:
    """Print the figures."""
    torch.manual_seed(0)
    stops = walk_of_plan(mk.Plan.pipeline("1f1b", 2, 2))
    folders = [str(Path(module).parent) for module, _ in stops]
    visits = [folder for i, folder in enumerate(folders) if i == 0 or folder != folders[i - 1]]
    modules = {module for module, _ in stops}
    print(f"plan: {len(stops)} stops, the table of {len(CHECKS)} checks counted once,")
    print(f"      in {len(modules)} modules and {len(set(folders))} folders;")
    print(f"      {len(visits) - len(set(visits))} times back to a folder")
    for module, function in stops:
        print(f"        {module}: {function}")
    with mk.Cluster(ranks=2, device="cpu") as cluster:
        forward, _ = cluster.run(frames_on_a_rank, mk.Plan.pipeline("1f1b", 2, 2))[0]
        _, wire = cluster.run(frames_on_a_rank, mk.Plan.ddp(2))[0]
        hops = hops_of_launch(cluster)
    print(f"forward: {len(forward) - 1} frames below {forward[-1]}, {' < '.join(forward)}")
    print(f"wire: {len(wire)} frames, {' < '.join(wire)}")
    print(f"launch: {len(hops)} functions in {len({hop.partition(':')[0] for hop in hops})} files")
    for hop in hops:
        print(f"        {hop}")


if __name__ == "__main__":
    main()
