"""What a user sees of a mistake: their own line, a sentence, and something to paste."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from mpkit.cli import main
from mpkit.cli.predict import plan_of
from mpkit.common.tracebacks import show_internals
from tests.recipes import sgd
from tests.serial import Clusters

X, Y = torch.randn(8, 4), torch.randn(8, 4)
HOW: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd}


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize(("make", "says"), [
    (lambda: mk.Plan.gpipe(4, microbatch=8), r"did you mean microbatches=8\? Such as:\n    Plan.gpipe"),  # type: ignore[call-arg]
    (lambda: mk.Plan.gpipe(4), r"Plan.gpipe\(\) lacks microbatches"),  # type: ignore[call-arg]
    (lambda: mk.Plan.gpipe(4, chunks=8), "microbatches= is what GPipe.* call chunks"),  # type: ignore[call-arg]
    (lambda: mk.Plan(chunks=8), "microbatches= is what GPipe"),  # type: ignore[call-arg]
    (lambda: mk.Plan.ddp(4, gradient_accumulation_steps=4), "steps of gradient accumulation"),
    (lambda: mk.Plan.gpipe(4, 8, "full"), "takes 2 arguments by position and was given 3"),  # type: ignore[misc]
    (lambda: mk.Plan.dp(), r"Plan.dp\(\) lacks replicas"),
    (lambda: mk.Cluster(), r"mk.Cluster\(\) lacks ranks. Such as:\n    mk.Cluster\(ranks=4\)"),  # type: ignore[call-arg]
])  # fmt: skip
def test_a_call_that_does_not_fit_is_answered_with_one_that_does(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(mk.errors.ArgumentError, match=says) as caught:
        make()
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"loss": None}, r"cluster.train\(\) lacks loss\. Such as:\n    cluster.train\("),
    ({"optim": sgd}, "has no argument optim"),
    ({"epochs": 3}, r"steps=epochs \* len\(data\)"),
    ({"lr": 0.1}, "It is the optimizer's"),
    ({"seed": 2**63}, "seed is at most"),
    ({"steps": 2**31}, "steps is at most"),
    ({"timeout": "5"}, "timeout='5': a number of seconds"),
    ({"timeout": True}, "timeout=True: a number of seconds"),
    ({"timeout": float("nan")}, "timeout=nan"),
    ({"loss": lambda outputs, targets: (outputs - targets).mean() * (1 + 1j)}, "The loss made a complex number"),
    ({"data": [(X.to("meta"), Y)]}, r"inputs of data\[0\] are on the meta device"),
    ({"data": [(X, Y.to_sparse())]}, r"targets of data\[0\] are sparse_coo.*to_dense"),
    ({"data": [(torch.nested.nested_tensor([X[0], X[0, :2]], layout=torch.jagged), Y)]}, "nested tensor"),
    ({"data": ({"a": X}, Y)}, r"data\[0\] is dict, not a pair"),
    ({"data": mk.Batches([(X[0].to("meta"), Y[0])] * 4, 2)}, "inputs of a sample are on the meta"),
    ({"plan": mk.Plan.gpipe(2, 300_000)}, "300000 micro-batches of"),
    ({"plan": mk.Plan.gpipe(4, 300_000)}, r"mk.Cluster\(ranks=4\) fits it"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"), TRAIN, ids=lambda value: str(list(value)) if isinstance(value, dict) else ""
)
def test_train_refuses_before_a_rank_starts(clusters: Clusters, given: dict[str, Any], says: str) -> None:
    how = {"model": layers(), "data": [(X, Y)], "plan": mk.Plan.ddp(2), **HOW, **given}
    how = {name: value for name, value in how.items() if value is not None}
    cluster = clusters(2)
    before = cluster._latest
    with pytest.raises(ValueError, match=says):
        cluster.train(**how)
    assert cluster._latest is before


def test_a_batch_seed_fits_a_generator() -> None:
    with pytest.raises(ValueError, match="at most"):
        mk.Batches([(X[0], Y[0])] * 4, 2, seed=2**63)


@pytest.fixture(autouse=True)
def folded() -> Iterator[None]:
    """Tracebacks as users see them, whatever was asked for before."""
    show_internals(False)
    yield
    show_internals(False)


def places(error: BaseException) -> list[str]:
    """The functions in an exception's traceback, outermost first; this test's own left out."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)][1:]


