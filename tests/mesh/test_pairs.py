"""Parallel training equals serial training, for each pair of features: one run per row of a covering array.

A feature is a model, an axis of the mesh, a stage of ZeRO, an optimizer, ... Each two levels of two features that may
go together occur together in some row. Serial training is `tests/serial.py`, plain PyTorch. What three features do
only together is left to the random trainings of `make soak`.

This is the spine of the tests. Each row trains once, and all that is claimed of a run is checked on that run: losses,
weights, their average and evaluations equal plain PyTorch's; the run's own proof says so; a checkpoint goes on under
another plan; timeline, volumes and diagnosis print and are drawn. For each level, a dry run asks for the same
communication, holds the same states and counts the same FLOPs.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from benchmarks.memory import ResNet
from mpkit.launch.session.run import Run
from mpkit.models import GPT, MLP
from mpkit.plan.schedule import NAMES
from tests.fakes import check_same as check_same_trace
from tests.serial import EXACT, Clusters, Train, Trained, trained
from tests.timeline.test_answers import agrees

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

PEERS = (
    "naive", "gpipe", "looped_bfs", "interleaved_1f1b", "overlapped_1f1b", "zb_h1", "zb_h2", "interleaved_zb",
    "dualpipev",
)  # fmt: skip
"""Schedules that differ from others by their order alone: each is in some row, and not with everything.

