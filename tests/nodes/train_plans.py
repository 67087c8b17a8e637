"""Run by a launcher: trains by several plans, and each rank writes what came of it: train_plans.py OUT PLAN...

"wait" in place of a plan lets the ranks wait until there is a file OUT/go-on.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpkit as mk

PLANS = {
    "ddp": mk.Plan.ddp(4), "pipeline": mk.Plan.pipeline("1f1b", 4, 4),
    "mesh": mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2), "mesh-tp": mk.Plan(dp=2, tp=2, zero=3),
    "wide": mk.Plan.ddp(4),
}  # fmt: skip


def job(width: int = 16) -> dict:
    """A small training, the same in every process."""
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)], nn.Linear(width, 4)
        ),
        "data": [(torch.randn(8, width), torch.randint(0, 4, (8,))) for _ in range(3)],
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "steps": 4,
    }


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    cluster = mk.Cluster(device="cpu")  # the environment says which rank this is
    folder = Path(out)
    told: dict = {"ranks": cluster.run(lambda ctx: (ctx.rank, ctx.world_size))}
    for name in names:
        if name == "wait":
            (folder / f"waits{cluster.rank}").touch()
            while not (folder / "go-on").exists():
                time.sleep(0.02)
            continue
        run = cluster.train(plan=PLANS[name], **job(256 if "wide" in name else 16))
        sums = {key: value.double().sum().item() for key, value in run.state_dict().items()}
        told[name] = {"losses": list(run.losses), "sums": sums, "status": run.status, "proof": str(run.proof)}
        if cluster.rank == 0:
            run.trace.save(folder / f"{name}.mpkit")
    (folder / f"told{cluster.rank}.json").write_text(json.dumps(told))
