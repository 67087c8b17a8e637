"""Stack: what a software stack does with a plan, and the constants that are fitted for it on a device.

How the division of work is carried out differs from framework to framework: in which precision gradients are added up,
what is gathered at once, what runs beside what. What remains, how well kernels use a device, is in five constants.
"""

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
    """The constants that are fitted for a device and a stack."""

    matmul: float = 0.72  # the share of the peak that large matrix products reach
    attention: float = 0.5  # the share of the peak that fused attention reaches
    traffic: float = 1.0  # bytes that elementwise operators move, as a multiple of well fused ones
    fixed: float = 20e-6  # seconds of launches per layer and micro-batch, forward; twice as many backward
    straggle: float = 0.005  # how much longer a step is per doubling of the nodes: all wait for the slowest


PRIOR = Constants()
"""For stacks without a preset: .72 of the peak fits 183 matrix products that were measured on an A100."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does."""

    name: str
    element: int = 2  # bytes per element of activations and of the weights that products read
    fp8: bool = False  # whether products with weights run in 8 bits
    fp4: bool = False  # whether they run in 4 bits (NVFP4)
    converts_once: bool = False  # whether weights are converted to 8 or 4 bits per step, not per micro-batch
    scaling: str = "tensor"  # or "row", "block" (16 or 32: MXFP8, NVFP4), "block128": what shares a scale
    eager: bool = False  # whether each elementwise operator is a kernel of its own
    fused: bool = True  # whether attention is fused, so that its s x s scores never leave the chip
    gradient: float = 2.0  # bytes per parameter of accumulated gradients
    reduced: float = 2.0  # bytes per parameter of gradients as they are sent
    states: float = 12.0  # bytes per parameter of optimizer states and master weights
    converted: float = 0.0  # bytes per parameter of 32-bit gradients that exist during the update only
    overlap: bool = True  # whether communication of replicas runs beside compute
    staged_overlap: bool = True  # whether it does so in a pipeline too
    async_tp: bool = False  # whether tensor-parallel communication is cut up and runs beside its product
    userbuffers: bool = False  # whether all of it does, in as many parts as ranks (Transformer Engine)
    gathers_ahead: int = 2  # lowest ZeRO stage that gathers new weights beside the next forward
    bucket: float = 25 * MIB  # bytes reduced or gathered at once under ZeRO 0 to 2; ZeRO-3 gathers by layer
    bucket_by_replicas: bool = False  # Megatron: max(40 M, 1 M x replicas) parameters; without overlap all
    partition: float = 0.0  # elements of DeepSpeed's flat buffers (`reduce_bucket_size`)
    # Bytes per logit at the loss's peak: logits, their copy in 32 bits, its gradient. Megatron writes that over the
    # copy (its fused loss has two copies, 10), and Transformer Engine's over the logits (2).
    logits: float = 10.0
    deferred: int = 0  # micro-batches whose head gradient waits (Megatron's defer_embedding_wgrad_compute)
    loss: float = 16.0  # bytes per logit that the loss moves, forward and backward; 16 if it is fused
    gates: int = 4  # tensors that a gated MLP keeps: gate, partner, product; eager code its activation too
    sent: int = 2  # copies of a token kept per expert that it visits: as sent, and as the expert reads it
    # Bytes per token and expert of the router's scores; Megatron keeps the softmax of its auxiliary loss (4), the order
    # of all pairs (8) and their mask (1): moe_utils.py.
    routing: float = 4.0
    # Whether the router's weight multiplies an expert's activation, so that one more tensor is kept without a gate
    weighs_inside: bool = False  # (Megatron's experts.py)
    grouped: bool = False  # whether a rank's experts multiply at once (Transformer Engine's GroupedLinear)
    attention_outputs: int = 1  # 2 if its readers want different layouts (FlashAttention 2 in Megatron)
    copies: float = 0.0  # bytes per parameter of DDP's buckets if gradients are not views of them
    dropout: bool = False  # whether dropout masks are kept
    early_stop: bool = False  # whether recomputation skips the last product (checkpoint, use_reentrant=False)
    blocking_p2p: bool = False  # whether a stage waits until its messages are sent
    posts_ahead: bool = False  # whether it does not if stages are interleaved (Megatron's overlap_p2p_comm)
    scatter_gather: bool = False  # whether each rank of a stage sends 1/t of a message for all to gather
    placeholders: bool = False  # whether a backward allocates gradients by weight shape (Transformer Engine)
    transformer_engine: bool = False  # whether it multiplies with Transformer Engine, which keeps a workspace
    cublas_workspace: float = 0.0  # bytes that CUBLAS_WORKSPACE_CONFIG asks for; 0: cuBLAS decides
    deduplicates: bool = False  # whether a token goes once to each rank of its experts (DeepEP)
    divides_experts: bool = False  # whether tp divides experts that ep does not, whatever the model says
    by_weight: bool = False  # whether stages are cut by the weights of their layers, the head included
    overlaps_pairs: bool = False  # whether a pair (F & B) computes while each other's tokens travel

    def blocks(self, virtual_stages: int) -> bool:
        """Return whether a stage waits until its messages are sent, with so many stages per rank."""
        return self.blocking_p2p and not (self.posts_ahead and virtual_stages > 1)

    def calls(
        self, parameters: Numbers, element: float, zero: Numbers, replicas: Numbers, layers: Numbers
    ) -> Numbers:
        """Return how many collectives (1 or more) send so many gradients or weights of `element` bytes each.

        PyTorch's FSDP makes one per layer, DeepSpeed one per `partition` of elements, Megatron and DDP one per bucket.
        """
        if self.bucket_by_replicas:
            bucket = larger(40e6, 1e6 * replicas)
            return larger(1, -(-parameters // bucket)) if self.overlap else 1
        if self.partition:
            return larger(1, -(-parameters // self.partition))
        return where(zero == 2, larger(1, layers), larger(1, -(-parameters * element // self.bucket)))


@cache
def stacks() -> Mapping[str, Stack]:
    """Return the stacks whose published steps were examined, and plain PyTorch, by name."""
    text = files("mpkit.prediction.cost_model").joinpath("stacks.toml").read_text(encoding="utf-8")
    return {name: Stack(name, **facts) for name, facts in tomllib.loads(text).items()}


def stack_of(stack: str | Stack | None = None, **changes: object) -> Stack:
    """Return a stack by name, with changed fields."""
    if isinstance(stack, Stack):
        return replace(stack, **changes)  # type: ignore[arg-type]
    name = "pytorch" if stack is None else stack
    if name not in stacks():
        near = get_close_matches(str(name), stacks(), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"stack={stack!r} is none of {', '.join(map(repr, stacks()))}.{hint}")
    return replace(stacks()[name], **changes)  # type: ignore[arg-type]


def stack_for(plan: Plan, stack: str | Stack | None = None, half: str = "bf16") -> tuple[Stack, Plan]:
    """Return the software that runs a plan, and the plan in its precision; None: PyTorch in the plan's own."""
    narrow = plan.precision != "full"
    if stack is None:
        return _with_bucket("pytorch" if narrow else "pytorch-fp32", plan.bucket_mb * 2**20), plan
    chosen = stack_of(stack)
    if narrow and chosen.element == 4:
        raise ValueError(
            f"stack={chosen.name!r} computes in 32 bits, and the plan in {plan.precision!r}: leave stack= out, or ask "
            f"for {call_of(plan, {'precision': 'full'})}"
        )
    return chosen, plan if narrow or chosen.element == 4 else replace(plan, precision=half)


@cache
def _with_bucket(name: str, bucket: float) -> Stack:
    return replace(stacks()[name], bucket=bucket)


@cache
def workspaces(stack: Stack, device: Device, *, grouped: bool = False) -> float:
    """Return the bytes that cuBLAS and Transformer Engine keep within torch's allocator.

    cuBLAS keeps one workspace per multiplying thread, forward and backward: what CUBLAS_WORKSPACE_CONFIG says (:4096:8
    is 32 MiB), or 32 MiB on Hopper and 8.1 MiB on other NVIDIA GPUs. Transformer Engine keeps another one, 32 MiB or 4
    before Hopper, and four more for the streams of experts (`get_multi_stream_cublas_workspace`).

    Source: torch/aten/src/ATen/cuda/CublasHandlePool.cpp; transformer_engine/pytorch/module/base.py.
    """
    if not re.match(r"(A|V|T|L|H|B|GH|GB)\d|RTX|TITAN", device.name):
        return 0.0
    cublas = stack.cublas_workspace or (32 if re.match(r"G?H\d", device.name) else 8.125) * MIB
    engine = (32 if "float8" in device.peak else 4) * MIB if stack.transformer_engine else 0.0
    return 2 * cublas + engine * (5 if grouped and stack.grouped else 1)