`1f1b` has a stage a rank and whole backwards, `zbv` two stages and split ones."""


AXES = ("schedule", "replicas", "tp", "cp")
FEATURES: dict[str, tuple[str, ...]] = {
    "schedule": ("-", "1f1b", "zbv", *PEERS), "replicas": ("-", "ddp", "dp", "hybrid"),
    "tp": ("-", "features", "sequence"), "cp": ("-", "zigzag", "ulysses"),
    "model": ("mlp", "gpt", "no chain", "resnet", "experts"), "zero": ("-", "1", "2", "3"),
    "recompute": ("none", "full", "selective", "every=2"), "microbatches": ("1", "4"),
    "precision": ("fp64", "fp32", "bf16", "fp16"), "offload": ("none", "optimizer", "params"),
    "optimizer": ("sgd", "adamw", "groups"), "loss": ("mean", "counts"),
    "checkpoint": ("-", "saved", "resumed"), "between": ("-", "evaluation, average"),
    "rate": ("constant", "halved"), "clip": ("-", "norm"), "buckets": ("one", "many"), "prefetch": ("1", "0"),
}  # fmt: skip
Level = tuple[str, str]
Row = dict[str, str]

LANGUAGE = ("gpt", "no chain", "experts")
RULES: tuple[Callable[..., bool], ...] = (
    # ---- at most 8 ranks
    lambda schedule, replicas, tp, cp: (
        sum(x != "-" for x in (schedule, replicas, tp, cp)) + (replicas == "hybrid") <= 3
    ),
    # ---- what a Plan refuses
    lambda replicas, schedule: replicas != "dp" or schedule == "-",
    lambda replicas, tp: replicas != "dp" or tp == "-",
    lambda replicas, cp: replicas != "dp" or cp == "-",
    lambda replicas, zero: replicas != "dp" or zero == "-",
    lambda replicas, offload: replicas != "dp" or offload == "none",
    lambda offload, zero: offload != "params" or zero == "3",
    lambda replicas, zero: replicas != "hybrid" or zero != "-",
    # ---- what makes no difference
    lambda zero, replicas, cp: zero == "-" or replicas in ("ddp", "hybrid") or cp != "-",
    # ---- who divides experts
    lambda model, replicas, cp: model != "experts" or replicas in ("ddp", "hybrid") or cp != "-",
    # ---- what a model has to have
    lambda model, cp: cp == "-" or model in LANGUAGE,
    lambda model, tp: tp == "-" or model in LANGUAGE or (model == "mlp" and tp != "sequence"),
    lambda model, recompute: recompute != "selective" or model in LANGUAGE,
    lambda model, recompute: recompute != "every=2" or model != "mlp",
    # A ResNet's statistics of a few samples make its gradients mostly rounding in less than 64 bits.
    lambda model, precision: model != "resnet" or precision == "fp64",
    lambda model, microbatches, replicas: model != "resnet" or microbatches == "1" or replicas == "-",
    # ---- what a schedule has to have
    lambda schedule, microbatches: schedule not in ("interleaved_zb", "dualpipev") or microbatches == "4",
)
READS = [(rule, tuple(inspect.signature(rule).parameters)) for rule in RULES]
READ = {name for _, names in READS for name in names}


def is_allowed(row: Row) -> bool:
    """Whether no rule about features that the row has speaks against it."""
    return all(rule(*map(row.get, names)) for rule, names in READS if row.keys() >= set(names))


def pairs_of(row: Row) -> set[tuple[Level, Level]]:
    """Each two levels of a row, in the order of FEATURES."""
    return set(combinations([(feature, row[feature]) for feature in FEATURES if feature in row], 2))


def complete(row: Row, order: Sequence[str], wanted: set[tuple[Level, Level]]) -> Row | None:
    """Add the features in this order, each at the level with the most wanted pairs; None: there is no such row."""
    if not order:
        return row

    def gain(level: str) -> int:
        new = (order[0], level)
        return sum((new, other) in wanted or (other, new) in wanted for other in row.items())

    for level in sorted(FEATURES[order[0]], key=gain, reverse=True):
        longer = row | {order[0]: level}
        found = complete(longer, order[1:], wanted) if is_allowed(longer) else None
        if found is not None:
            return found
    return None


def covering(tries: int = 6) -> tuple[list[Row], set[tuple[Level, Level]]]:
    """Rows in which each pair of levels occurs, and the pairs that no row can have.

    Each row begins with a pair that none has yet; of some ways to complete it the one with the most new pairs is taken.
    Of the first 60 seeds this one's rows take the fewest ranks.
    """
    draw = random.Random(52)
    levels = [(feature, level) for feature, each in FEATURES.items() for level in each]
    pairs = [pair for pair in combinations(levels, 2) if pair[0][0] != pair[1][0]]
    pairs = [pair for pair in pairs if pair[0][1] not in PEERS or pair[1] == ("microbatches", "4")]
    pairs.sort(key=lambda pair: pair[0][1] not in PEERS)  # so that their rows have other pairs too
    rows, wanted, impossible = [], set(pairs), set()
    for first in pairs:
        if first not in wanted:
            continue
        found: list[Row | None] = []
        for _ in range(tries):
            order = [feature for feature in FEATURES if feature not in dict(first)]
            order.sort(key=lambda feature: (feature not in AXES, feature not in READ, draw.random()))
            found.append(complete(dict(first), order, wanted) if is_allowed(dict(first)) else None)
        rows_with_it = [row for row in found if row is not None]
        if rows_with_it:
            rows.append(max(rows_with_it, key=lambda row: len(pairs_of(row) & wanted)))
            wanted -= pairs_of(rows[-1])
        else:
            impossible.add(first)
    return rows, impossible


def with_new_levels(rows: Sequence[Row]) -> list[Row]:
    """The rows that bring a level which no earlier row has; the levels in PEERS do not count."""
    seen: set[Level] = {("schedule", peer) for peer in PEERS}
    found = []
    for row in rows:
        if not row.items() <= seen:
            found.append(row)
        seen |= row.items()
    return found


ROWS, IMPOSSIBLE = covering()
FEW = with_new_levels(ROWS)
"""The rows of `make test`; CI has all."""

PLAYED = with_new_levels(
    [row for row in ROWS if row["between"] == row["checkpoint"] == "-" and row["model"] != "experts"]
)
"""Rows that a dry run is compared with. It does not save or evaluate, nor does it know what routers choose."""


def test_each_pair_occurs_but_for_those_that_a_rule_forbids() -> None:
    """All pairs are counted anew: 29 are impossible, each by one of the rules."""
    together = set().union(*map(pairs_of, ROWS))
    assert all(is_allowed(row) and list(row.keys() ^ FEATURES.keys()) == [] for row in ROWS)
    missing = [
        ((a, x), (b, y))
        for a, b in combinations(FEATURES, 2) for x in FEATURES[a] for y in FEATURES[b]
        if ((a, x), (b, y)) not in together and x not in PEERS
    ]  # fmt: skip
    assert set(missing) == IMPOSSIBLE
    assert len(missing) == 29, missing
    assert {row["schedule"] for row in ROWS} == {"-", *NAMES}
    assert len(ROWS) <= 37


def scores(outputs: Tensor) -> Tensor:
    """A row of scores per target, in 32 bits where the model computes in 16."""
    logits: Tensor = outputs.flatten(0, -2)
    return logits if logits.dtype == torch.float64 else logits.float()


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores(outputs), targets.flatten())


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores(outputs), targets.flatten(), reduction="sum")


def valid(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


def counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return total(outputs, targets), valid(targets)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(params: Any, eps: float = 1e-6) -> torch.optim.Optimizer:
    """Its eps is far above gradients that are zero but for rounding."""
    return torch.optim.AdamW(params, lr=1e-2, eps=eps)


@mk.optimizer.by_name
def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups by place, number, shape, size and name, with states before the first step."""
    first, *rest = named
    each: list[dict[str, Any]] = [{"params": [first[1]], "lr": 0.02}]
    for i, (name, p) in enumerate(rest):
        decay = 0.0 if p.dim() < 2 or name.endswith("bias") else 0.1
        each.append({"params": [p], "lr": (0.05 + 0.01 * i) / len(named), "weight_decay": decay})
    each[-1]["lr"] = 0.03 / p.numel() ** 0.5
    return torch.optim.Adagrad(each, lr=0.1, initial_accumulator_value=0.1, eps=1e-6)


