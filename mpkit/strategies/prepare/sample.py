"""One sample in the whole model: what its attentions are given, and which rows its routers send to experts.

The sample goes through the model once, on fake tensors if possible. Context parallelism sends what attentions are
given: a ring passes on keys and values; Ulysses exchanges queries and output too. The same run, of a rank's part of the
sample, shows whether the model can be trained so. Expert parallelism exchanges the rows of all choices.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.common.exceptions import one_line
from mpkit.common.torch_private import tree_leaves
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import check_sequences, sequence_part, shift_positions
from mpkit.strategies.data.microbatch import Value, leaves, part
from mpkit.strategies.experts.divide import check_experts_of, chosen_experts, find_experts, number_of_experts
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.copies import DryRuns
from mpkit.strategies.stage.stage import call


class Attention(NamedTuple):
    """A call of scaled_dot_product_attention."""

    module: str  # the name of the module that makes it
    keys: int  # elements of keys and values
    heads: int  # heads of the keys; 0 if they are not [batch, heads, time, width]
    others: int  # elements of queries and output


@dataclass
class SampleSeen:
    """What one sample makes of a model."""

    attentions: list[Attention] = field(default_factory=list)
    # By the name of a layer's experts: the rows that they compute, their width, and the number of experts.
    routed: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def attention_sizes(self, held: Sequence[Sequence[str]], ranks: int = 1) -> tuple[list[int], list[int]]:
        """Return, by stage, the elements of keys and values, and of queries and outputs.

        `ranks` divide the heads. If they are more than the keys' heads, each head counts once per rank receiving it.

        >>> from mpkit.strategies.models.gpt import GPT
        >>> tokens = torch.zeros(2, 6, dtype=torch.long)
        >>> seen = observe_sample(GPT(layers=3, width=8, heads=2), (tokens, tokens), Plan(cp=2))
        >>> stages = [["block0.norm1.weight"], ["block1.norm1.weight", "block2.norm1.weight"]]
        >>> seen.attention_sizes(stages)  # 2 b s h = 2 x 1 x 6 x 8 a layer, each
        ([96, 192], [96, 192])
        """
        keys, others = [0] * len(held), [0] * len(held)
        for each in self.attentions:
            stage = _stage_of(each.module, held)
            keys[stage] += each.keys // each.heads * max(each.heads, ranks) if each.heads else each.keys
            others[stage] += each.others
        return keys, others

    def routed_sizes(self, held: Sequence[Sequence[str]]) -> tuple[list[int], list[int], list[int]]:
        """Return, by stage, the elements of the rows in all layers with experts, the numbers of rows, and of experts.

        >>> from mpkit.strategies.models.gpt import GPT
        >>> model = GPT(layers=2, width=8, heads=2, experts=4, top_k=2)
        >>> stages = [["block0.mlp.experts.up"], ["block1.mlp.experts.up"]]
        >>> tokens = torch.zeros(2, 5, dtype=torch.long)
        >>> seen = observe_sample(model, (tokens, tokens), Plan(ep=2, dp=2))
        >>> seen.routed_sizes(stages)  # s k h = 5 x 2 x 8 each
        ([80, 80], [10, 10], [4, 4])
        """
        elements, rows, experts = ([0] * len(held) for _ in range(3))
        for name, (choices, width, count) in self.routed.items():
            stage = _stage_of(name, held)
            elements[stage] += choices * width
            rows[stage] += choices
            experts[stage] += count
        return elements, rows, experts


def observe_sample(model: nn.Module, batch: tuple[Value, Value], plan: Plan) -> SampleSeen:
    """Return what the first sample of a batch makes of the whole model, if ranks exchange any of it.

    It raises a ValueError if ranks cannot share sequences or divide experts as the plan wants.
    """
    check_experts_of(model, plan)
    runs, sample, kind = DryRuns(model), part(batch[0], slice(0, 1)), type(model).__name__
    if plan.cp > 1:
        check_sequences(*batch, plan.cp, plan.cp_order)
        what = f"A part of a sequence in {kind}"
        return runs.run(lambda copied, x: _check_forward(copied, x, plan), sample, what=what)
    if plan.tp * plan.ep > 1 and find_experts(model):
        what = f"A sample of {kind}"
        return runs.run(lambda copied, x: _walk(copied, x, nullcontext())[1], sample, what=what)
    return SampleSeen()


@torch.no_grad()
def _walk(
    model: nn.Module, sample: Value, around: AbstractContextManager[Any], ranks: int = 1
) -> tuple[Any, SampleSeen]:
    """Return the model's output, and what was seen; `ranks` have such a part of the sample each."""
    observer = _Observer(ranks)
    layers = layers_of(model)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(observer.enter, name))
        module.register_forward_hook(observer.leave)
    for name, module in find_experts(model).items():
        module.register_forward_pre_hook(partial(observer.route, name), with_kwargs=True)
    value: Any = sample
    with around, observer:  # within: it sees the attentions as the model calls them
        for i, (_, layer) in enumerate(layers):
            value = call(layer, value, first=i == 0)
    return value, observer.seen


