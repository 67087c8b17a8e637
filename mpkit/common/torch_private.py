"""Every private name of torch that mpkit uses. No other module imports one (`tests/repository/test_torch_private.py`).

    NAMES         functions and classes: `from mpkit.common.torch_private import FakeTensor`
    ATTRIBUTES    private attributes of torch's objects, such as `tensor._version`; used where they are needed

torch may rename or remove a private name in any release. Each row therefore says in which releases of torch the name
was seen and what mpkit does with it. A name that is missing raises an error that says so in one sentence, when the
first module asks for it. Nothing is imported before that, and this module needs no torch.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from mpkit.errors import MpkitError

if TYPE_CHECKING:
    from torch import _assert_async as _assert_async
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as _DropoutNd
    from torch.nn.modules.loss import _Loss as _Loss
    from torch.nn.modules.module import _IncompatibleKeys as _IncompatibleKeys
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as _disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode as _get_current_dispatch_mode
    from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

__all__ = ["ATTRIBUTES", "GENERATORS", "NAMES", "PrivateNames", "current", "place_of"]

SEEN = ("2.11", "2.13", "2.14", "2.15")
"""The releases of torch that were looked at: a row that says nothing else was seen in all of them."""


class PrivateNames(NamedTuple):
    """Where private names of torch lie, and what mpkit does with them.

    Attributes:
        place: the module, and the object or class within it, that has them ("torch._C", "torch:Tensor").
        names: the names there.
        use: what mpkit does with them, and so cannot do without them.
        seen: the releases of torch that were seen to have them.
    """

    place: str
    names: tuple[str, ...]
    use: str
    seen: tuple[str, ...] = SEEN


GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""What torch.utils.checkpoint calls around a block, the newest name first."""

_KERNELS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")

NAMES = (
    PrivateNames(
        "torch._subclasses.fake_tensor", ("FakeTensor", "FakeTensorMode", "DataDependentOutputException"),
        "run a model on tensors without content, which checks a plan before a rank starts",
    ),
    PrivateNames(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode", "_disable_current_modes", "_get_current_dispatch_mode"),
        "see each operator of a forward and a backward: FLOPs, bytes, random numbers, roundings",
    ),
    PrivateNames(
        "torch.utils._pytree", ("SUPPORTED_NODES", "tree_leaves", "tree_map", "tree_map_only"),
        "find the tensors in nested arguments and results",
    ),
    PrivateNames("torch", ("_assert_async",), "stop at tokens beyond the vocabulary without waiting for the GPU"),
    PrivateNames("torch.overrides", ("_get_current_function_mode_stack",), "leave modes of the program in force"),
    PrivateNames(
        "torch._C", ("DisableTorchFunctionSubclass", "_disabled_torch_function_impl"),
        "compute on the content of its own tensor classes",
    ),
    PrivateNames(
        "torch._C", ("_current_graph_task_id", "_will_engine_execute_node"),
        "tell one backward from another, for ZeRO-3 and the wrappers' gradients",
    ),
    PrivateNames("torch._C._autograd", ("_get_sequence_nr",), "gather parameters again in ZeRO-3's backward"),
    PrivateNames("torch:autograd.Variable", ("_execution_engine",), "act when a backward ends, in the wrappers"),
    PrivateNames("torch.autograd.graph", ("_engine_run_backward",), "see backwards of watched programs"),
    PrivateNames("torch._C._functorch", ("peek_interpreter_stack",), "reject layers within torch.func transforms"),
    PrivateNames("torch._C", ("_TorchDispatchModeKey", "_get_dispatch_mode"), "tell a dry run from a run"),
    PrivateNames(
        "torch._C",
        (
            "DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard", "_dispatch_get_all_op_names",
            "_dispatch_keyset_full_after",
        ),
        "record the program's own calls of torch.distributed, and not mpkit's twice",
    ),
    PrivateNames("torch:ops._c10d_functional", ("wait_tensor",), "record when functional collectives complete"),
    PrivateNames(
        "torch.distributed.distributed_c10d", ("_get_default_store", "_world"),
        "share a launcher's store and leave its process groups as they were",
    ),
    PrivateNames(
        "torch.distributed.distributed_c10d", ("_pickler", "_unpickler"),
        "sign objects that ranks send each other under a launcher",
    ),
    PrivateNames("torch.distributed.pipelining.stage", ("_PipelineStageBase",), "watch torch's own pipelines"),
    PrivateNames("torch.testing._internal.distributed.fake_pg", ("FakeStore",), "play ranks in one process"),
    PrivateNames("torch.utils.data.dataloader", ("_BaseDataLoaderIter",), "record data loading of watched programs"),
    PrivateNames("torch._dynamo", ("OptimizedModule",), "find the module in a compiled one"),
    PrivateNames("torch.nn.modules.batchnorm", ("_BatchNorm",), "take BatchNorm's statistics over the whole batch"),
    PrivateNames("torch.nn.modules.dropout", ("_DropoutNd",), "find dropout within experts"),
    PrivateNames("torch.nn.modules.loss", ("_Loss",), "tell losses from layers in watched programs"),
    PrivateNames(
        "torch.nn.modules.module",
        (
            "_IncompatibleKeys", "_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks",
            "_global_forward_pre_hooks",
        ),
        "reject hooks on all modules, and answer load_state_dict as torch does",
    ),
    PrivateNames(
        "torch.optim.optimizer", ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
        "reject hooks on all optimizers",
    ),
    PrivateNames(
        "torch.nn.utils.parametrize", ("_inject_new_class", "_inject_property"), "send parametrized modules to ranks"
    ),
    PrivateNames(
        "torch:ops.aten",
        (
            "_grouped_mm", "_local_scalar_dense", "_unsafe_view",
            *(f"_scaled_dot_product_{kernel}{half}" for kernel in _KERNELS for half in ("", "_backward")),
        ),
        "count the FLOPs and bytes of these operators, and compute the tiles of ring attention on CPUs",
    ),
)  # fmt: skip