def halved(step: int) -> float:
    return 0.5**step


def gpt(heads: int = 3, experts: int = 0) -> nn.Module:
    """Its head's weight is the embedding's; 2 ranks divide neither 33 tokens nor 3 heads."""
    model = GPT(vocab=33, layers=2, width=12, heads=heads, length=8, experts=experts)
    model.head.logits.weight = model.embedding.tokens.weight
    return model


class NoChain(nn.Module):
    """A forward of its own, with its input's name, and a parameter that belongs to no block."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.inner, self.gain = gpt(heads), nn.Parameter(torch.rand(33))

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner
        logits: Tensor = inner.head(inner.block1(inner.block0(inner.embedding(ids)))) * self.gain
        return logits


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": lambda: MLP(6, 5, width=9, layers=4), "gpt": gpt, "no chain": NoChain,
    "experts": partial(gpt, experts=4), "resnet": lambda: ResNet(1, 5, width=4, groups=(1, 1, 1)),
}  # fmt: skip


def batches(model: str, loss: str, dtype: torch.dtype, *sizes: int) -> list[Any]:
    """Of a loss that counts, all targets of the last sample and some others are masked."""
    found = []
    for size in sizes:
        if model in LANGUAGE:
            inputs: Any = torch.randint(33, (size, 8))
            targets = torch.randint(33, (size, 8))
        else:
            inputs = torch.randn(size, *((1, 8, 8) if model == "resnet" else (6,)), dtype=dtype)
            targets = torch.randint(5, (size,))
        if loss == "counts":
            targets[-1] = targets.view(size, -1)[1, :3] = -100
        found.append(({"ids": inputs} if model == "no chain" else inputs, targets))
    return found


def plan_of(row: Row) -> mk.Plan:
    """The plan that the row's features make."""
    schedule, tp, cp = row["schedule"], row["tp"], row["cp"]
    return mk.Plan(
        pp=1 if schedule == "-" else 2,
        schedule="naive" if schedule == "-" else schedule,
        virtual_stages=2
        if schedule
        in ("looped_bfs", "interleaved_1f1b", "overlapped_1f1b", "interleaved_zb", "zbv", "dualpipev")
        else 1,
        dp={"-": 1, "hybrid": 4}.get(row["replicas"], 2),
        dp_shard=2 if row["replicas"] == "hybrid" else None,
        data_parallel="dp" if row["replicas"] == "dp" else "ddp",
        zero=0 if row["zero"] == "-" else int(row["zero"]),
        tp=1 if tp == "-" else 2,
        sequence_parallel=tp == "sequence",
        cp=1 if cp == "-" else 2,
        cp_order="zigzag" if cp == "zigzag" else "contiguous",
        cp_method="ulysses" if cp == "ulysses" else "ring",
        microbatches=int(row["microbatches"]),
        recompute=row["recompute"],
        precision="full" if row["precision"] in ("fp64", "fp32") else row["precision"],
        offload=row["offload"],
        bucket_mb=25 if row["buckets"] == "one" else 0.001,
        prefetch=int(row["prefetch"]),
        ep=2 if row["model"] == "experts" else 1,
        etp=1
        if tp == "sequence" and cp in ("zigzag", "ulysses")
        else 2
        if tp != "-" and row["zero"] in "13"
        else None,
        batchnorm="local" if row["model"] == "resnet" and row["microbatches"] != "1" else "sync",
    )


