"""Every exercise does what it promises: its solution passes, its stub is told so, each wrong answer gets its hint."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

import mpkit
from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from mpkit.course.exercise_text import read_text
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
    "attention-by-heads": [
        ("r = ctx.world_size, ctx.rank", "r = ctx.world_size, ctx.world_size - 1 - ctx.rank")
    ],
    "sequence-parallel": [
        (
            "normed = F.layer_norm(x, x.shape[-1:], f(ctx, weight), f(ctx, bias))",
            "centered = x - x.mean(-1, keepdim=True)\n    spread = (centered**2).mean(-1, keepdim=True) + 1e-5\n"
            "    normed = centered / spread.sqrt() * f(ctx, weight) + f(ctx, bias)",
        )
    ],
}
"""Right answers whose ranks take other parts than the solution's (strided, or in another order), or that spell out what
the solution calls, and so keep more."""


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


FORGETS_THE_MASK = """
def ulysses(ctx, q, k, v):
    n = ctx.world_size

    def to_heads(x):
        b, s, H, d = x.shape
        parts = x.reshape(b, s, n, H // n, d).permute(2, 0, 1, 3, 4).contiguous()
        return exchange(ctx, parts).permute(1, 0, 2, 3, 4).reshape(b, n * s, H // n, d)

    q, k, v = map(to_heads, (q, k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    b, s, h, d = o.shape
    got = exchange(ctx, o.reshape(b, n, s // n, h, d).transpose(0, 1).contiguous())
    return got.permute(1, 2, 0, 3, 4).reshape(b, s // n, n * h, d)
"""


def test_a_forgotten_mask_is_told_in_another_style(room: Room) -> None:
    entry = find("ulysses")
    checked = judge(entry, answer(entry, FORGETS_THE_MASK, "no mask"), room, draw=False)
    assert checked.mistake == "not-causal" and "position 0" in checked.hint, str(checked)


TEXT = """# Add

Add {N} numbers.

## Start

Begin.

## Mistake: a-product

1. What does a sum do?
2. It adds:
   a plus.

```diff
-    return a + b
+    return a * b
```

## Otherwise

1. Try it.
"""
BROKEN = {
    "a number is missing": ("1. What", "What", 11, "a hint begins with its number"),
    "the solution changed": ("-    return a + b", "-    return b + a", 16, "are not in the solution"),
    "not unique": ("-    return a + b\n", " \n", 16, "times in the solution; add a line around them"),
    "no place": ("-    return a + b\n", "", 16, "which line of the solution comes before?"),
    "no diff": ("+    return a * b", "return a * b", 17, "begins with a blank, a minus or a plus"),
    "no wrong answer": ("```diff", "```", 15, "'a-product' has no wrong answer"),
    "another section": ("## Otherwise", "## Other", 20, "there is no section 'Other'"),
    "another constant": ("{N}", "{M}", 3, "{M} is a constant of add.py, which does not define it"),
    "no title": ("# Add", "Add", 1, "the first line is the title"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_in_a_text_file_names_its_line(tmp_path: Path, case: str) -> None:
    """Also the whole file is read as it is meant, with the module's constants."""
    module, path = ModuleType("add"), tmp_path / "add.md"
    vars(module).update(N=2)
    solution = "def add(a, b):\n\n    return a + b\n\n\n"
    path.write_text(TEXT, encoding="utf-8")
    text = read_text(path, module, solution)
    assert (text.title, text.task, text.start, text.otherwise) == (
        "Add",
        "Add 2 numbers.",
        "Begin.",
        ("Try it.",),
    )
    (mistake,) = text.mistakes
    assert mistake.hints == ("What does a sum do?", "It adds: a plus.")
    assert mistake.wrong == "def add(a, b):\n\n    return a * b\n"
    before, after, line, why = BROKEN[case]
    path.write_text(TEXT.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"add.md:{line}: ") + f".*{re.escape(why)}"):
        read_text(path, module, solution + "\n    \n" * (case == "not unique"))
