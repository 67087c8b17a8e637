"""What may be given as `prove=`.

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
