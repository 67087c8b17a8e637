"""Every private name of torch that mpkit uses. No other module imports one (`tests/repository/test_torch_private.py`).

torch may rename or remove a private name in any release: the comments say what mpkit does with each. A name that is
missing raises an error that says so, when the first module asks for it. Nothing is imported before that, and this
module needs no torch.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

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

__all__ = ["GENERATORS", "NAMES", "SEEN", "current"]

SEEN = ("2.11", "2.13", "2.14", "2.15")
"""The releases of torch that have all of these names."""

GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""What torch.utils.checkpoint calls around a block, the newest name first: since 2.14, and before."""

NAMES = (
    # run a model on tensors without content, which checks a plan before a rank starts
    ("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode DataDependentOutputException"),
    # see each operator of a forward and a backward: FLOPs, bytes, random numbers, roundings
    ("torch.utils._python_dispatch", "TorchDispatchMode _disable_current_modes _get_current_dispatch_mode"),
    # find the tensors in nested arguments and results
    ("torch.utils._pytree", "SUPPORTED_NODES tree_leaves tree_map tree_map_only"),
    # stop at tokens beyond the vocabulary without waiting for the GPU
    ("torch", "_assert_async"),
    # leave modes of the program in force
    ("torch.overrides", "_get_current_function_mode_stack"),
    # compute on the content of its own tensor classes
    ("torch._C", "DisableTorchFunctionSubclass _disabled_torch_function_impl"),
    # tell one backward from another, for ZeRO-3 and the wrappers' gradients
    ("torch._C", "_current_graph_task_id _will_engine_execute_node"),
    # gather parameters again in ZeRO-3's backward
    ("torch._C._autograd", "_get_sequence_nr"),
    # act when a backward ends, in the wrappers
    ("torch:autograd.Variable", "_execution_engine"),
    # see backwards of watched programs
    ("torch.autograd.graph", "_engine_run_backward"),
    # reject layers within torch.func transforms
    ("torch._C._functorch", "peek_interpreter_stack"),
    # tell a dry run from a run
    ("torch._C", "_TorchDispatchModeKey _get_dispatch_mode"),
    # record the program's own calls of torch.distributed, and not mpkit's twice
    (
        "torch._C",
        "DispatchKey DispatchKeySet _ExcludeDispatchKeyGuard _dispatch_keyset_full_after",
    ),
    # record when functional collectives complete
    ("torch:ops._c10d_functional", "wait_tensor"),
    # share a launcher's store and leave its process groups as they were
    ("torch.distributed.distributed_c10d", "_get_default_store _world"),
    # sign objects that ranks send each other under a launcher
    ("torch.distributed.distributed_c10d", "_pickler _unpickler"),
    # watch torch's own pipelines
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
    # play ranks in one process
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    # record data loading of watched programs
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    # find the module in a compiled one
    ("torch._dynamo", "OptimizedModule"),
    # take BatchNorm's statistics over the whole batch
    ("torch.nn.modules.batchnorm", "_BatchNorm"),
    # find dropout within experts
    ("torch.nn.modules.dropout", "_DropoutNd"),
    # tell losses from layers in watched programs
    ("torch.nn.modules.loss", "_Loss"),
    # reject hooks on all modules, and answer load_state_dict as torch does
    (
        "torch.nn.modules.module",
        "_IncompatibleKeys _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks "
        "_global_forward_pre_hooks",
    ),
    # reject hooks on all optimizers
    ("torch.optim.optimizer", "_global_optimizer_post_hooks _global_optimizer_pre_hooks"),
    # send parametrized modules to ranks
    ("torch.nn.utils.parametrize", "_inject_new_class _inject_property"),
    # count the FLOPs and bytes of these operators, and compute the tiles of ring attention on CPUs
    (
        "torch:ops.aten",
        "_grouped_mm _local_scalar_dense _unsafe_view _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
)  # fmt: skip
"""(module, or "module:object"; the names there)"""


@cache
def _places() -> dict[str, str]:
    return {name: place for place, names in NAMES for name in names.split()}


def current(name: str) -> Any:
    """Return what torch has by a private name now, which a program may have replaced.

    Raises:
        KeyError: no row lists the name.
        MpkitError: this release of torch does not have it.
    """
    place = _places()[name]
    module, _, within = place.partition(":")
    try:
        return resolve_name(f"{module}:{'.'.join(filter(None, (within, name)))}")
    except (ImportError, AttributeError):
        import torch

        raise MpkitError(
            f"torch {torch.__version__} has no {name} in {place.replace(':', '.')}, which mpkit uses; torch "
            f"{', '.join(SEEN)} have it"
        ) from None


def __getattr__(name: str) -> Any:
    """Return what torch has by a private name: `from mpkit.common.torch_private import NAME` comes here."""
    try:
        return current(name)
    except KeyError:
        raise AttributeError(f"{__name__} lists no private name {name!r} of torch") from None
