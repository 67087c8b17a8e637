"""The proof in a loop of one's own: the first steps of a wrapped module are compared with plain PyTorch (`prove=`).

    proof           what a wrapper calls before and after a forward, a backward and a step
    plain_copy      the plain module beside the wrapped one: each forward and backward again
    attributes      what modules keep besides parameters and buffers, and where tensors are in what they return
    random_states   the states of random number generators
    gradients       the gradients of a step, heard on their way
    comparison      the gradients of a step, compared
    weights         the copy's weights, from what the ranks' optimizers update
    agreement       ranks tell each other what they found, so all raise the same

It uses torch.distributed alone, and nothing of the strategies.

>>> import mpkit as mk, torch
>>> def train(ctx):
...     model = mk.ddp(torch.nn.Linear(4, 1), prove=1)
...     model(torch.zeros(2, 4)).sum().backward()
>>> with mk.Cluster(ranks=1, device="cpu") as cluster:
...     _ = cluster.run(train)
[rank 0] mk.ddp: equal to plain PyTorch in step 1: gradients within 0
"""

from __future__ import annotations

from typing import Any

__all__ = ["checked_prove"]


def checked_prove(wrapper: str, prove: Any) -> int:
    """Return the number of steps to prove.

    Raises:
        ValueError: it is no number of steps.
    """
    if isinstance(prove, bool) or not isinstance(prove, int) or prove < 0:
        raise ValueError(
            f"{wrapper}(prove={prove!r}): prove is the number of steps, from the first on, that are compared with "
            f"plain PyTorch: {wrapper}(module, ..., prove=2); 0 compares none"
        )
    return prove
