"""Every exercise does what it promises: its solution passes, its stub is told so, each wrong answer gets its hint."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

import mpkit
from mpkit.classroom.catalogue import Entry, families, of_family
from mpkit.classroom.framework.room import Answer, Room
from mpkit.classroom.framework.source import run_cell
from mpkit.classroom.judge import judge

KIT = Path(mpkit.__file__).parent
ENTRIES = [entry for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1])]
CLASSROOM = "mpkit/classroom/"
JUDGING = [f"{CLASSROOM}{part}" for part in ("exercises", "framework", "lab", "judge.py")]


def git(*words: str) -> str:
    """What git says of this checkout; "" without git."""
    done = subprocess.run(["git", *words], cwd=KIT.parent, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


HEAD = git("rev-parse", "HEAD").strip()
PASSED = os.environ.get("MPKIT_PASSED")
CHANGED = git("diff", "--name-only", PASSED, "--", *JUDGING).split() if PASSED else []


def is_due(entry: Entry, name: str) -> bool:
    """Whether a wrong answer is tried in the gate: a quarter of them, drawn by the last commit, and all of those whose
    exercise, or what judges it, has changed since the commit that passed (MPKIT_PASSED)."""
    family = f"{CLASSROOM}exercises/{entry.family}/"
    own = (f"{family}{entry.name.replace('-', '_')}.py", f"{family}__init__.py")
    if any(path in own or not path.startswith(JUDGING[0]) for path in CHANGED):
        return True
    return hashlib.sha1(f"{HEAD} {entry.name} {name}".encode()).digest()[0] % 4 == 0


MISTAKES = [
    pytest.param(entry, mistake, marks=() if is_due(entry, mistake.name) else pytest.mark.soak)
    for entry in ENTRIES
    for mistake in entry.exercise.mistakes
]


def answer(entry: Entry, code: str, label: str) -> Answer:
    """What a cell of that code hands in."""
    name = entry.exercise.name_of_answer
    return Answer.of(run_cell(code, name, f"{entry.name} {label}", entry.given))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_solution_passes(room: Room, entry: Entry) -> None:
    checked = judge(entry, answer(entry, entry.source.solution, "solution"), room)
    assert checked.passed, str(checked)
    assert checked.hint == ""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_stub_gets_the_first_hint(room: Room, entry: Entry) -> None:
    assert entry.source.stub != entry.source.plain, "nothing is left for the student to write"
    checked = judge(entry, answer(entry, entry.source.stub, "stub"), room, draw=False)
    assert not checked.passed
    assert checked.hint
    said = str(checked)
    assert "Traceback" not in said
    assert f"{KIT}/" not in said and "site-packages" not in said, "nothing from inside of the kit"


@pytest.mark.parametrize("entry, mistake", MISTAKES, ids=lambda one: one.name)
def test_a_wrong_answer_gets_its_hint(room: Room, entry: Entry, mistake: object) -> None:
    code = entry.source.wrong(mistake)
    wrong = answer(entry, code, mistake.name)
    assert code != entry.source.plain
    checked = judge(entry, wrong, room)
    assert not checked.passed, f"{mistake.name} is not caught"
    assert checked.mistake == mistake.name, str(checked)
    assert checked.hint == mistake.hints[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_exercise_is_whole(entry: Entry) -> None:
    exercise = entry.exercise
    assert len(exercise.mistakes) >= 3
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
    assert all(len(mistake.hints) >= 2 for mistake in exercise.mistakes), "hints get more specific each time"
    assert exercise.start and exercise.otherwise and entry.source.title and entry.source.text


TWICE = """
import torch.distributed as dist

def split_and_average(ctx, model, inputs, targets):
    k = len(inputs) // ctx.world_size
    mine = slice(ctx.rank * k, (ctx.rank + 1) * k)
    F.mse_loss(model(inputs[mine]), targets[mine]).backward()
    for parameter in model.parameters():
        for _ in range(many):
            dist.all_reduce(parameter.grad)
        parameter.grad /= ctx.world_size**many
"""


def test_communication_of_plain_torch_counts(room: Room) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "split-and-average")
    once, twice = (
        judge(entry, answer(entry, TWICE.replace("many", many), "plain torch"), room) for many in "12"
    )
    assert once.passed, str(once)
    assert not twice.passed and "bytes" in twice.rows[-1].what, str(twice)


OTHER_PARTS = {
    "mlp-one-all-reduce": [
        (
            "up.weight.chunk(n, 0)[r], up.bias.chunk(n)[r]",
            "up.weight[n - 1 - r :: n], up.bias[n - 1 - r :: n]",
        ),
        ("down.weight.chunk(n, 1)[r]", "down.weight[:, n - 1 - r :: n]"),
    ],
    "attention-by-heads": [
        ("r = ctx.world_size, ctx.rank", "r = ctx.world_size, ctx.world_size - 1 - ctx.rank")
    ],
}
"""Right answers whose ranks take other parts than the solution's: strided, or in another order."""


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_ranks_may_take_any_part(room: Room, name: str) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == name)
    code = entry.source.plain
    for before, after in OTHER_PARTS[name]:
        assert before in code, code
        code = code.replace(before, after)
    checked = judge(entry, answer(entry, code, "other parts"), room)
    assert checked.passed, str(checked)
