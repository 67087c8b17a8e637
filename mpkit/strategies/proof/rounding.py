"""How far two correct results may be apart, since they round differently.

    first    a few roundings of the largest element, and those of a long sum (`few_of`)
    if that is exceeded, the computation says itself how sensitive it is: the serial step is repeated with every
             operator's inputs and outputs changed at random by one rounding (Monte Carlo arithmetic; Parker, Pierce &
             Eggert, "Monte Carlo Arithmetic", Computing in Science & Engineering, 2000), and how far the repetitions
             are apart is what rounding does to this result

So there is no table of tolerances: a gradient that is zero but for rounding, a deep model in 16 bits and a long sum
each get the tolerance that follows from their own operators.
"""

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import TorchDispatchMode

FEW = 8.0  # roundings of the largest element by which two results may differ without further questions
TERMS = 2**12  # the number of terms from which on kernels sum in blocks, so that errors grow no further
SPREADS = 16.0  # how many times as far as repetitions are from each other two results may be apart
CHUNK = 2**20  # the number of elements that are compared at once, so that they stay in a cache
MANY = 2**24  # of this many factors, those from any place on are as good as new ones

ROUNDS = (
    "add", "sub", "rsub", "mul", "div", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "addr",
    "sum", "mean", "var", "std", "var_mean", "norm", "linalg_vector_norm", "cumsum", "prod", "addcmul", "addcdiv",
    "lerp",
    "exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "pow", "sin", "cos", "tan", "tanh", "sigmoid", "erf",
    "softplus", "gelu", "silu", "mish", "elu", "reciprocal", "logsumexp", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm", "native_group_norm",
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "convolution", "_fused_rms_norm",
    "embedding_dense_backward", "index_add", "scatter_add", "avg_pool2d", "_adaptive_avg_pool2d",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention", "cudnn_convolution", "_cudnn_rnn",
    "nll_loss_forward", "mse_loss", "_weight_norm_interface", "grid_sampler_2d", "upsample_bilinear2d",
    "_cdist_forward", "linear",
)  # fmt: skip
"""Operators that round, by name without a trailing underscore; and those whose name ends in "backward"."""

TF32 = ("convolution", "convolution_backward", "cudnn_convolution", "_cudnn_rnn", "_cudnn_rnn_backward")
"""Operators that cuDNN may compute in TF32, of 10 bits, by torch's default."""

DECOMPOSES = (
    "linalg_", "_linalg_", "geqrf", "orgqr", "ormqr", "cholesky", "triangular_solve", "lu_", "_fft_", "fft_",
)  # fmt: skip
"""How the names of operators begin that decompose, solve or transform, and round too."""


class RoundingMode(TorchDispatchMode):
    """A mode in which every operator that rounds has inputs and outputs that are one rounding off, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random.Random(seed)
        self._seed = seed
        self._factors: dict[tuple[torch.dtype, torch.device, float], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        name = func.overloadpacket.__name__
        rounds = name.rstrip("_") in ROUNDS or name.endswith("backward") or name.startswith(DECOMPOSES)
        if not rounds:
            return func(*args, **(kwargs or {}))
        perturb = partial(self._perturb, name)
        writes = [_is_written(argument) for argument in func._schema.arguments]
        given = [value if written else perturb(value) for value, written in zip(args, writes, strict=False)]
        made = func(*given, **(kwargs or {}))
        for value, written in zip(given, writes, strict=False):
            if written and _rounds(value):
                value.copy_(perturb(value))
        if any(made is value for value in given):
            return made
        return tuple(map(perturb, made)) if isinstance(made, tuple) else perturb(made)

    def _perturb(self, name: str, value: Any) -> Any:
        if not _rounds(value):
            return value
        return value * self._factor(value, eps_of(name, value.dtype, value.device.type))

    def _factor(self, like: Tensor, eps: float) -> Tensor:
        """Return a factor for each element: 1, or one rounding above or below."""
        kind, count = (like.dtype, like.device, eps), like.numel()
        pool = self._factors.get(kind)
        if pool is None or len(pool) < count + min(count, MANY):
            draws = torch.Generator(like.device).manual_seed(self._seed)
            length = max(count + min(3 * count, MANY), 4096)
            off = torch.randint(-1, 2, (length,), generator=draws, dtype=torch.int8, device=like.device)
            pool = self._factors[kind] = 1 + off.to(like.dtype) * eps
        start = self._random.randrange(len(pool) - count)
        return pool[start : start + count].view(like.shape)


def rounded(seed: int | None) -> AbstractContextManager[Any]:
    """Return a context with other roundings, by this seed; with those as they are for None."""
    return nullcontext() if seed is None else RoundingMode(seed)


def _is_written(argument: torch.Argument) -> bool:
    """Return whether an operator writes into an argument; BatchNorm's schemas do not say that they do."""
    return bool(argument.alias_info and argument.alias_info.is_write) or argument.name.startswith("running_")


