"""Packed documents: right, and balanced."""

import random

from mpkit.course.author import *


# %% answer
def deal_tokens(documents: list[int], n: int) -> list[list[int]]:
    """Return the tokens of each of n ranks, for documents of these lengths."""
    ### BEGIN SOLUTION
    dealt: list[list[int]] = [[] for _ in range(n)]
    begin = 0
    for length in documents:
        c = length // (2 * n)
        for rank in range(n):
            for chunk in (rank, 2 * n - 1 - rank):
                dealt[rank] += range(begin + chunk * c, begin + (chunk + 1) * c)
        begin += length
    return dealt
    ### END SOLUTION


# %% checks
D = 4
WORK = "pairs of a query and a key on the busiest rank"
STRETCHES = "stretches of consecutive tokens on the rank with most"


def documents_of(case: Case) -> list[int]:
    """Return the lengths of the documents; in the first case those of the text."""
    if case["documents"] == 2:
        return [4, 12]
    draw = random.Random(case.seed)
    return [2 * case.ranks * draw.randint(1, 4) for _ in range(case["documents"])]


def attend(case: Case, tokens: list[int]) -> tuple[Tensor, int]:
    """Return the attention of some tokens, [tokens, D], and their pairs of a query and a key."""
    documents = documents_of(case)
    q, k, v = torch.randn(3, sum(documents), D, generator=case.generator(), dtype=torch.float64)
    place = torch.arange(sum(documents))
    document = place.new_tensor([i for i, length in enumerate(documents) for _ in range(length)])
    hidden = (document[tokens, None] != document) | (place[tokens, None] < place)
    scores = (q[tokens] @ k.T).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, int((~hidden).sum())


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Attend with this rank's tokens; return these and the result, and log the work."""
    dealt = [[int(token) for token in tokens] for tokens in answer(documents_of(case), case.ranks)]
    if len(dealt) != case.ranks:
        return f"tokens for {len(dealt)} ranks, of {case.ranks}"
    mine = sorted(dealt[ctx.rank])
    y, pairs = attend(case, mine)
    ctx.log("pairs", pairs, step=0)
    ctx.log("stretches", sum(token - 1 not in mine for token in mine), step=0)
    return {"tokens": mine, "attention": y}


def together(case: Case, results: list[Any]) -> list[Any]:
    """Put the attention of all ranks together, if each has as many tokens and each token is on one rank."""
    s = sum(documents_of(case))
    tokens = [token for result in results for token in result["tokens"]]
    sizes = [len(result["tokens"]) for result in results]
    if len(set(sizes)) > 1:
        return [f"the ranks have {sizes} tokens"] * case.ranks
    if sorted(tokens) != list(range(s)):
        twice, missing = len(tokens) - len(set(tokens)), len(set(range(s)) - set(tokens))
        return [f"{missing} tokens are on no rank, and {twice} on several"] * case.ranks
    whole = torch.empty(s, D, dtype=torch.float64)
    for result in results:
        whole[result["tokens"]] = result["attention"]
    return [whole] * case.ranks


def expected(case: Case) -> list[object]:
    """Return the attention of the whole sequence."""
    whole, _ = attend(case, list(range(sum(documents_of(case)))))
    return [whole] * case.ranks


def most(name: str) -> Callable[[Seen], float]:
    """Return a measure: the most of this that a rank has logged."""

    def most_of(seen: Seen) -> float:
        assert seen.trace is not None
        return max(max(by_step.values()) for by_step in seen.trace.metrics.by_rank(name).values())

    return most_of


def limit(case: Case) -> float:
    """Return a tenth more than the mean."""
    return int(1.1 * sum(mk.attention_work(documents_of(case), 1)) / case.ranks)


EXERCISE = OnRanks(
    cases=(Case(2, 1, {"documents": 2}), Case(3, 5, {"documents": 3}), Case(4, 2, {"documents": 5})),
    budgets=(
        Budget(WORK, most("pairs"), limit),
        Budget(STRETCHES, most("stretches"), lambda case: 2 * case["documents"]),
    ),
)
