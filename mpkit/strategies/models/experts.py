"""A mixture of experts as a layer: a router, and experts whose weights lie side by side in one tensor.

    route       a token's experts have its k largest probabilities, and these as weights: divided by their sum if k > 1
    balance     what keeps experts equally busy, if wanted: see below
    experts     each computes the tokens that chose it; none is dropped
    combine     the weighted sum over each token's experts
    shared      added to it: an MLP that all tokens visit

`Experts` has the interface of transformers' models: `experts(x, chosen, weights)`, all parameters [E, ...]. For both,
`Plan(ep=n)` divides the first dimension (`mpkit.strategies.experts`).

Sources: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", ICLR 2017;
Fedus et al., "Switch Transformers", JMLR 2022, section 2.1, for k = 1; Dai et al., "DeepSeekMoE", 2024, section 3.2,
for shared experts.

Balanced routing keeps a layer's experts equally busy. All of it depends on all tokens of the batch.

    bias             b_e is added to p_te for the choice of experts, not for the weight; before the next step it moves
                     by the rate: up for experts with fewer rows than the mean, down for those with more
    auxiliary loss   alpha E sum_e f_e P_e: f_e is expert e's share of the rows, P_e the mean of p_te over the tokens
    z-loss           beta mean_t (log sum_e exp x_te)^2 of the router's logits x, which keeps them small

The two losses change the gradients only: the reported loss stays that of the outputs. Their gradients are
p'_te = alpha E f_e / T and x'_te = 2 beta log(sum_e exp x_te) p_te / T. So all that a rank needs of the whole batch is
f and T, and micro-batches and replicas can be summed.

Sources: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; Zoph et al., "ST-MoE", 2022, section 3.1 (z-loss);
Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024 (bias), as in DeepSeek-V3.
`mpkit.strategies.reference.experts.balance` has each in a few lines, and a capacity beyond which choices are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpkit.common.torch_private import FakeTensor


class WholeBatch:
    """The batch of which a layer computes a part: here each forward is a batch of its own.

    `mpkit.strategies.runtime.experts` has the class for micro-batches and replicas.
    """

    loss_scale = 1.0  # factor of the loss, and so of all gradients, with which 16 bits represent them

    def begin(self, layer: MixtureOfExperts) -> None:
        """Move the layer's bias, if this is the first forward of a step."""
        layer.move_bias()

    def share(self, layer: MixtureOfExperts, chosen: Tensor, samples: int) -> BatchShare:
        """Return these tokens as a share of the batch."""
        share = BatchShare(chosen, layer.experts_in_all, self.loss_scale)
        layer.keep_rows(share.rows())
        return share


class BatchShare:
    """The tokens of a forward as a share of their batch; here they are all of it.

    >>> share = BatchShare(torch.tensor([[0, 1], [0, 2], [0, 1]]), E=3)
    >>> share.rows().tolist()
    [3, 2, 1]
    """

    def __init__(self, chosen: Tensor, E: int, loss_scale: float = 1.0) -> None:
        self.chosen, self.E = chosen, E
        self.scale = loss_scale / max(1, len(chosen))  # of gradients of a mean over the batch's T tokens

    def rows(self) -> Tensor:
        """Return the rows of each expert in the whole batch, (E,)."""
        return count_choices(self.chosen, self.E)


def count_choices(chosen: Tensor, E: int) -> Tensor:
    """Return the number of choices of each expert, (E,)."""
    flat = chosen.flatten()
    return torch.zeros(E, dtype=torch.long, device=chosen.device).scatter_add(0, flat, torch.ones_like(flat))


class RouterLosses(torch.autograd.Function):
    """(p, logits) -> p, with the gradients of the auxiliary loss and of the z-loss added in the backward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, logits: Tensor, share: BatchShare, alpha: float, beta: float) -> Tensor:
        """Return p."""
        ctx.share, ctx.alpha, ctx.beta = share, alpha, beta
        ctx.save_for_backward(p, logits)
        return p.view_as(p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of p and of the logits."""
        (p, logits), share = ctx.saved_tensors, ctx.share
        dlogits = None
        # ---- auxiliary loss
        if ctx.alpha:
            rows = share.rows()
            f = rows / rows.sum().clamp(min=1)
            dp = dp + (ctx.alpha * share.E * share.scale * f).to(dp.dtype)
        # ---- z-loss
        if ctx.beta:
            z = logits.logsumexp(-1, keepdim=True)
            dlogits = 2 * ctx.beta * share.scale * z * p
        return dp, dlogits, None, None, None