def eps_of(operator: str, dtype: torch.dtype, device: str) -> float:
    """Return the rounding of an operator.

    >>> eps_of("convolution", torch.float32, "cuda") == 2**-10, eps_of("mm", torch.float32, "cuda") == 2**-23
    (True, True)
    """
    if device == "cuda" and dtype == torch.float32:
        backends = torch.backends
        allowed = backends.cudnn.allow_tf32 if operator in TF32 else backends.cuda.matmul.allow_tf32
        if allowed and (operator in TF32 or "mm" in operator or "linear" in operator):
            return float(torch.finfo(torch.float16).eps)  # which has as many bits
    return float(torch.finfo(dtype).eps)


def _rounds(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def coarsest(*holders: nn.Module | Iterable[Tensor]) -> torch.dtype:
    """Return the floating dtype with the largest rounding among modules' and other tensors; float32 if there is none.

    >>> coarsest(nn.Linear(1, 1).double(), [torch.zeros(1, dtype=torch.bfloat16)])
    torch.bfloat16
    """
    tensors: list[Tensor] = []
    for holder in holders:
        tensors += [*holder.parameters(), *holder.buffers()] if isinstance(holder, nn.Module) else holder
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def few_of(dtype: torch.dtype, terms: int) -> float:
    """Return how far two results may be apart without further questions, relative to their largest element.

    A sum of n terms errs by about sqrt(n) roundings (Higham & Mary, "A New Approach to Probabilistic Rounding Error
    Analysis", SIAM J. Sci. Comput. 2019); kernels accumulate in 32 bits or more. `terms` is the number of elements in
    the batch, over which a gradient is summed.

    >>> few_of(torch.float32, 1024) / torch.finfo(torch.float32).eps
    40.0
    """
    sums = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return FEW * torch.finfo(dtype).eps + sqrt(min(terms, TERMS)) * sums


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors' elements; infinite where only one is nan, or infinities differ.

    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
    0.5
    """
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach(), b.detach()))
    a, b = a.reshape(-1), b.reshape(-1)
    return max(map(_distance, a.split(CHUNK), b.split(CHUNK)), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    if not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):
        return 0.0
    a, b = a.double(), b.double()
    found = (a - b).abs_()
    most = float(found.max())
    if not isfinite(most):
        most = float(found.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0).max())
    return most if isfinite(most) else inf


def largest(tensor: Tensor) -> float:
    """Return the largest finite absolute value of a tensor's elements; 0 if there is none.

    >>> largest(torch.tensor([-2.0, 1.0, torch.inf, torch.nan])), largest(torch.zeros(0))
    (2.0, 0.0)
    """
    tensor = tensor.detach() if tensor.dtype != torch.bool else tensor.double()
    return max(map(_largest, tensor.reshape(-1).split(CHUNK)), default=0.0)


def _largest(tensor: Tensor) -> float:
    values = tensor.abs()
    most = float(values.max()) if values.numel() else 0.0
    return most if isfinite(most) else float(values.where(values.isfinite(), 0.0).max())
