"""Every exercise does what it promises: its solution passes, its stub is told so, each wrong answer gets its hint."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

import mpkit
from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from mpkit.course.framework.kinds import Questions
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import judge

KIT = Path(mpkit.__file__).parent
ENTRIES = [entry for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1])]
MISTAKES = [
    pytest.param(entry, mistake, marks=() if number < 2 else pytest.mark.soak)
    for entry in ENTRIES
    for number, mistake in enumerate(entry.exercise.mistakes)
]


def answer(entry: ExerciseEntry, code: str, label: str) -> PackedAnswer:
    """What a cell of that code hands in."""
    name = entry.exercise.name_of_answer
    return PackedAnswer.pack(run_cell(code, name, f"{entry.name} {label}", entry.given_code))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_solution_passes(room: Room, entry: ExerciseEntry) -> None:
    checked = judge(entry, answer(entry, entry.source.solution, "solution"), room)
    assert checked.passed, str(checked)
    assert checked.hint == ""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_stub_gets_the_first_hint(room: Room, entry: ExerciseEntry) -> None:
    assert entry.source.stub != entry.source.plain, "nothing is left for the student to write"
    checked = judge(entry, answer(entry, entry.source.stub, "stub"), room, draw=False)
    assert not checked.passed
    assert checked.hint
    said = str(checked)
    assert "Traceback" not in said
    assert f"{KIT}/" not in said and "site-packages" not in said, "nothing from inside of the kit"


@pytest.mark.parametrize("entry, mistake", MISTAKES, ids=lambda one: one.name)
def test_a_wrong_answer_gets_its_hint(room: Room, entry: ExerciseEntry, mistake: object) -> None:
    code = mistake.wrong
    wrong = answer(entry, code, mistake.name)
    assert code != entry.source.plain
    drawn = mistake is entry.exercise.mistakes[0]  # beside the solution, which is run for it
    checked = judge(entry, wrong, room, draw=drawn)
    assert not checked.passed, f"{mistake.name} is not caught"
    assert checked.mistake == mistake.name, str(checked)
    assert checked.hint == mistake.hints[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_exercise_is_whole(entry: ExerciseEntry) -> None:
    exercise = entry.exercise
    assert len(exercise.mistakes) >= 3
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
    assert all(len(mistake.hints) >= 2 for mistake in exercise.mistakes), "hints get more specific each time"
    assert exercise.start and exercise.otherwise and entry.text.title and entry.text.task
    if not isinstance(exercise, Questions):
        known = entry.signatures
        assert set(known) == {mistake.name for mistake in exercise.mistakes}, (
            f"mpkit exercises notebooks/exercises --record {entry.name}"
        )
        pairs = [(a, b) for a, b in combinations(known, 2) if known[a].distance(known[b]) == 0.0]
        assert not pairs, "they cannot be told apart"


PLAIN = """
import torch.distributed as dist

def naive_ddp(ctx, model, optimizer, batches):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            for _ in range(many):
                dist.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size**many
        optimizer.step()
"""


def test_communication_of_plain_torch_counts(room: Room) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "naive-ddp")
    once, twice = (
        judge(entry, answer(entry, PLAIN.replace("many", many), "plain torch"), room) for many in "12"
    )
    assert once.passed, str(once)
    assert not twice.passed and "all-reduces" in twice.rows[-2].what, str(twice)


OTHER_WAYS = {
    "mlp-one-all-reduce": [
        (
            "up.weight.chunk(n, 0)[r], up.bias.chunk(n)[r]",
            "up.weight[n - 1 - r :: n], up.bias[n - 1 - r :: n]",
        ),
        ("down.weight.chunk(n, 1)[r]", "down.weight[:, n - 1 - r :: n]"),
    ],
}
"""Right answers whose ranks take other parts than the solution's, strided and in another order."""


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_other_ways_are_right(room: Room, name: str) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == name)
    code = entry.source.plain
    for before, after in OTHER_WAYS[name]:
        assert before in code, code
        code = code.replace(before, after)
    checked = judge(entry, answer(entry, code, "other ways"), room)
    assert checked.passed, str(checked)


def test_a_hang_is_drawn_with_what_the_ranks_wait_in(room: Room) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "pass-the-token")
    code = """
def pass_the_token(ctx, token):
    got = ctx.comm.recv(torch.empty_like(token), (ctx.rank - 1) % ctx.world_size)
    ctx.comm.send(token, (ctx.rank + 1) % ctx.world_size)
    return got
"""
    checked = judge(entry, answer(entry, code, "everybody receives first"), room)
    assert checked.timelines is not None
    spans = checked.timelines["yours"].to_dataframe()
    assert sorted(spans["rank"]) == [0, 1] and set(spans["kind"]) == {"recv"}
    assert spans["end"].nunique() == 1 and (spans["end"] > spans["start"]).all()
    html = checked._repr_mimebundle_()["text/html"]
    assert "never ends" in html and "The solution" in html


def test_a_wrong_schedule_is_drawn_without_the_right_one(room: Room) -> None:
    """The solution's timeline, with its numbers, is the answer: it is drawn beside a right one."""
    entry = find("gpipe")
    wrong = judge(entry, answer(entry, entry.exercise.mistakes[0].wrong, "1F1B"), room)
    right = judge(entry, answer(entry, entry.source.solution, "solution"), room)
    assert not wrong.passed and "target" not in (wrong.timelines or {})
    assert right.passed and list(right.timelines or {}) == ["yours", "target"]
