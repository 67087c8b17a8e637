"""Stack: what a software stack does with a plan, and the constants that are fitted for it on a device.

A plan says what is divided. How the division is carried out differs from framework to framework: in which precision
gradients are added up, what is gathered at once, what runs beside what. These differences are facts about the
framework; what remains, how well its kernels use a device, is in at most four constants that are fitted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from mpkit.common.arrays import Numbers, larger, where
from mpkit.devices.hardware import Device
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that are fitted for a device and a stack.

    Attributes:
        matmul: the share of the peak that large matrix products reach.
        attention: the share of the peak that fused attention reaches.
        traffic: bytes that elementwise operators move, as a multiple of what well fused ones would.
        fixed: seconds per layer and micro-batch in the forward, and twice as many in the backward, beside all that:
            launches.
        straggle: how much longer a step takes for each doubling of the number of nodes, since all wait for the slowest.
    """

    matmul: float = 0.72
    attention: float = 0.5
    traffic: float = 1.0
    fixed: float = 20e-6
    straggle: float = 0.005


PRIOR = Constants()
"""For stacks without a preset: .72 of the peak fits 183 matrix products that were measured on an A100."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does.

    Attributes:
        name: by which it is asked for.
        element: bytes per element of activations and of the weights that products read.
        fp8: whether products with weights run in 8 bits.
        fp4: whether they run in 4 bits (NVFP4).
        converts_once: whether weights are converted to 8 or 4 bits once per step and not once per micro-batch.
        scaling: what shares a scale where they do: a whole "tensor", a "row", a "block" of 16 or 32 (MXFP8, NVFP4), or
            a "block128" of 128 (DeepSeek-V3's on Hopper).
        eager: whether each elementwise operator is a kernel of its own, as without torch.compile or special ones.
        fused: whether attention is fused (FlashAttention: Dao et al. 2022), so that its s x s scores never leave the
            chip.
        gradient: bytes per parameter of accumulated gradients.
        reduced: bytes per parameter of gradients as they are sent.
        states: bytes per parameter of the optimizer's states and master weights.
        converted: bytes per parameter of gradients in 32 bits that exist during the update only.
        overlap: whether communication of replicas runs beside compute.
        staged_overlap: whether it does so in a pipeline too.
        async_tp: whether tensor-parallel communication is cut up and runs beside the product that needs it.
        userbuffers: whether that is so for all of it, in parts as many as ranks (Transformer Engine).
        gathers_ahead: the lowest stage of ZeRO whose new weights are gathered beside the next forward; stages below
            gather them after the update.
        bucket: bytes that are reduced or gathered at once under ZeRO 0 to 2; ZeRO-3 gathers by layer.
        bucket_by_replicas: whether a bucket has max(40 M, 1 M x replicas) parameters instead, as Megatron's has where
            it overlaps; where it does not, all gradients are one bucket.
        partition: elements of the flat buffers that DeepSpeed keeps (`reduce_bucket_size`, 5e8); 0 for others.
        logits: bytes per logit at the peak of the loss: the logits, their copy in 32 bits, its gradient. In Megatron
            that is written over the copy; its own fused loss has two copies (10), and Transformer Engine's writes the
            gradient over the logits (2).
        deferred: micro-batches whose gradient of the logits waits until the pipeline drains, for the gradient of the
            head's weight (Megatron's defer_embedding_wgrad_compute).
        loss: bytes per logit that the loss moves, forward and backward; 16 where it is fused.
        gates: tensors of the MLP's width that a gated MLP keeps: the gate, what it is multiplied with and the product;
            eager code keeps the gate's activation as well.
        sent: copies of a token that are kept for each expert it visits: as it was sent, and as the expert reads it.
        routing: bytes per token and expert that the router keeps: its scores; Megatron the softmax of its auxiliary
            loss 4, the order of all pairs 8 and their mask 1 (moe_utils.py).
        weighs_inside: whether the router's weight multiplies what an expert's activation returns, so that without a
            gate one tensor more is kept (Megatron's experts.py).
        grouped: whether the experts of a rank multiply at once (Transformer Engine's GroupedLinear), with four
            workspaces more; in 8 bits they are padded before.
        attention_outputs: tensors of an attention's output that are kept: two where the attention and the product after
            it read it in different layouts (FlashAttention 2 in Megatron).
        copies: bytes per parameter of DDP's buckets where gradients are not views of them.
        dropout: whether dropout masks are kept.
        early_stop: whether recomputation ends before the last product, whose output nobody needs
            (torch.utils.checkpoint with use_reentrant=False).
        blocking_p2p: whether a stage waits for its messages to be sent.
        posts_ahead: whether it does not where stages are interleaved (Megatron's overlap_p2p_comm).
        scatter_gather: whether each rank of a stage sends 1/t of a message, and the next stage gathers it.
        placeholders: whether the backward allocates a gradient for each shape of weight beside the accumulated one
            (Transformer Engine's fused accumulation).
        transformer_engine: whether it multiplies with Transformer Engine, which keeps a workspace.
        cublas_workspace: bytes that CUBLAS_WORKSPACE_CONFIG asks for; 0: cuBLAS decides.
        deduplicates: whether a token is sent once to each rank on which it visits experts (DeepEP), instead of once per
            expert.
        divides_experts: whether tensor parallelism divides experts that no ranks along ep do, whatever the model says.
        by_weight: whether a pipeline's stages are cut by the weights of their layers, the head included.
        overlaps_pairs: whether a pair's forward and backward (F & B) compute while each other's tokens travel.
    """

    name: str
    element: int = 2
    fp8: bool = False
    fp4: bool = False
    converts_once: bool = False
    scaling: str = "tensor"
    eager: bool = False
    fused: bool = True
    gradient: float = 2.0
    reduced: float = 2.0
    states: float = 12.0
    converted: float = 0.0
    overlap: bool = True
    staged_overlap: bool = True
    async_tp: bool = False
    userbuffers: bool = False
    gathers_ahead: int = 2
    bucket: float = 25 * MIB
    bucket_by_replicas: bool = False
    partition: float = 0.0
    logits: float = 10.0
    deferred: int = 0
    loss: float = 16.0
    gates: int = 4
    sent: int = 2
    routing: float = 4.0
    weighs_inside: bool = False
    grouped: bool = False
    attention_outputs: int = 1
    copies: float = 0.0
    dropout: bool = False
    early_stop: bool = False
    blocking_p2p: bool = False
    posts_ahead: bool = False
    scatter_gather: bool = False
    placeholders: bool = False
    transformer_engine: bool = False
    cublas_workspace: float = 0.0
    deduplicates: bool = False
    divides_experts: bool = False
    by_weight: bool = False
    overlaps_pairs: bool = False

    def blocks(self, virtual_stages: int) -> bool:
        """Return whether a stage waits for its messages to be sent, of so many stages per rank.

        >>> [stacks()[name].blocks(v) for name in ("megatron", "megatron-2021") for v in (1, 2)]
        [True, False, True, True]
        """
        return self.blocking_p2p and not (self.posts_ahead and virtual_stages > 1)

    def calls(
        self, parameters: Numbers, element: float, zero: Numbers, replicas: Numbers, layers: Numbers
    ) -> Numbers:
        """Return how many collectives send so many gradients or weights, of so many bytes each; 1 or more.

        PyTorch's FSDP makes one per layer, DeepSpeed one per `partition` of elements, Megatron and DDP one per bucket.

        >>> [stacks()[name].calls(125e6, 4, zero=1, replicas=8, layers=12) for name in ("pytorch", "megatron")]
        [20.0, 4.0]
        """
        if self.bucket_by_replicas:
            bucket = larger(40e6, 1e6 * replicas)
            return larger(1, -(-parameters // bucket)) if self.overlap else 1
        if self.partition:
            return larger(1, -(-parameters // self.partition))
        return where(zero == 2, larger(1, layers), larger(1, -(-parameters * element // self.bucket)))


@cache
def stacks() -> Mapping[str, Stack]:
    """Return the stacks whose published steps were looked at, and plain PyTorch, by name."""
    text = files("mpkit.prediction.cost_model").joinpath("stacks.toml").read_text(encoding="utf-8")
    return {name: Stack(name, **facts) for name, facts in tomllib.loads(text).items()}


def stack_of(stack: str | Stack | None = None, **changes: object) -> Stack:
    """Return a stack by name, changed.

    Raises:
        ValueError: there is no such stack.

    >>> stack_of("torchtitan", fp8=True).fp8
    True
    """
    if isinstance(stack, Stack):
        return replace(stack, **changes)  # type: ignore[arg-type]
    name = "pytorch" if stack is None else stack
    if name not in stacks():
        near = get_close_matches(str(name), stacks(), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"stack={stack!r} is none of {', '.join(map(repr, stacks()))}.{hint}")
    return replace(stacks()[name], **changes)  # type: ignore[arg-type]


def stack_for(plan: Plan, stack: str | Stack | None = None, half: str = "bf16") -> tuple[Stack, Plan]:
    """Return the software that runs a plan, and the plan in its precision.

    Args:
        plan: the plan.
        stack: what is asked for; None: PyTorch, in the plan's precision and with its buckets.
        half: the precision of 16 bits that the device has.

    Raises:
        ValueError: there is no such stack, or the plan computes in 16 bits and the stack does not.

    >>> [stack_for(Plan(dp=2, precision=how))[0].name for how in ("full", "bf16")]
    ['pytorch-fp32', 'pytorch']
    >>> stack_for(Plan(dp=2), "llm-foundry")[1]
    Plan(dp=2, precision='bf16')
    """
    narrow = plan.precision != "full"
    bucket = plan.bucket_mb * 2**20
    if stack is None:
        return stack_of("pytorch" if narrow else "pytorch-fp32", bucket=bucket), plan
    chosen = stack_of(stack)
    if narrow and chosen.element == 4:
        raise ValueError(
            f"stack={chosen.name!r} computes in 32 bits, and the plan in {plan.precision!r}: leave stack= out, or ask "
            f"for {call_of(plan, {'precision': 'full'})}"
        )
    return chosen, plan if narrow or chosen.element == 4 else replace(plan, precision=half)


@cache
def workspaces(stack: Stack, device: Device, *, grouped: bool = False) -> float:
    """Return the bytes that cuBLAS and Transformer Engine keep within torch's allocator.

    cuBLAS keeps one workspace for each of the two threads that multiply, of the forward and of the backward: what
    CUBLAS_WORKSPACE_CONFIG says (:4096:8 is 32 MiB), else 32 MiB on Hopper and 8.1 MiB on other GPUs of NVIDIA.
    Transformer Engine keeps another one: 32 MiB, or 4 before Hopper; and four more for the streams in which the
    products of experts run (`get_multi_stream_cublas_workspace`).

    Source: torch/aten/src/ATen/cuda/CublasHandlePool.cpp; transformer_engine/pytorch/module/base.py.

    >>> from mpkit.devices.catalogue import build_machine
    >>> [workspaces(Stack("any"), build_machine(name).device) / MIB for name in ("a100", "h100", "gb200", "mi300x")]
    [16.25, 64.0, 16.25, 0.0]
    """
    if not re.match(r"(A|V|T|L|H|B|GH|GB)\d|RTX|TITAN", device.name):
        return 0.0
    cublas = stack.cublas_workspace or (32 if re.match(r"G?H\d", device.name) else 8.125) * MIB
    engine = (32 if "float8" in device.peak else 4) * MIB if stack.transformer_engine else 0.0
    return 2 * cublas + engine * (5 if grouped and stack.grouped else 1)