class _Observer(TorchFunctionMode):
    """Sees attentions as they are called, and by hooks in which module, and what experts are given."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.seen, self._ranks = SampleSeen(), ranks
        self._inside = [""]

    def enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def leave(self, *_: Any) -> None:
        self._inside.pop()

    def route(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        before = self.seen.routed.get(name, (0, 0, 0))[0]
        rows = before + self._ranks * chosen_experts(args, kwargs).numel()
        self.seen.routed[name] = rows, x.shape[-1], number_of_experts(module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, key, value = given["query"], given["key"], given["value"]
            heads = key.shape[1] if key.dim() == 4 else 0
            keys, others = (self._ranks * (a.numel() + b.numel()) for a, b in ((key, value), (query, output)))
            self.seen.attentions.append(Attention(self._inside[-1], keys, heads, others))
        return output


def _stage_of(module: str, held: Sequence[Sequence[str]]) -> int:
    """Return the last stage that has a parameter of the module, or of the nearest enclosing one."""
    while module:
        stages = [i for i, names in enumerate(held) if any(name.startswith(f"{module}.") for name in names)]
        if stages:
            return stages[-1]
        module = module.rpartition(".")[0]
    return len(held) - 1


# ---- context parallelism ---------------------------------------------------------------------------------------------


def _check_forward(model: nn.Module, sample: Value, plan: Plan) -> SampleSeen:
    """Run the forward of the rank that has the end of the sequence, and return what was seen."""
    n, order = plan.cp, plan.cp_order
    group = FakeGroup(n, n - 1 if order == "contiguous" else 0)
    mine = sequence_part(sample, group.index, n, order)
    length = leaves(mine)[0].shape[1]
    # ---- positions
    told = shift_positions(model, group, order)
    given = isinstance(mine, dict) and mine.get("position_ids") is not None
    if not (told or given):
        raise ValueError(
            f"cp={n}: {type(model).__name__} has no way to be told that its first token is not the sequence's first. "
            "A forward that takes position_ids [batch, time] beside input_ids has (None: from 0), as transformers' "
            "models do; so has mpkit.models.GPT. A model without positions may take them and not use them."
        )
    # ---- attention
    attention = ContextParallel(group, order, ulysses=plan.cp_method == "ulysses")
    try:
        value, seen = _walk(model, mine, attention, n)
    except ValueError:
        raise
    except Exception as error:
        shapes = [list(tensor.shape) for tensor in leaves(mine)]
        raise ValueError(
            f"cp={n}: the model refuses a rank's part of the sequences, tensors of shape "
            f"{', '.join(map(str, shapes))} at the end of sequences of {length * n} tokens: "
            f"{one_line(error)}. Does it take shorter sequences than its longest?"
        ) from None
    attention.check_used()
    # ---- outputs
    shapes = [list(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if not any(len(shape) > 1 and shape[1] == length for shape in shapes):
        raise ValueError(
            f"cp={n}: of sequences [batch, {length}] the model makes {', '.join(map(str, shapes)) or 'no tensor'}, "
            "so what it says is about the sequence as a whole, of which no rank has more than a part. Models that say "
            f"something of every token, [batch, {length}, ...], can share sequences out; for this one take cp=1."
        )
    return seen
