"""What is told of wrong answers that no list foresees: relations to the right results that were planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpkit.course.framework.exercise import Case, Seen
from mpkit.course.relations import find_relation

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


@pytest.mark.parametrize(
    ("got", "name", "words"),
    [
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
    ],
)  # fmt: skip
def test_a_relation_that_was_planted_is_told(got: list[Any], name: str, words: str) -> None:
    relation = find_relation(Seen(CASE, expected=right(), got=got))
    assert relation is not None
    assert relation.name == name and words in relation.words, relation


def test_of_one_number_not_every_factor_is_told() -> None:
    said = [find_relation(Seen(CASE, expected=[2.0] * 3, got=[2.0 * factor] * 3)) for factor in (3.0, 1.2345)]
    assert said[0] is not None and "there are 3 ranks" in said[0].words
    assert said[1] is None