ATTRIBUTES = (
    PrivateNames("torch:Tensor", ("_version",), "see that a tensor was written to"),
    PrivateNames(
        "torch:Tensor", ("_backward_hooks", "_post_accumulate_grad_hooks"), "reject hooks that would see parts"
    ),
    PrivateNames("torch:Tensor", ("_make_subclass", "_make_wrapper_subclass"), "make its own tensor classes"),
    PrivateNames("torch:UntypedStorage", ("_cdata",), "tell memory that two tensors share"),
    PrivateNames("torch._ops:OpOverload", ("_schema", "_handle"), "know what an operator writes; pass calls on"),
    PrivateNames("torch.library:Library", ("_destroy",), "end the recording of a program's communication"),
    PrivateNames("torch.autograd.graph:Node", ("_sequence_nr",), "order ZeRO-3's backward"),
    PrivateNames(
        "torch.nn:Module",
        (
            "_backward_hooks", "_buffers", "_call_impl", "_forward_hooks", "_forward_pre_hooks", "_modules",
            "_non_persistent_buffers_set", "_parameters", "_state_dict_hooks", "_state_dict_pre_hooks",
        ),
        "replace parameters and layers, and see which hooks they have",
    ),
    PrivateNames("torch.nn:BatchNorm1d", ("_check_input_dim",), "check shapes as torch does"),
    PrivateNames("torch.nn:Conv2d", ("_conv_forward",), "compute a part of a convolution"),
    PrivateNames(
        "torch.optim:Optimizer", ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"), "see an optimizer's hooks"
    ),
    PrivateNames(
        "torch.distributed.device_mesh:DeviceMesh", ("_flatten", "_pg_registry"), "name the axes of a mesh; free groups"
    ),
    PrivateNames("torch.distributed:ProcessGroup", ("_get_backend",), "know whether gloo or nccl joins ranks"),
    PrivateNames("torch.distributed.tensor:DTensor", ("_local_tensor",), "count what one rank holds"),
    PrivateNames(
        "torch.utils.data.dataloader:_BaseDataLoaderIter", ("_num_yielded",), "number batches of watched programs"
    ),
    PrivateNames("torch.utils.checkpoint", GENERATORS[1:], "recompute within a model that is cut", SEEN[:2]),
    PrivateNames("torch.utils.checkpoint", GENERATORS[:1], "recompute within a model that is cut", SEEN[2:]),
)  # fmt: skip


@cache
def place_of(name: str) -> PrivateNames:
    """Return the row of a private name.

    Raises:
        KeyError: no row lists it.

    >>> place_of("FakeTensor").place
    'torch._subclasses.fake_tensor'
    """
    return {each: row for row in NAMES for each in row.names}[name]


def current(name: str) -> Any:
    """Return what torch has by a private name now, which a program may have replaced.

    Raises:
        KeyError: no row lists the name.
        MpkitError: this release of torch does not have it.
    """
    row = place_of(name)
    import torch

    module, _, within = row.place.partition(":")
    try:
        return resolve_name(f"{module}:{'.'.join(filter(None, (within, name)))}")
    except (ImportError, AttributeError):
        raise MpkitError(
            f"torch {torch.__version__} has no {name} in {row.place.replace(':', '.')}, with which mpkit would "
            f"{row.use}; torch {', '.join(row.seen)} have it."
        ) from None


def __getattr__(name: str) -> Any:
    """Return what torch has by a private name: `from mpkit.common.torch_private import NAME` comes here."""
    try:
        return current(name)
    except KeyError:
        raise AttributeError(f"{__name__} lists no private name {name!r} of torch") from None
