"""Packed documents: right, and balanced.

Documents of all lengths are packed into one sequence, one after another. A token attends to itself and to those before
it in its *own* document: token i of a document has i + 1 keys to attend to.

    documents  4, 12         token     0 1 2 3 | 0 1 2 3 4 5 6 7 8 9 10 11
                             work      1 2 3 4 | 1 2 3 4 5 6 7 8 9 10 11 12        88 in all

n ranks share the sequence. Each has equally many tokens, s/n, and computes their attention. Which tokens does each rank
have? Any choice gives the right result. But all wait for the rank with the most work: two ranks that have a half each,
in order, have 20 and 68 of these, and 44 and 44 is possible.

Return the numbers of each rank's tokens in the sequence, counted from 0. Each document is a multiple of 2n tokens.

Budget: the busiest rank has at most a tenth more work than the mean, and no rank has more than two stretches of
consecutive tokens per document, since a kernel computes a stretch at once.

Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2, for one document.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.observation import Seen


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
    positions = torch.cat([torch.arange(length) for length in documents])
    hidden = ~mk.models.document_mask(positions[None])[0, 0, tokens]
    scores = (q[tokens] @ k.T).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, int((~hidden).sum())


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Attend with this rank's tokens; return these and the result, and log the work."""
    assert callable(answer)
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
        assert seen.trace is not None, "nothing was recorded"
        return max(max(by_step.values()) for by_step in seen.trace.metrics.by_rank(name).values())

    return most_of


def limit(case: Case) -> float:
    """Return a tenth more than the mean."""
    return int(1.1 * sum(mk.attention_work(documents_of(case), 1)) / case.ranks)


def is_slow(seen: Seen, order: str) -> bool:
    """Return whether the busiest rank has as much work as it would have in that order of the whole sequence."""
    work = mk.attention_work(documents_of(seen.case), seen.case.ranks, order)
    return seen.budget == WORK and most("pairs")(seen) == max(work)


def has_the_ends(seen: Seen) -> bool:
    """Return whether the busiest rank has as much work as the last part of each document has."""
    parts = [(length, length // seen.case.ranks) for length in documents_of(seen.case)]
    ends = sum(each * (length - each) + each * (each + 1) // 2 for length, each in parts)
    return seen.budget == WORK and most("pairs")(seen) == ends


EXERCISE = OnRanks(
    solution=deal_tokens,
    cases=(Case(2, 1, {"documents": 2}), Case(3, 5, {"documents": 3}), Case(4, 2, {"documents": 5})),
    play=play,
    expected=expected,
    together=together,
    result="the attention of all tokens",
    budgets=(
        Budget(WORK, most("pairs"), limit),
        Budget(STRETCHES, most("stretches"), lambda case: 2 * case["documents"]),
    ),
    after="14-long-sequences",
    place=25,
    start="Take one document of 8 tokens and two ranks, and write down the work of each token. Cut it into four "
    "chunks. Which two of them are together as much work as the other two?",
    mistakes=(
        Mistake(
            "a-part-in-order",
            (
                "The result is right. Which rank do all the others wait for, and which tokens does it have?",
                "The end of a long document is the most work, and a rank with consecutive tokens has all of it. Give "
                "each rank a chunk with much work and one with little.",
                "In each document: chunk `rank` and chunk `2 * n - 1 - rank` of 2n.",
            ),
            """
            def deal_tokens(documents: list[int], n: int) -> list[list[int]]:
                each = sum(documents) // n
                return [list(range(rank * each, (rank + 1) * each)) for rank in range(n)]
            """,
            when=lambda seen: is_slow(seen, "contiguous"),
        ),
        Mistake(
            "zigzag-over-the-whole",
            (
                "Zigzag order balances one document. Where in the sequence is a token with much work, if there are "
                "several?",
                "An early chunk of the sequence may be the end of a document, and a late one a beginning: the first "
                "chunk with the last is not little work with much. What counts is the place within the document.",
                "Cut each document into 2n chunks, not the sequence.",
            ),
            """
            def deal_tokens(documents: list[int], n: int) -> list[list[int]]:
                c = sum(documents) // (2 * n)
                chunks = [list(range(i * c, (i + 1) * c)) for i in range(2 * n)]
                return [chunks[rank] + chunks[2 * n - 1 - rank] for rank in range(n)]
            """,
            when=lambda seen: is_slow(seen, "zigzag"),
        ),
        Mistake(
            "a-part-of-each-document",
            (
                "Each rank has a part of each document. Which rank has the ends of all of them?",
                "The last part of a document is the most work in each of them, and the last rank has it every time. "
                "Cut a document into 2n chunks, and give each rank two: one from the head, one from the tail.",
            ),
            [
                ("c = length // (2 * n)", "c = length // n"),
                ("for chunk in (rank, 2 * n - 1 - rank):", "for chunk in (rank,):"),
            ],
            when=has_the_ends,
        ),
        Mistake(
            "token-by-token",
            (
                "The work is balanced. How many consecutive tokens does a rank have?",
                "Tokens that are dealt one by one make as many stretches as there are tokens, and attention is then "
                "computed row by row. Deal chunks: two per document are enough.",
            ),
            """
            def deal_tokens(documents: list[int], n: int) -> list[list[int]]:
                work = [i + 1 for length in documents for i in range(length)]
                heaviest_first = sorted(range(len(work)), key=lambda token: -work[token])
                dealt = [[] for _ in range(n)]
                for at, token in enumerate(heaviest_first):
                    round_, place = divmod(at, n)
                    dealt[place if round_ % 2 == 0 else n - 1 - place].append(token)
                return dealt
            """,
            when=lambda seen: seen.budget == STRETCHES,
        ),
        Mistake(
            "whole-documents",
            (
                "Count the tokens of each rank.",
                "Ranks have equally many tokens: everything but attention takes as long as a rank has tokens. Whole "
                "documents have whatever lengths they have, so divide each of them among all ranks.",
            ),
            """
            def deal_tokens(documents: list[int], n: int) -> list[list[int]]:
                dealt, begin = [[] for _ in range(n)], 0
                for length in sorted(documents, reverse=True):
                    min(dealt, key=len).extend(range(begin, begin + length))
                    begin += length
                return dealt
            """,
            when=lambda seen: "the ranks have" in str(seen.got),
        ),
        Mistake(
            "places-within-the-documents",
            (
                "Which tokens do your numbers mean? Is there one that two ranks have?",
                "Tokens are counted through the whole sequence, and yours begin anew in each document. Add where the "
                "document begins.",
            ),
            [("begin += length", "begin += 0")],
            when=lambda seen: "on no rank" in str(seen.got),
        ),
    ),
    otherwise=(
        "Print the work of each rank's tokens for documents 4 and 12 on 2 ranks: 44 each is possible.",
    ),
)
