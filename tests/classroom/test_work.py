"""Right numbers by serial training: every rank, or one of them, does the work of all."""

from __future__ import annotations

from textwrap import dedent

import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import judge

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)"

SERIAL = {
    "data-parallel-loop": f"""
        def train(ctx, model, batches):
            {SGD}
            losses = []
            for inputs, targets in batches:
                loss = F.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses
        """,
    "uneven-batch": """
        def uneven(ctx, model, inputs, targets):
            sizes = ctx.comm.all_gather(torch.tensor([len(inputs)])).tolist()
            most = max(sizes)
            padded = torch.zeros(most, 9, dtype=inputs.dtype)
            padded[: len(inputs)] = torch.cat([inputs, targets], dim=1)
            parts = ctx.comm.all_gather(padded).split(most)
            every = torch.cat([part[:size] for part, size in zip(parts, sizes)])
            loss = F.mse_loss(model(every[:, :6]), every[:, 6:])
            loss.backward()
            return loss.detach()
        """,
    "the-five-exchanges": """
        def five_exchanges(ctx, model, inputs, targets):
            mine = ctx.comm.scatter(inputs)
            for parameter in model.parameters():
                ctx.comm.broadcast(parameter)
            ctx.comm.gather(torch.zeros(len(mine), 3, dtype=mine.dtype))
            ctx.comm.scatter(torch.zeros(len(inputs), 3, dtype=mine.dtype))
            loss = None
            if ctx.rank == 0:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
            for parameter in model.parameters():
                zero = torch.zeros_like(parameter)
                parameter.grad = ctx.comm.reduce(zero if parameter.grad is None else parameter.grad)
            return loss
        """,
}


@pytest.mark.parametrize("name", SERIAL)
def test_work_that_is_not_divided_is_found(name: str, room: Room) -> None:
    entry = find(name)
    value = run_cell(dedent(SERIAL[name]), entry.exercise.name_of_answer, "answer", entry.given_code)
    checked = judge(entry, PackedAnswer.pack(value), room, draw=False)
    assert not checked.passed
    assert checked.mistake == "work-not-divided", checked
    assert all(row.ok for row in checked.rows[:-1])
