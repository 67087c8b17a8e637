"""Run by torchrun with 4 ranks on one node: plans of the demo, and runs of the user's own: demo_plans.py OUT PLAN..."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpkit as mk
from mpkit.cli.demo import find_strategy, strategies
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.data.datasets import text_batches


def job() -> dict:
    """The demo's training, smaller."""
    torch.manual_seed(0)
    return {
        "model": GPT(layers=4, width=32, length=16),
        "data": text_batches(8, 16, 2, seed=0),
        "loss": next_token_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=3e-4),
        "steps": 2,
    }


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
    out, names = Path(sys.argv[1]), sys.argv[2:]
    told: dict = {"second_launcher": refusal(lambda: mk.Cluster(4))}
    cluster = mk.Cluster.from_env(device="cpu")
    told["too_many_devices"] = refusal(lambda: mk.Cluster(devices=["cpu"] * 5))
    told["results"] = cluster.run(lambda ctx, x: (ctx.rank, ctx.comm.all_reduce(torch.ones(1)).item() * x), 2)
    plans = {
        name: find_strategy(name, 4, 4).plan for name in strategies() if name != "3d"
    }  # which takes 8 ranks
    plans["3d"] = mk.Plan(pp=2, tp=2, schedule="1f1b", microbatches=4)
    for name in names:
        plan = plans[name]
        run = cluster.train(plan=plan, **job())
        told[name] = {"losses": list(run.losses), "status": run.status, "proof": str(run.proof)}
        if cluster.rank == 0:
            told[name]["bubble"] = run.timeline().bubble
            told[name]["states"] = [rank.state for rank in run.trace.ranks]
    told["weights"] = {key: value.double().sum().item() for key, value in run.state_dict().items()}
    told["elsewhere"] = refusal(run.timeline)
    other = job()
    torch.manual_seed(cluster.rank)
    other["model"] = GPT(layers=4, width=32, length=16)
    told["weights_differ"] = refusal(lambda: cluster.train(plan=mk.Plan.ddp(4), **other))
    told["wrong_size"] = refusal(lambda: cluster.train(plan=mk.Plan.ddp(2), **job()))
    linear = {"loss": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 3}
    torch.manual_seed(0)
    fed = cluster.train(nn.Linear(4, 1), stream(), mk.Plan.ddp(4), show=cluster.rank == 0, **linear)
    told["streamed"] = list(fed.losses)
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
