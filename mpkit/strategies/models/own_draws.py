"""Which ranks draw the same random numbers, and which draw their own.

    the same      for replicated activations (outside tensor parallelism's regions), and for what the parts of a
                  divided activation share: a dropped path of a sample (DropPath), a skipped layer, noise on a weight
    their own     for divided activations: features and heads inside a region, tokens under sequence and context
                  parallelism. Replicas have other samples, and other seeds (`mpkit.strategies.models.randomness`)

A *span* is a stretch of the forward in which activations are divided.

    begin    a rank's generators continue from a seed made from their state, the span's name and the rank's place
    share    inside a span that divides tokens, whatever is drawn for no token comes from the numbers outside
    end      the generators return to where they were, and one draw further if anything was drawn inside

So a forward that is repeated from the same state draws the same numbers, a span draws others the next time, and a span
that draws nothing leaves no trace: the draws outside are those of serial training. A stage that starts in the middle of
a span, since a pipeline cuts through it, begins the span itself (`spans_at`).

If tokens are divided, a rank with a part of each sequence draws for its own tokens, and all ranks share what has no
dimension of tokens. The shape decides; a parameter has no tokens. Noise on a weight in the shape of a batch of tokens
(`torch.randn(batch, tokens)`) would be mistaken for theirs.

Source: Shoeybi et al. 2019, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpkit.common.torch_private import _disable_current_modes


class ForwardSpan(NamedTuple):
    """A stretch of a model's forward, from the start of the module `first` to the end of `last`."""

    name: str  # another one for each rank that draws its own numbers
    first: str
    last: str


def spans_at(calls: Sequence[tuple[str, bool]], spans: Sequence[ForwardSpan]) -> list[tuple[str, ...]]:
    """Return the spans in which each call of a forward starts, the outer ones first.

    >>> calls = [(name, True) for name in ("norm", "mlp.up", "mlp.drop", "mlp.down", "drop")]
    >>> spans_at(calls, [ForwardSpan("mlp on 0", "mlp.up", "mlp.down")])
    [(), ('mlp on 0',), ('mlp on 0',), ('mlp on 0',), ()]

    Args:
        calls: in their order, (module, True) for a module that is called as a whole, and (module, False) for an
            operation between these, in that module's forward.
    """
    found: list[tuple[str, ...]] = [()] * len(calls)
    for name, first, last in spans:
        inside = ending = left = False
        begun_by = None
        for i, (call, whole) in enumerate(calls):
            if inside and ending and not _is_within(call, last):
                inside, left = False, False
            left = left or not _is_within(call, first)
            starts = _is_within(call, first) and (begun_by is None or left or (call, whole) == begun_by)
            if starts and not inside:
                inside, ending = True, False
                begun_by = (call, whole) if whole else None
            if inside:
                found[i] += (name,)
                ending = ending or _is_within(call, last)
                inside = not (whole and _is_within(last, call) and last != call)
            elif whole and _is_within(first, call) and not _is_within(last, call):
                inside, ending = True, False
    return found


def _is_within(name: str, module: str) -> bool:
    """Return whether a name is a module's, or of something inside it."""
    return not module or name == module or name.startswith(f"{module}.")


States = list[tuple[torch.Generator, Tensor]]


@dataclass
class _Open:
    """A span that has begun: the states outside, and those with which it began."""

    name: str
    outside: States
    inside: list[bytes]
    ahead: bool  # begun for a stage or a layer that starts within it, whose first module may begin it again


KeptSpans = tuple[list[_Open], dict[str, tuple[int, ...]]]
"""The spans of a forward, and their tokens, so that it can be repeated there."""


