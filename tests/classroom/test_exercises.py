"""Every exercise does what it promises: its solution passes, its stub is told so, each wrong answer gets its hint."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import mpkit
import mpkit as mk
from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from mpkit.course.framework.exercise import Case, Seen
from mpkit.course.framework.kinds import Questions
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import judge
from mpkit.course.relations import find_relation
from mpkit.course.serial_comparison import BesideSerial

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
    ]
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


# ---- Right numbers by serial training: every rank, or one of them, does the work of all.

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


# ---- What is told of wrong answers that no list foresees: relations to the right results that were planted.

CASE = Case(3, 1, {"microbatches": 4, "steps": 3})


def right() -> list[dict[str, Any]]:
    """Results of three ranks: each has its own shard, and all have the same losses."""
    whole = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [{"shard": part, "losses": [0.5, 0.25, 0.125], "count": 6} for part in whole]


def shards(change: Callable[[int, list[Any]], Any]) -> list[dict[str, Any]]:
    """The right results with each rank's shard made by `change` from all of them."""
    results = right()
    parts = [each["shard"] for each in results]
    return [{**each, "shard": change(rank, parts)} for rank, each in enumerate(results)]


def losses(values: list[float]) -> list[dict[str, Any]]:
    return [{**each, "losses": values} for each in right()]


@pytest.mark.parametrize(("got", "name", "words"), [
    (shards(lambda r, parts: 3 * parts[r]), "a-constant-factor", "shard is 3 times what it should be, wherever "
     "it is wrong, and there are 3 ranks."),
    (shards(lambda r, parts: parts[r] / 3), "a-constant-factor", "1/3 times"),
    (shards(lambda r, parts: 9 * parts[r]), "a-constant-factor", "it is applied twice"),
    (shards(lambda r, parts: parts[r] / 4), "a-constant-factor", "4 micro-batches is the case"),
    (shards(lambda r, parts: 0.7 * parts[r]), "a-constant-factor", "shard is 0.7 times what it should be, "
     "wherever it is wrong."),
    (shards(lambda r, parts: -parts[r]), "the-sign", "wrong sign"),
    (shards(lambda r, parts: 0 * parts[r]), "all-zero", "shard is zero"),
    (shards(lambda r, parts: parts[r] * torch.nan), "all-nan", "shard is nan"),
    (shards(lambda r, parts: None), "nothing-there", "shard is None"),
    (shards(lambda r, parts: parts[r].t()), "transposed", "rows and columns"),
    (shards(lambda r, parts: parts[(r + 1) % 3]), "another-ranks", "Rank 0 has what rank 1 should have, and so on"),
    (shards(lambda r, parts: parts[r].flip(0)), "another-order", "the right numbers, in another order"),
    (shards(lambda r, parts: parts[r].flatten()), "another-order", "in another shape"),
    (shards(lambda r, parts: parts[r] + (r == 2)), "some-ranks", "Ranks 0, 1 are right, rank 2 not."),
    (shards(lambda r, parts: parts[r] + r + 1), "some-parts", "Right on every rank: losses, count. Wrong: shard."),
    (losses([0.9, 0.5, 0.25]), "a-step-off", "losses has the right values one step late."),
    (losses([0.25, 0.125, 0.9]), "a-step-off", "one step early"),
    (losses([0.5, 0.3, 0.2]), "right-at-first", "losses[0] is right, and [1] is the first that is not"),
])  # fmt: skip
def test_a_relation_that_was_planted_is_told(got: list[Any], name: str, words: str) -> None:
    relation = find_relation(Seen(CASE, expected=right(), got=got))
    assert relation is not None
    assert relation.name == name and words in relation.words, relation


def test_of_one_number_not_every_factor_is_told() -> None:
    said = [find_relation(Seen(CASE, expected=[2.0] * 3, got=[2.0 * factor] * 3)) for factor in (3.0, 1.2345)]
    assert said[0] is not None and "there are 3 ranks" in said[0].words
    assert said[1] is None


# ---- The table that silent bugs are found by.

SILENT = of_family("silent_bugs")
BUGS = [
    pytest.param(entry, id=entry.name, marks=() if entry is SILENT[0] else pytest.mark.soak)
    for entry in SILENT
]


def table(entry: ExerciseEntry, code: str) -> BesideSerial:
    return mk.beside_serial(
        entry.name, run_cell(code, entry.exercise.name_of_answer, "cell", entry.given_code)
    )


@pytest.mark.parametrize("entry", BUGS)
def test_a_silent_bug_is_silent_and_the_table_shows_it(entry: ExerciseEntry) -> None:
    frame = table(entry, entry.source.stub).frame
    for name in frame.filter(like="loss, rank"):
        losses = frame[name].astype(float).tolist()
        assert losses[-1] < losses[0], "the loss falls"
    assert (frame["weights that differ after it, by"] != "none").all()


@pytest.mark.parametrize("entry", BUGS)
def test_a_mended_program_is_serial_training(entry: ExerciseEntry) -> None:
    frame = table(entry, entry.source.solution).frame
    assert (frame["weights that differ after it, by"] == "none").all(), str(frame)
    assert all((frame[name] == frame["loss, serial"]).all() for name in frame.filter(like="loss, rank"))


def test_what_can_not_be_compared_says_what_can() -> None:
    with pytest.raises(ValueError, match="did you mean 'the-loader'"):
        mk.beside_serial("the-lodaer", print)
    with pytest.raises(ValueError, match=r"mk.beside_serial\('the-loader', train\)"):
        mk.beside_serial("the-loader")
    with pytest.raises(ValueError, match="trains nothing"):
        mk.beside_serial("pass-the-token", print)
    with pytest.raises(mk.RankFailed, match="ZeroDivisionError"):
        mk.beside_serial("the-loader", lambda *_: 1 / 0)
    with pytest.raises(mk.errors.Deadlock, match="wait"):
        mk.beside_serial("the-loader", lambda ctx, *_: ctx.comm.barrier() if ctx.rank else [])