STEPS, SAVED_AT, DECAY = 4, 2, 0.8


def name_of(row: Row) -> str:
    """What is not as in the plainest training."""
    return " ".join(level for feature, level in row.items() if level != FEATURES[feature][0]) or "serial"


@pytest.mark.parametrize("row", [
    pytest.param(row, id=name_of(row), marks=() if row in FEW else pytest.mark.slow) for row in ROWS
])  # fmt: skip
def test_a_row_equals_serial_training(train: Train, clusters: Clusters, tmp_path: Path, row: Row) -> None:
    torch.manual_seed(1)
    plan, kind = plan_of(row), row["model"]
    steps = 2 if row["checkpoint"] == row["between"] == "-" else STEPS
    dtype = torch.float64 if row["precision"] == "fp64" else torch.float32
    model = MODELS[kind](*([4] if row["cp"] == "ulysses" else [])).to(dtype)  # which divides heads
    # Of 7 samples in 4 micro-batches one replica has none of the last; BatchNorm needs some everywhere, DP as many.
    sizes, held = ((8, 8), (8,)) if kind == "resnet" else ((7, 7), (5, 2))
    if row["replicas"] == "dp":
        sizes = (8, 8) if row["microbatches"] == "4" else (6, 6)
    data, held_out = batches(kind, row["loss"], dtype, *sizes), batches(kind, row["loss"], dtype, *held)
    adam = partial(adamw, eps=1e-3) if row["precision"] in NARROW else adamw
    optimizer = {"sgd": sgd, "adamw": adam, "groups": groups}[row["optimizer"]]
    how: dict[str, Any] = {
        "optimizer": optimizer, "max_grad_norm": 0.3 if row["clip"] == "norm" else None,
        "lr_schedule": halved if row["rate"] == "halved" else None,
    }  # fmt: skip
    expected = trained(
        model, data, loss=total, mean=False, count=valid, steps=steps, microbatches=plan.microbatches, decay=DECAY,
        held_out=held_out, dtype=NARROW.get(row["precision"]), **how,
    )  # fmt: skip
    how["loss"] = counts if row["loss"] == "counts" else mean
    between = row["between"] != "-"
    if between:
        how |= {"evaluate": held_out, "every": 2, "ema": DECAY}
    losses: list[float] = []
    before = None
    if row["checkpoint"] != "-":
        # Another plan goes on: this one's checkpoint is read by serial training, or the other way round.
        other = mk.Plan(microbatches=plan.microbatches, precision=plan.precision, batchnorm=plan.batchnorm)
        first, plan = (plan, other) if row["checkpoint"] == "saved" else (other, plan)
        saves = {"checkpoint_every": SAVED_AT, "checkpoint_dir": tmp_path}
        before = train(model, data, first, steps=SAVED_AT, **saves, **how)
        losses = list(before.losses)
        how["resume_from"] = tmp_path
    run = train(model, data, plan, steps=steps, **how)
    found = Trained(
        losses + list(run.losses),
        dict(run.state_dict()),
        dict(run.ema_state_dict()) if between else {},
        [run.metrics["eval loss"][3]] if between else [],
    )
    expected = expected._replace(
        average=expected.average if between else {}, evaluated=expected.evaluated[-1:] if between else []
    )
    check_same(found, expected, model.state_dict(), row["precision"])
    check_proof(run if before is None or row["checkpoint"] == "resumed" else before, row)
    check_pictures(run)
    if row in PLAYED:
        alike = {name: how[name] for name in ("loss", "optimizer", "max_grad_norm")}
        check_dry_run(run, model, data[0], clusters(1), **alike)


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NEAR = {"fp64": (1e-8, 1e-8), "fp32": (1e-4, 1e-5), "fp16": (2e-2, 0.01), "bf16": (3e-2, 0.02)}
"""How near losses are, and weights: as a part of how far training has moved them."""


