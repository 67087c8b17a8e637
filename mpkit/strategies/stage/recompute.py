"""Recomputation: a call keeps its inputs, and what autograd would have saved is computed again for the backward.

    forward     builds its graph, and keeps an empty `Saved` in place of each tensor that autograd saves
    again       the backward's first access to one runs the call once more, with the same random numbers, autocast and
                buffers; what is saved this time fills the places
    free        a node that has run drops its place, and so its tensor; I and W of a split backward share one second run

Gradients arrive once per backward, and hooks outside the call run once. Three things are recomputed this way:

    blocks      the model's repeated blocks: a stage holds the boundaries between them, and the activations within one
                at a time, 2 s b h bytes per layer in 16 bits
    attentions  everything is kept but their inside, the scores
    stages      a pipeline's stage without blocks

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", MLSys 2023, section 5.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.errors import MpkitError
from mpkit.plan.kinds import every
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.models.randomness import RandomState, preserve_random_state
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.partition.value import Value
from mpkit.trace import Kind
from mpkit.trace.record.memory import PackedTensor
from mpkit.trace.record.recorder import Recorder

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names by which transformers' models pass a block the keys and values of earlier tokens; training has none."""


Buffers = dict[tuple[nn.Module, str], Tensor]
"""A module's buffers, by the submodule that has them and by name."""


@dataclass
class Setting:
    """The random states and autocast that a forward starts from."""

    random: RandomState
    device: torch.device
    cast: tuple[bool, torch.dtype]
    draws: OwnDraws

    def __post_init__(self) -> None:
        self._spans = self.draws.keep()

    @classmethod
    def now(cls, tensors: list[Tensor], draws: OwnDraws) -> Setting:
        """Return the current setting on the device of these tensors."""
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        cast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return cls(RandomState.now(device), device, cast, draws)

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the setting inside the block."""
        with preserve_random_state(self.device):
            self.random.restore()
            autocast = torch.autocast(self.device.type, self.cast[1], self.cast[0])
            with autocast, self.draws.reenter_spans(self._spans):
                yield


class WrittenState:
    """The buffers of a module whose forwards run twice: the second run starts from what the first one found.

    The first forward clones all buffers, later ones those of the submodules that an earlier forward wrote into. A whole
    submodule counts, since torch's kernel updates a BatchNorm's statistics without raising their version.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._written: set[nn.Module] | None = None  # None: not known yet

    def _now(self) -> Buffers:
        return {
            (each, name): buffer
            for each in self.module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        }

    @contextmanager
    def first(self) -> Iterator[Buffers]:
        """Yield the buffers that the forward inside the block starts from."""
        found = self._now()
        versions = {key: buffer._version for key, buffer in found.items()}
        start = {
            key: buffer.clone() if self._written is None or key[0] in self._written else buffer
            for key, buffer in found.items()
        }
        yield start
        written = {key[0] for key, buffer in found.items() if buffer._version != versions[key]}
        if self._written is None:
            self._written = written
            start |= {key: buffer for key, buffer in found.items() if key[0] not in written}
        elif late := written - self._written:
            name = next(name for name, each in self.module.named_modules() if each in late)
            raise MpkitError(
                f"{name or type(self.module).__name__} wrote into a buffer into which it had not written before, and "
                "recompute= needs the value that was there. Write into it in the first forward too, or keep all "
                "activations, Plan(recompute='none')"
            )

    @contextmanager
    def begin_again(self, start: Buffers) -> Iterator[None]:
        """Let the module work on `start` inside the block, and restore its present buffers afterwards."""
        now = self._now()
        _put(start)
        try:
            yield
        finally:
            _put(now)


def _put(buffers: Buffers) -> None:
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer


class Saved:
    """The place of a tensor that autograd would have saved: empty until the call has run again."""

    __slots__ = ("__weakref__", "call", "content")

    def __init__(self, call: RecomputedCall) -> None:
        self.call: RecomputedCall | None = call
        self.content: PackedTensor | None = None

    def drop(self) -> None:
        """Free the tensor, which is not needed again."""
        self.call = self.content = None


