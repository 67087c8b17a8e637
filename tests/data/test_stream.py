"""Data that come one batch after the other: read as they are needed, and trained on as a list would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import mpkit as mk
from mpkit.trace import Kind
from tests.recipes import sgd

Clusters = Callable[[int], mk.Cluster]
Batch = tuple[Tensor, Tensor]
HOW: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(i: int, n: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(i)
    return (
        torch.randn(n, 4, dtype=torch.float64, generator=generator),
        torch.randn(n, 2, dtype=torch.float64, generator=generator),
    )


class Source:
    """Gives batches once, and counts them."""

    def __init__(self, batches: int = 10**9, *, fails: int = -1, odd: int = -1) -> None:
        self.given, self._batches, self._fails, self._odd = 0, batches, fails, odd

    def __iter__(self) -> Iterator[Batch]:
        return self.one_by_one()

    def one_by_one(self) -> Iterator[Batch]:
        for i in range(self._batches):
            if i == self._fails:
                raise KeyError("of one's own")
            self.given = i + 1
            yield batch(i, 3 if i == self._odd else 5)


class Samples(IterableDataset[Batch]):
    """Twelve samples, one by one."""

    def __iter__(self) -> Iterator[Batch]:
        return ((batch(i, 1)[0][0], batch(i, 1)[1][0]) for i in range(12))


@pytest.mark.parametrize(
    "plan", [mk.Plan.ddp(2, microbatches=2), mk.Plan.dp(2), mk.Plan.gpipe(2, 2)], ids=repr
)
def test_a_stream_trains_as_a_list_does(clusters: Clusters, plan: mk.Plan) -> None:
    listed = clusters(2).train(net(), [batch(i) for i in range(4)], plan, steps=4, **HOW).wait()
    run = clusters(2).train(net(), Source().one_by_one(), plan, steps=4, **HOW).wait()
    assert run.losses == listed.losses and run.data_digest == listed.data_digest
    assert run.proof.status == listed.proof.status == "equal"
    spans = run.timeline().spans
    assert set(spans["step"][spans["kind"] == Kind.DATA].tolist()) == {0, 1, 2, 3}


def test_no_more_is_read_than_a_few_batches_ahead(clusters: Clusters) -> None:
    source = Source()
    run = clusters(2).train(net(), source.one_by_one(), mk.Plan.ddp(2), steps=10**9, **HOW)
    while len(run.losses) < 3:
        assert not run.done
    given, done = source.given, len(run.losses)
    assert given <= done + 4
    run.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("mpkit-data_reading") and t.is_alive()][
        1:
    ]


def test_random_batches_go_on_where_the_first_ended(clusters: Clusters) -> None:
    def random() -> Iterator[Batch]:
        while True:
            yield torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)

    model = net()
    torch.manual_seed(5)
    run = clusters(1).train(model, random(), steps=4, **HOW).wait()
    torch.manual_seed(5)
    wanted = [mk.data.data_digest(*next(random())) for _ in range(4)]
    assert [ranks[0] for ranks in run.data_digest] == wanted


def test_what_begins_anew_is_gone_through_again(clusters: Clusters) -> None:
    for workers in (0, 1):
        loader = DataLoader(Samples(), batch_size=4, num_workers=workers)
        run = clusters(2).train(net(), loader, mk.Plan.ddp(2), steps=7, **HOW).wait()
        digests = [ranks[0] for ranks in run.data_digest]
        assert digests[:3] == digests[3:6] and digests[6] == digests[0]


def test_too_few_an_error_and_other_shapes_end_the_run(clusters: Clusters) -> None:
    def trained(source: Source) -> mk.RankFailed:
        run = clusters(2).train(net(), source.one_by_one(), mk.Plan.ddp(2), steps=9, **HOW)
        with pytest.raises(mk.RankFailed) as caught:
            run.wait()
        assert (run.status, len(run.losses)) == ("failed", 4)
        return caught.value

    assert "the data ended after 4 batches, and 9 steps take 9: steps=4" in str(trained(Source(4)))
    failed = trained(Source(fails=4))
    assert "the data failed at batch 4: KeyError" in str(failed) and isinstance(failed.__cause__, KeyError)
    assert "batch 4 of the data has the shapes [3, 4] float64" in str(trained(Source(odd=4)))
    with pytest.raises(KeyError):
        clusters(2).train(net(), Source(fails=0).one_by_one(), mk.Plan.ddp(2), **HOW)
    with pytest.raises(ValueError, match="data is empty"):
        clusters(2).train(net(), iter([]), mk.Plan.ddp(2), **HOW)
    with pytest.raises(ValueError, match="weak scaling makes larger batches"):
        mk.scaling(net(), Source().one_by_one(), [1, 2], weak=True, clusters=clusters, **HOW)


def test_a_resumed_training_takes_the_batches_that_come_then(clusters: Clusters, tmp_path: Path) -> None:
    how = {**HOW, "plan": mk.Plan.ddp(2)}
    whole = clusters(2).train(net(), Source().one_by_one(), steps=4, **how).wait()
    clusters(2).train(
        net(), Source().one_by_one(), steps=2, checkpoint_every=2, checkpoint_dir=tmp_path, **how
    ).wait()
    rest = clusters(2).train(net(), Source().one_by_one(), steps=4, resume_from=tmp_path, **how).wait()
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)