class MixtureOfExperts(nn.Module):
    """A layer in place of a transformer's MLP: each token visits `top_k` of `experts` MLPs, [..., width] -> the same.

    >>> layer = MixtureOfExperts(width=8, experts=4, top_k=2)
    >>> layer(torch.zeros(2, 3, 8)).shape, layer.experts.up.shape
    (torch.Size([2, 3, 8]), torch.Size([4, 32, 8]))

    Args:
        width: h, the width of the tokens.
        experts: E, the number of experts.
        top_k: k, how many of them each token visits.
        hidden: the width inside an expert; None: 4 h.
        dropout: the dropout rate of the output.
        shared_experts: the number of experts that all tokens visit, besides these.
        aux_loss: alpha, the factor of the auxiliary loss, whose gradient is added in training.
        z_loss: beta, the factor of the z-loss, likewise.
        bias_rate: by how much an expert's bias moves per step; 0: there is no bias.

    Attributes:
        bias, rows: buffers [E], if there is a bias: the bias, and the rows of each expert in the latest step, by which
            the bias moves before the next one.
        batch: the batch of which a forward computes a part: its own, unless ranks or micro-batches divide it. In a loop
            of your own with a loss scale, set `batch.loss_scale` to it.

    Raises:
        ValueError: there are fewer experts than a token visits, or a factor is negative or infinite.
    """

    bias: Tensor
    rows: Tensor

    def __init__(
        self, width: int, experts: int, top_k: int = 2, hidden: int | None = None, dropout: float = 0.0, *,
        shared_experts: int = 0, aux_loss: float = 0.0, z_loss: float = 0.0, bias_rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"MixtureOfExperts(experts={experts}, top_k={top_k}): a token visits top_k different experts, 1 to "
                f"{experts} of them: top_k={min(max(top_k, 1), experts)}"
            )
        for name, value in (("aux_loss", aux_loss), ("z_loss", z_loss), ("bias_rate", bias_rate)):
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"MixtureOfExperts({name}={value}): a factor of 0 or more, such as {name}=0.001"
                )
        self.top_k, self.experts_in_all = top_k, experts
        self.aux_loss, self.z_loss, self.bias_rate = aux_loss, z_loss, bias_rate
        hidden = hidden or 4 * width
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.shared = SharedExperts(width, shared_experts * hidden) if shared_experts else None
        self.dropout = nn.Dropout(dropout)
        if bias_rate:
            self.register_buffer("bias", torch.zeros(experts))
            self.register_buffer("rows", torch.zeros(experts))
        self.batch = WholeBatch()

    @property
    def balance_options(self) -> dict[str, float]:
        """The arguments that make a forward in training depend on all tokens of the batch."""
        names = ("aux_loss", "z_loss", "bias_rate")
        return {name: value for name in names if (value := getattr(self, name))}

    def forward(self, x: Tensor) -> Tensor:
        """[batch, ..., width] -> the same."""
        tokens = x.reshape(-1, x.shape[-1])
        balancing = self.training and bool(self.balance_options)
        if balancing:
            self.batch.begin(self)
        # ---- route
        logits = self.router(tokens)
        p = logits.softmax(-1)
        chosen = (p.detach() + self.bias if self.bias_rate else p).topk(self.top_k).indices
        # ---- balance
        share = self.batch.share(self, chosen, len(x)) if balancing else None
        if share is not None and (self.aux_loss or self.z_loss):
            p = RouterLosses.apply(p, logits, share, self.aux_loss, self.z_loss)  # type: ignore[no-untyped-call]
        weights = p.gather(1, chosen)
        if self.top_k > 1:  # with one expert the quotient is 1, from which a router learns nothing
            weights = weights / weights.sum(-1, keepdim=True)
        # ---- experts, combine
        mixed = self.experts(tokens, chosen, weights).view_as(x)
        # ---- shared
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        return self.dropout(mixed)

    @torch.no_grad()
    def move_bias(self) -> None:
        """Move the bias by the rows of the latest step, once."""
        if self.bias_rate:
            rows = self.rows.long()  # the comparison with the mean is exact in whole numbers
            self.bias += self.bias_rate * torch.sign(rows.sum() - len(rows) * rows)
            self.rows.zero_()

    @torch.no_grad()
    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of each expert in a step, by which the bias moves before the next one."""
        if self.bias_rate:
            self.rows.copy_(rows)


class SharedExperts(nn.Module):
    """Experts that all tokens visit: n of them side by side are one MLP of n times the width, without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """E MLPs: a linear map, a GELU, and a linear map back, without biases."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, width] of each token's experts.

        x [T, width] are the tokens, chosen [T, k] their experts, from 0 to E - 1, and weights [T, k] those of experts.
        """
        counts = count_rows(chosen, len(self.up))
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        parts = x.index_select(0, token).split(counts)
        made = [
            F.linear(F.gelu(F.linear(part, up)), down)
            for part, up, down in zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        weighted = torch.cat(made) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def count_rows(chosen: Tensor, experts: int) -> list[int]:
    """Return the number of rows of each expert; equal ones for fake tensors, which have no values."""
    if isinstance(chosen, FakeTensor) or chosen.is_meta:
        rows = chosen.numel()
        return [rows // experts + (i < rows % experts) for i in range(experts)]
    counts: list[int] = chosen.flatten().bincount(minlength=experts).tolist()
    return counts
