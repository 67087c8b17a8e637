"""Run by a launcher with 4 ranks on one node: a plan, mistakes, and runs of the user's own: one_node.py OUT."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpkit as mk
from tests.nodes.train_plans import job


def stream() -> object:
    """Batches that come one after the other, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def refusal(call: object) -> str:
    """What is said against a call."""
    try:
        call()  # type: ignore[operator]
    except (ValueError, mk.errors.MpkitError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    out = Path(sys.argv[1])
    told: dict = {"second_launcher": refusal(lambda: mk.Cluster(4))}
    cluster = mk.Cluster.from_env(device="cpu")
    told["too_many_devices"] = refusal(lambda: mk.Cluster(devices=["cpu"] * 5))
    told["resized"] = refusal(lambda: cluster.resized(2))
    told["results"] = cluster.run(lambda ctx, x: (ctx.rank, ctx.comm.all_reduce(torch.ones(1)).item() * x), 2)
    run = cluster.train(plan=mk.Plan(dp=4, zero=2), **job())
    told["losses"], told["proof"] = list(run.losses), str(run.proof)
    told["elsewhere"] = refusal(run.timeline)
    other = job()
    torch.manual_seed(cluster.rank)
    for weight in other["model"].parameters():
        nn.init.normal_(weight)
    told["weights_differ"] = refusal(lambda: cluster.train(plan=mk.Plan.ddp(4), **other))
    told["seeds_differ"] = refusal(lambda: cluster.train(plan=mk.Plan.ddp(4), seed=cluster.rank, **other))
    told["wrong_size"] = refusal(lambda: cluster.train(plan=mk.Plan.ddp(2), **job()))
    linear = {"loss": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 3}
    torch.manual_seed(0)
    fed = cluster.train(nn.Linear(4, 1), stream(), mk.Plan.ddp(4), show=cluster.rank == 0, **linear)
    told["streamed"] = list(fed.losses)
    told["bubble"] = fed.timeline().bubble if cluster.rank == 0 else None
    saves = {"checkpoint_dir": out / "saved", "checkpoint_every": 2}
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    cluster.train(model, [(torch.ones(8, 4), torch.ones(8, 1))], mk.Plan(dp=4, zero=1), **saves, **linear)
    resumed = cluster.train(
        model, [(torch.ones(8, 4), torch.ones(8, 1))], mk.Plan.ddp(4), resume_from=out / "saved", **linear
    )
    told["resumed"] = [resumed.first_step, len(resumed.losses)]
    dist.init_process_group("gloo")  # the user's own, which a second cluster joins
    own = mk.Cluster(device="cpu")
    told["joined"] = own.run(lambda ctx: ctx.comm.all_reduce(torch.ones(1)).item())
    each = torch.ones(1)
    dist.all_reduce(each)
    told["still_there"] = each.item()
    (out / f"told{cluster.rank}.json").write_text(json.dumps(told))