@dataclass
class OwnDraws:
    """The random numbers of one rank, inside spans and outside.

    >>> mine, others = OwnDraws(), OwnDraws()
    >>> def inside(draws, name):
    ...     _ = torch.manual_seed(1)
    ...     draws.begin(name, torch.device("cpu"))
    ...     drawn = torch.rand(()).item()
    ...     draws.end(name)
    ...     return drawn, torch.rand(()).item()
    >>> a, b = inside(mine, "mlp on 0"), inside(others, "mlp on 1")
    >>> a[0] == inside(mine, "mlp on 0")[0] != b[0], a[1] == b[1]
    (True, True)

    `tokens` has the batch size and the number of tokens on this rank for spans that divide tokens, by name.
    """

    around: tuple[str, ...] = ()  # names of spans around the whole forward
    spans: list[ForwardSpan] = field(default_factory=list)  # the other ones, the outer ones first
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _open: list[_Open] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDraws:
        """Return a copy in which no span has begun, for a copy of the model."""
        return OwnDraws(self.around, list(self.spans), dict(self.tokens))

    def begin(self, name: str, device: torch.device, *, ahead: bool = False) -> None:
        """Switch the generators to the rank's own draws, maybe `ahead` of a module that begins the span again."""
        for i, span in enumerate(self._open):
            if span.name == name:
                if span.ahead:
                    span.ahead = False
                    return
                del self._open[i:]
                break
        outside, inside = [], []
        for generator in generators_of(device):
            state = generator.get_state()
            digest = blake2b(_bytes(state) + name.encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            outside.append((generator, state))
            inside.append(_bytes(generator.get_state()))
        self._open.append(_Open(name, outside, inside, ahead))

    def end(self, name: str) -> None:
        """Return the generators to the draws outside; do nothing if the span has not begun."""
        places = [i for i, span in enumerate(self._open) if span.name == name]
        if not places:
            return
        span = self._open[places[0]]
        del self._open[places[0] :]
        for (generator, outside), inside in zip(span.outside, span.inside, strict=True):
            drawn = _bytes(generator.get_state()) != inside
            generator.set_state(outside)
            if drawn:
                with _disable_current_modes():  # a dry run's, or one that listens to the model's draws
                    torch.rand((), generator=generator, device=generator.device)

    def enter(self, names: Sequence[str], device: torch.device) -> None:
        """Forget all spans that have begun, and begin these."""
        self._open.clear()
        for name in (*self.around, *names):
            self.begin(name, device, ahead=True)

    def move(self, names: Sequence[str], device: torch.device) -> None:
        """End the spans that are not among these, and begin those that have not begun."""
        begun = [span.name for span in self._open]
        for name in begun[::-1]:
            if name not in names and name not in self.around:
                self.end(name)
        for name in names:
            if name not in begun:
                self.begin(name, device, ahead=True)

    def leave(self) -> None:
        """Forget all spans that have begun; the generators stay as they are."""
        self._open.clear()

    @property
    def token_shape(self) -> tuple[int, ...] | None:
        """Batch size and number of tokens where tokens are divided, else None."""
        return self.tokens.get(self._open[-1].name) if self._open else None

    @contextmanager
    def share_draws(self) -> Iterator[None]:
        """Draw what all ranks draw inside the block."""
        span = self._open[0]
        inside = [(generator, generator.get_state()) for generator, _ in span.outside]
        for generator, state in span.outside:
            generator.set_state(state)
        try:
            yield
        finally:
            span.outside = [(generator, generator.get_state()) for generator, _ in span.outside]
            for generator, state in inside:
                generator.set_state(state)

    def keep(self) -> KeptSpans:
        """Return the spans that have begun."""
        return [_Open(s.name, list(s.outside), s.inside, s.ahead) for s in self._open], dict(self.tokens)

    @contextmanager
    def reenter_spans(self, kept: KeptSpans) -> Iterator[None]:
        """Return to the spans of another time inside the block."""
        before = self.keep()
        self._open[:], self.tokens = kept[0], dict(kept[1])
        try:
            yield
        finally:
            self._open[:], self.tokens = before


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the torch generators that a forward on a device draws from: the host's, and the GPU's."""
    generators = [torch.default_generator]
    if device.type == "cuda":  # in a dry run the device may not exist
        generators += torch.cuda.default_generators[device.index or 0 :][:1]
    return generators


def _bytes(state: Tensor) -> bytes:
    return string_at(state.data_ptr(), state.nbytes)  # needs no tensor operation, which a dry run would fake


FACTORIES = ("rand", "randn", "randint", "randperm")
DRAWS = (
    "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "poisson", "random_", "uniform_", "exponential_",
    "cauchy_", "geometric_", "log_normal_", "rand_like", "randn_like", "randint_like", "dropout", "dropout_",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_", "gumbel_softmax", "rrelu", "rrelu_",
)  # fmt: skip
"""Functions that draw numbers for each element of their first argument."""


class TokenDraws(TorchFunctionMode):
    """Inside the block, numbers that are drawn for no token are the same on all ranks that share the tokens."""

    def __init__(self, draws: OwnDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        return drawn_by(self._draws, func, args, kwargs or {})


def drawn_by(draws: OwnDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function, with the numbers that ranks share if it draws for no token."""
    name = getattr(func, "__name__", "")
    tokens = draws.token_shape if name in DRAWS or name in FACTORIES else None
    if tokens is None:
        return func(*args, **kwargs)
    first = args[0] if args else kwargs.get("input")
    if name in FACTORIES or not isinstance(first, Tensor):
        with _disable_current_modes():  # only the shape: nothing is drawn or heard
            shape = func(*args, **(kwargs | {"device": "meta", "generator": None})).shape
    else:
        shape = first.shape
    if not isinstance(first, nn.Parameter) and _has_tokens(shape, *tokens):
        return func(*args, **kwargs)
    with draws.share_draws():
        return func(*args, **kwargs)


def _has_tokens(shape: Sequence[int], batch: int, count: int) -> bool:
    """Return whether a shape has dimensions for each token of each sample.

    Such shapes are [batch, ..., tokens, ...], [tokens, batch, ...], [batch tokens, ...], and [batch heads, tokens, ...]
    in attentions that fold heads into the batch; not a weight's, even if it is as wide as the number of tokens.

    >>> [_has_tokens(shape, 2, 8) for shape in ((2, 8, 5), (16, 4), (8, 2, 5), (6, 8, 8))]
    [True, True, True, True]
    >>> [_has_tokens(shape, 2, 8) for shape in ((2, 1, 1), (), (8, 8), (8,))]
    [False, False, False, False]
    """
    if not shape:
        return False
    folded = len(shape) == 3 and shape[0] % batch == 0 and shape[1] == count
    in_front = shape[0] == batch * count or tuple(shape[:2]) == (count, batch)
    return in_front or folded or (shape[0] == batch and count in shape[1:])
