"""Run: the handle on a training that goes on elsewhere."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.launch import Launch
from mpkit.launch.session.run import Run
from mpkit.models import MLP
from tests.limits import PROGRAM
from tests.recipes import sgd

mse = torch.nn.functional.mse_loss


def toy(seed: int = 0) -> tuple[MLP, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    return MLP(6, 3, width=16, layers=5), [(torch.randn(12, 6), torch.randn(12, 3)) for _ in range(3)]


def test_train_returns_at_once_and_leaves_the_caller_alone(cluster: mk.Cluster) -> None:
    model, data = toy()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    run = cluster.train(model, data, mk.Plan.gpipe(4, 3), loss=mse, optimizer=sgd, steps=20)
    assert run.wait() is run
    assert (run.done, run.status, len(run.losses)) == (True, "finished", 20)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert list(run.state_dict()) == list(before)
    assert all(not torch.equal(before[name], value) for name, value in run.state_dict().items())
    model.load_state_dict(run.state_dict())


def test_a_busy_cluster_refuses_and_in_a_notebook_stops_the_earlier_run(
    cluster: mk.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = toy()

    def start(steps: int) -> Run:
        return cluster.train(
            model, data, mk.Plan.naive_mp(4), loss=mse, optimizer=sgd, steps=steps, show=False
        )

    first = start(10**6)
    with pytest.raises(ValueError, match=r"still busy with an earlier run.*run\.stop\(\)"):
        start(1)
    with pytest.raises(ValueError, match=r"helper process this one shares .*still busy"):
        cluster.resized(2).run(lambda ctx: ctx.rank)
    timeline = first.timeline()
    assert "the run goes on" in repr(timeline) and "run.wait()" in " ".join(timeline.notes)
    monkeypatch.setattr("mpkit.launch.session.cluster.in_notebook", lambda: True)
    second = start(3).wait()
    assert first.status == "stopped" and "was stopped after step" in capsys.readouterr().out
    assert (second.status, len(second.losses)) == ("finished", 3)
    assert "goes on" not in repr(second.timeline())


@pytest.mark.alone
def test_interrupting_the_wait_stops_the_run(cluster: mk.Cluster) -> None:
    (model, data), waits = toy(), os.getpid()

    def interrupt(ctx: mk.Context, step: int) -> None:
        if step == 3 and ctx.rank == 1:
            os.kill(waits, signal.SIGINT)

    how = {"loss": mse, "optimizer": sgd, "steps": 1_000_000, "on_step": interrupt}
    with pytest.raises(KeyboardInterrupt) as caught:
        run = cluster.train(model, data, mk.Plan.naive_mp(4), **how)
        run.wait()
    assert {entry.path for entry in caught.traceback} == {Path(__file__)}, "no frame of threading or mpkit"
    assert run.status == "stopped"
    assert cluster.run(lambda ctx: ctx.rank) == [0, 1, 2, 3]


def test_a_mistyped_attribute_is_answered_with_the_nearest_one(cluster: mk.Cluster) -> None:
    model, data = toy()
    run = cluster.train(model, data, mk.Plan.naive_mp(4), loss=mse, optimizer=sgd, steps=1).wait()
    with pytest.raises(AttributeError, match=r"Run has no attribute timelin; did you mean timeline\?"):
        run.timelin  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"Timeline has no attribute buble; did you mean bubble\?"):
        run.timeline().buble  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(cluster, "gpus")


class Faulty(nn.Module):
    """Refuses the batch whose mark is in it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and type(x) is not torch.Tensor:
            return x + 0  # a dry run with fake tensors
        if bool((x > 1e6).any()):
            raise ArithmeticError("the marked batch")
        return x + 0


def test_a_failure_names_step_stage_and_microbatch(cluster: mk.Cluster) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), Faulty(), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    data = [(torch.zeros(8, 4), torch.zeros(8, 4)) for _ in range(3)]
    data[2][0][6:] = 1e9  # step 2, and of four micro-batches number 3
    plan = mk.Plan.gpipe(4, 4, cut=[1, 2, 3])
    run = cluster.train(model, data, plan, loss=mse, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), steps=9)
    with pytest.raises(mk.RankFailed, match="rank 2 of 4 failed in step 2, stage 2, micro-batch 3") as caught:
        run.wait()
    error = caught.value
    assert (error.rank, error.step, error.stage, error.microbatch) == (2, 2, 2, 3)
    assert "ArithmeticError: the marked batch" in error.traceback and "in forward" in error.traceback
    assert run.status == "failed" and len(run.losses) == 2
    with pytest.raises(mk.RankFailed):
        run.state_dict()
    assert run.timeline().world_size == 4


def test_a_trace_that_is_read_while_the_ranks_exit_is_not_taken_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof and the hang watcher read it, in other threads; ranks may go on and exit meanwhile."""
    launch = SimpleNamespace(_trace=None, has_ended=False, folder="the run's")  # stands in for a Launch

    def read_until_the_ranks_have_ended(folder: str) -> str:
        found = "all of it" if launch.has_ended else "a part"
        launch.has_ended = True
        return found

    monkeypatch.setattr(mk.Trace, "read", read_until_the_ranks_have_ended)
    trace: Any = Launch.trace
    assert [trace.fget(launch) for _ in range(3)] == ["a part", "all of it", "all of it"]


PRINTS = """
import sys, threading, time
from mpkit.common.process_wide import silent

class Slow:
    def write(self, text):
        time.sleep(0.0005)
        return len(text)
    def flush(self):
        pass

sys.stdout = Slow()

def prove():
    for _ in range(500):
        with silent():
            time.sleep(0.0002)

proof = threading.Thread(target=prove)
proof.start()
while proof.is_alive():
    print("a", "b", "c")
"""


def test_a_print_while_the_proof_is_silent_does_not_crash() -> None:
    """CPython's print wrote to a stream that the other thread had freed, in three runs of three."""
    subprocess.run([sys.executable, "-c", PRINTS], check=True, timeout=PROGRAM)
