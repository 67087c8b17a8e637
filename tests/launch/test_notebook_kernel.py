"""In a real kernel: functions of cells, tracebacks with their lines, interrupts, the kernel's death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.limits import EVENT, wait_for, wait_until_gone

pytestmark = pytest.mark.soak
Kernel = tuple[KernelManager, BlockingKernelClient]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=EVENT)
    yield manager, client
    client.stop_channels()
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def outputs_until_idle(client: BlockingKernelClient, request: str) -> str:
    """All that a cell printed and raised, as text."""
    found = []
    while True:
        message: dict[str, Any] = client.get_iopub_msg(timeout=EVENT)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            found.append(content["text"])
        elif message["msg_type"] == "error":
            found.append("\n".join([content["ename"], content["evalue"], *content["traceback"]]))
        elif message["msg_type"] == "execute_result":
            found.append(content["data"]["text/plain"])
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return "\n".join(found)


def run_cell(kernel: Kernel, code: str) -> str:
    return outputs_until_idle(kernel[1], kernel[1].execute(code))


SETUP = """
import os, torch, mpkit as mk
cluster = mk.Cluster(2, device="cpu")

class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x

def work(ctx, model):
    print("here is rank", ctx.rank)
    return model(ctx.comm.all_reduce(torch.ones(1))).item()
"""


def test_interrupting_a_cell(kernel: Kernel, tmp_path: Path) -> None:
    run_cell(kernel, SETUP)
    ready = tmp_path / "ready"
    loop = f"""
def spin(ctx):
    ctx.comm.barrier()
    open({str(ready)!r} + str(ctx.rank), "w").write(str(os.getpid()))
    while True: pass
cluster.run(spin)
"""
    request = kernel[1].execute(loop)
    pids = [int(wait_for_text(Path(f"{ready}{rank}"))) for rank in range(2)]
    kernel[0].interrupt_kernel()
    assert "KeyboardInterrupt" in outputs_until_idle(kernel[1], request)
    wait_until_gone(pids)
    assert "[4.0, 4.0]" in run_cell(kernel, "cluster.run(work, Double())")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_kernel_dies(kernel: Kernel, how: signal.Signals) -> None:
    run_cell(kernel, SETUP)
    start = """
from mpkit.models import MLP
run = cluster.train(MLP(4, 2), [(torch.randn(8, 4), torch.randn(8, 2))], mk.Plan.naive_mp(2),
    loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=10**9, show=False)
while not run.pids: pass
print(os.getpid(), *run.pids)
"""
    found = run_cell(kernel, start).split()
    mine, ranks = int(found[0]), [int(pid) for pid in found[1:]]
    os.kill(mine, how)
    wait_until_gone(ranks)


def wait_for_text(path: Path) -> str:
    wait_for(lambda: path.exists() and path.read_text())
    return path.read_text()