def check_same(found: Trained, expected: Trained, before: dict[str, Tensor], precision: str) -> None:
    """Compare losses number by number, and weights by how far they are off, together and in float64 one by one."""
    assert list(found.weights) == list(expected.weights)
    near, apart = NEAR[precision]
    for numbers, wanted in ((found.losses, expected.losses), (found.evaluated, expected.evaluated)):
        assert numbers == pytest.approx(wanted, rel=near)
    for values, weights in ((found.weights, expected.weights), (found.average, expected.average)):
        moved, off = [], []
        for name, value in weights.items():
            if precision == "fp64":
                torch.testing.assert_close(values[name], value, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
            moved.append((value.double() - before[name].double()).flatten())
            off.append((values[name].double() - value.to(values[name].dtype).double()).flatten())
        if weights:
            ratio = float(torch.cat(off).norm() / torch.cat(moved).norm())
            assert ratio < apart


def check_proof(run: Run, row: Row) -> None:
    """The run compared its first step with plain PyTorch; a resumed one has no first step."""
    if row["checkpoint"] == "resumed":
        assert str(run.proof).startswith("not verified: "), run.proof
    elif run.plan.batchnorm == "local":
        assert run.proof.why_not.startswith("batchnorm='local' takes statistics"), run.proof
    else:
        assert str(run.proof).startswith("equal to serial training"), run.proof


def check_pictures(run: Run) -> None:
    """A run is printed and drawn, whatever its plan: each rank that computed has a lane, and each byte an axis."""
    timeline = run.timeline()
    step = timeline.step(max(timeline.steps))
    assert "<svg" in step.to_svg()
    assert str(step) and step.diagnose() is not None
    volume = step.comm_volume()
    assert (sum(row.wire for row in volume.rows) > 0) == (run.plan.ranks > 1), str(volume)
    over_groups = [row.ratio for row in volume.rows if (row.axis, row.kind) == ("dp_replicate", "all_reduce")]
    assert over_groups == pytest.approx([1.0] * len(over_groups), abs=0.01), str(volume)


def check_dry_run(run: Run, model: nn.Module, batch: Any, cluster: mk.Cluster, **how: Any) -> None:
    """A run on tensors without content does what the ranks did."""
    shapes = torch.utils._pytree.tree_map(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    fake = mk.trace_fake(lambda: model, run.plan, batch=shapes, steps=len(run.losses), cluster=cluster, **how)
    check_same_trace(run.trace, fake)
    agrees(mk.Timeline.of(fake))