class RecomputedCall:
    """One call of a function, `run`, which runs again (as `again`, if given) for its backward.

    The second run starts from the buffers of `state`, and in `setting`. `who` names the caller in errors.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = RecomputedCall(lambda: x.exp().square())()
    >>> y.sum().backward()
    >>> torch.allclose(x.grad, 2 * (2 * x).exp())
    True
    """

    def __init__(
        self,
        run: Callable[[], Any],
        record: Recorder | None = None,
        *,
        again: Callable[[], Any] | None = None,
        state: WrittenState | None = None,
        setting: Setting | None = None,
        who: str = "A stage",
    ) -> None:
        self._first, self._again = run, again or run
        self._record, self._state, self._setting, self._who = record, state, setting, who
        self._start: Buffers = {}
        self._places: list[ref[Saved]] = []
        self._shapes: list[torch.Size] = []
        self._is_done = False  # whether it has run again
        self._is_running = True  # for the first time

    def __call__(self) -> Any:
        """Run the function; of what its backward needs, keep only the inputs."""
        run = self._first
        del self._first
        first: AbstractContextManager[Buffers] = self._state.first() if self._state else nullcontext({})
        with first as self._start, saved_tensors_hooks(self._pack, self._unpack):
            result = run()
        self._is_running = False
        return result

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(self)
        self._places.append(ref(saved))
        self._shapes.append(tensor.shape)
        return saved

    def _unpack(self, saved: Saved) -> Tensor:
        self.again()
        assert saved.content is not None, "a node whose saved tensors were let go of is not called again"
        return saved.content.unpack()

    def again(self) -> None:
        """Run the function a second time, if it has not; a pipeline calls this before it waits for a gradient."""
        if self._is_done:
            return
        if self._is_running:
            raise MpkitError(
                f"{self._who} computes gradients in its forward (torch.autograd.grad), and under recompute= what "
                "autograd saved is computed again when the forward is over. What works: Plan(recompute='none')"
            )
        made: list[PackedTensor] = []

        def pack(tensor: Tensor) -> PackedTensor:
            made.append(PackedTensor(tensor.detach(), tensor._version))
            if self._record is not None:
                self._record.ledger.track(tensor, "activations")
            return made[-1]

        with (
            torch.enable_grad(),
            self._setting.restore() if self._setting is not None else nullcontext(),
            self._state.begin_again(self._start) if self._state is not None else nullcontext(),
            saved_tensors_hooks(pack, PackedTensor.unpack),
        ):
            self._again()
        if [packed.shape for packed in made] != self._shapes:
            raise MpkitError(
                f"{self._who} computed something else when its forward was done again for its backward: it keeps "
                "something from call to call, such as a cache or a counter. Keep all activations, "
                "Plan(recompute='none'), or only attentions, Plan(recompute='selective')"
            )
        for place, packed in zip(self._places, made, strict=True):
            if (saved := place()) is not None:
                saved.content = packed
        self._is_done = True
        self._places.clear()
        del self._again, self._start  # with the inputs


class AttentionAgain(TorchFunctionMode):
    """Let `torch.nn.functional.scaled_dot_product_attention` keep only its inputs, inside the block.

    The scores softmax(q k^T), [batch, heads, time, time], are many and cheap to compute: of the s b h (34 + 5 a s/h)
    bytes that a layer keeps in 16 bits, they are 5 a s^2 b (Korthikanti et al. 2023, section 5). A fused kernel never
    stores the scores; with one it is the output that is not kept.

    >>> q, k, v = (torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3))
    >>> with AttentionAgain():
    ...     y = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.equal(y, scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    """

    def __init__(self, record: Recorder | None = None) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention, unless its query is a stand-in for another rank's tensor; call other functions."""
        kwargs = kwargs or {}
        stands_in = isinstance(args[0] if args else kwargs.get("query"), Value)
        if func is not scaled_dot_product_attention or stands_in or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if self._record is not None:
            for tensor in tensors:
                self._record.ledger.track(tensor, "activations")
        run, setting = partial(func, *args, **kwargs), Setting.now(tensors, OwnDraws())
        return RecomputedCall(run, self._record, setting=setting, who="An attention")()