class Unwilling(nn.Module):
    """Fails on a rank, and not in the dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if torch.distributed.is_initialized():
            raise RuntimeError("unwilling")
        return self.layer(x)


def test_a_traceback_ends_at_the_users_line(clusters: Clusters) -> None:
    cluster = clusters(2)
    for call in (
        lambda: mk.Plan(pp=0),
        lambda: mk.Plan.gpipe(4, stage=2),  # type: ignore[call-arg]
        lambda: mk.Plan.ddp(2, bucket=3),
        lambda: mk.Cluster(ranks=0),
        lambda: mk.simulate(3),  # type: ignore[arg-type]
        lambda: cluster.train(layers(), [(X, Y[:4])], mk.Plan.ddp(2), **HOW),
        lambda: cluster.train(layers(), [(X, Y[:, :3])], mk.Plan.ddp(2), **HOW),
        lambda: cluster.train(layers(), [(X, Y)], mk.Plan.ddp(2)),  # type: ignore[call-arg]
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert places(caught.value) == ["<lambda>"], traceback.format_exception(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        shown = "".join(traceback.format_exception(caught.value))
        assert f"{Path(mk.__file__).parent}/" not in shown


def test_a_mistyped_name_is_answered_at_the_users_line() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'chek'\. Did you mean mk\.check\?") as caught:
        _ = (lambda: mk.chek)()
    assert places(caught.value)[-1] == "<lambda>" and "__getattr__" not in places(caught.value)
    assert not hasattr(mk, "zzz")


def test_the_ranks_own_traceback_has_the_users_frames(clusters: Clusters) -> None:
    run = clusters(2).train(Unwilling(), [(X, Y)], mk.Plan.ddp(2), **HOW)
    for _ in range(2):  # raised again it is as short
        with pytest.raises(mk.RankFailed, match="unwilling") as caught:
            run.wait()
        assert places(caught.value) == []
    message = str(caught.value)
    assert "in forward" in message and "_call_impl" not in message and "stage_work" not in message
    assert "_call_impl" in caught.value.traceback, "all of it is there to look up"


def test_a_mistake_of_mpkit_itself_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise AttributeError("a bug")

    monkeypatch.setitem(broken.__globals__, "__name__", "mpkit.broken")
    monkeypatch.setattr("mpkit.plan.plan.check_plan", broken)
    with pytest.raises(AttributeError) as caught:
        mk.Plan()
    assert "__post_init__" in places(caught.value)


def test_raise_from_and_handling_go_on_as_ever() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            mk.Plan(pp=0)
        except ValueError as error:
            raise RuntimeError("mine") from error
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError) as again:
        try:
            raise KeyError("first")
        except KeyError:
            mk.Plan(pp=0)
    assert isinstance(again.value.__context__, KeyError) and not again.value.__suppress_context__


# ---------------------------------------------------------------- where training cannot be as in plain PyTorch


def test_a_view_is_reduced_as_it_reads_and_a_mean_of_integers_rejected(clusters: Clusters) -> None:
    def conjugate(ctx: mk.Context) -> list[complex]:
        return list(ctx.comm.all_reduce(torch.full((2,), 1 + 2j * (1 + ctx.rank)).conj()).tolist())

    assert clusters(2).run(conjugate) == [[2 - 6j, 2 - 6j]] * 2
    with pytest.raises(mk.RankFailed, match=r'op="mean"\) of torch\.int64.*integers only.*tensor\.float\(\)'):
        clusters(2).run(lambda ctx: ctx.comm.all_reduce(torch.arange(2), op="mean"))


# ---------------------------------------------------------------- the words of a plan in a terminal

SAID = (
    "zero3", "tp2", "cp2", "pp2", "1f1b", "m8", "bf16", "hsdp", "full", "sp", "ep2", "fsdp", "v2", "interleaved_1f1b",
)  # fmt: skip


@given(st.lists(st.sampled_from(SAID), max_size=6), st.randoms())
def test_the_words_of_a_plan_mean_the_same_in_any_order(words: list[str], shuffle: Random) -> None:
    def meaning(said: list[str]) -> mk.Plan | None:
        try:
            return plan_of("+".join(said), 64, 8)
        except ValueError:
            return None

    other = list(words)
    shuffle.shuffle(other)
    assert meaning(words) == meaning(other)


@pytest.mark.parametrize(("arguments", "says"), [
    ("demmo", "mpkit: There is no demmo: did you mean demo?"),
    ("quux", "mpkit: There is no quux: there are demo, watch, launch, open,"),
    ("fits --modle gpt2", "mpkit fits: There is no --modle: did you mean --model?\nSuch as:\n  mpkit fits --model"),
    ("watch --rnks 2 train.py", "There is no --rnks: did you mean --ranks?"),
    ("estimate --model gpt2 --plan ddp --hardware 4x-a10g --json", "There is no --json: there are -h, --help, --"),
    ("advise --model gpt2 --hardware 4x-a10g", "required: --global-batch\nSuch as:\n  mpkit advise --model"),
    ("watch --ranks two train.py --lr 0.1", "mpkit watch: argument --ranks: invalid int value: 'two'"),
    ("launch --gpus", "argument --gpus: expected one argument\nSuch as:\n  mpkit launch --nodes 2"),
])  # fmt: skip
def test_a_command_line_with_a_mistake_is_answered_with_one_that_works(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    assert left.value.code == 2
    assert says in capsys.readouterr().err


NAMES = [
    name
    for name in mk.__all__
    if isfunction(getattr(mk, name)) and name not in ("compare", "mean_loss", "whole_batch_loss")
]


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_do_not_match_are_answered(name: str) -> None:
    """The error names the argument, and no public function leaves that to Python."""
    with pytest.raises(ValueError, match=f"{name}.*no_such_thing|{name}.* lacks "):
        getattr(mk, name)(no_such_thing=1)


# ---- What somebody mistypes is answered by the call itself: what was asked, and what would work.

WEIRD: list[Any] = [
    None, -1, 0, 10**30, 3.5, float("nan"), "x", "", [], (), {}, object(), np.int64(2), True, b"a",
    [1, 2], len,
]  # fmt: skip
GIVEN_BEFORE: list[tuple[Any, ...]] = [(), ("llama3-8b",), ("llama3-8b", mk.Plan(dp=2)), (4,)]
TAKES_ANYTHING = {"Cluster", "demo", "doctor", "watch", "run", "lab"}
"""Calls that start processes, servers or checks of the machine."""
CALLS = [
    name
    for name in mk.__all__
    if callable(getattr(mk, name)) and not inspect.ismodule(getattr(mk, name)) and name not in TAKES_ANYTHING
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_answers_for_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for before in GIVEN_BEFORE:
        for weird in WEIRD:
            try:
                getattr(mk, name)(*before, weird)
            except (ValueError, mk.errors.MpkitError, OSError, ImportError) as error:
                assert str(error), (before, weird)
            except TypeError as error:  # Python's own: how many arguments there are, or what mpkit says
                assert re.search(rf"{name}|argument", str(error)), (before, weird, str(error))


@pytest.mark.parametrize(("make", "says"), [
    (lambda: mk.Plan(cp=4, cp_method=()), r"Did you mean Plan\(cp=4\)"),
    (lambda: mk.Plan(cp=4, cp_method=(None, 2)), r"Did you mean Plan\(cp=4\)"),
    (lambda: mk.hardware("h100", nodes=2, nic=[1]), "nic=25"),  # type: ignore[call-overload]
    (lambda: mk.advise("gpt2", "h100", global_batch=8, sequence=64, by="cost", price="2"), "price=2.5"),  # type: ignore[arg-type]
    (
        lambda: mk.estimate("gpt2", mk.Plan(), "h100", global_batch=8, sequence=64, preset="x"),
        "mk.calibrate",
    ),  # type: ignore[arg-type]
])  # fmt: skip
def test_keywords_of_another_type_are_answered_with_what_works(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