@dataclass
class RecomputeScope:
    """The context in which a stage's blocks are recomputed."""

    record: Recorder
    modes: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the second forward
    costs: Callable[[str], tuple[float, int]] = lambda _: (0.0, 0)  # FLOPs and bytes of a block, by name
    draws: OwnDraws = field(default_factory=OwnDraws)


class RecomputedBlock:
    """A block of the model that is recomputed from now on."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.scope: RecomputeScope | None = None  # outside training, the block computes as usual
        self._state = WrittenState(block)
        self._who = f"{name} ({type(block).__name__})"
        block.forward = self._wrap(block.forward)  # within its hooks, which run once

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.scope is None or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            return self._call(self.scope, inner, *_without_caches(inner, args, kwargs))

        return forward

    def _call(
        self, scope: RecomputeScope, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        record = scope.record
        leaves, shape = flatten((args, kwargs))
        given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        stage, m, _ = record.place()

        def check_unwritten(who: str) -> None:
            if any(tensor._version != version for tensor, version in given):
                raise MpkitError(
                    f"{self._who}: {who} writes into its input, which recompute= needs for the second forward. Write "
                    "x = x + y for x += y, and inplace=False; or Plan(recompute='selective')"
                )

        def again() -> None:
            check_unwritten("a layer after it")
            n, (flops, nbytes) = self.name, scope.costs(self.name)
            op = record.begin(Kind.RECOMPUTE, n, stage=stage, microbatch=m, flops=flops, nbytes=nbytes)
            again_args, again_kwargs = rebuild(shape, leaves)  # in new containers: a block may change those
            with scope.modes():
                inner(*again_args, **again_kwargs)
            record.end(op)

        setting = Setting.now([tensor for tensor, _ in given], scope.draws)
        call = RecomputedCall(
            lambda: inner(*args, **kwargs), record,
            again=again, state=self._state, setting=setting, who=self._who,
        )  # fmt: skip
        result = call()
        check_unwritten("it")
        for leaf in (*leaves, *flatten(result)[0]):
            if isinstance(leaf, Tensor):
                record.ledger.track(leaf, "activations")
        return result


def _without_caches(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments without transformers' caches, which a second forward would write into again."""
    names = list(inspect.signature(forward).parameters)
    args = tuple(None if name in CACHES else arg for name, arg in zip_longest(names[: len(args)], args))
    kwargs = kwargs | {key: None for key in CACHES if key in kwargs}
    return args, kwargs | ({"use_cache": False} if kwargs.get("use_cache") else {})


def chosen_blocks(recompute: str, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that `Plan(recompute=...)` recomputes: all, or every k-th as in torchtitan.

    >>> blocks = {str(i): nn.Identity() for i in range(5)}
    >>> list(chosen_blocks("full", blocks)), list(chosen_blocks("every=2", blocks)), chosen_blocks("none", blocks)
    (['0', '1', '2', '3', '4'], ['1', '3'], {})
    """
    k = every(recompute)
    return {} if not k else {name: block for i, (name, block) in enumerate(blocks.items(), 1) if i % k == 0}


def recompute_blocks(
    model: nn.Module, recompute: str, partition: PartitionedModel | None
) -> list[RecomputedBlock]:
    """Recompute the blocks that a plan chooses from now on.

    Where a pipeline cuts through a block (an *opened* block), the pieces that it calls are recomputed instead.
    """
    chosen: dict[str, nn.Module] = {}
    for name, block in chosen_blocks(recompute, repeated_blocks(model)).items():
        if partition is not None and name in partition.modules:
            inside = [inner for inner in partition.blocks if inner.startswith(f"{name}.")]
            chosen |= {inner: model.get_submodule(inner) for inner in inside}
        else:
            chosen[name] = block
    return [RecomputedBlock(name, block) for name, block in chosen.items()]
