"""Every private name of torch that mpkit uses. No other module imports one (`tests/repository/test_torch_private.py`).

torch may rename or remove a private name in any release: `torch_private.toml` says what mpkit does with each. The first
import of a missing name raises an error that says so. This module imports nothing before that, and needs no torch.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
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


SEEN = ("2.11", "2.13", "2.14", "2.15")
"""The releases of torch that have all of these names."""

GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""Names of the function that torch.utils.checkpoint calls around a block: since 2.14, and before."""


@cache
def places() -> dict[str, str]:
    """Return the modules of the names, or "module:object", which are in `torch_private.toml`."""
    return tomllib.loads((files(__package__) / "torch_private.toml").read_text(encoding="utf-8"))


def current(name: str) -> Any:
    """Return torch's present object of a private name, which a program may have replaced.

    Raises:
        KeyError: no row lists the name.
        MpkitError: this release of torch does not have it.
    """
    place = places()[name]
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
    """Return torch's object of a private name, for `from mpkit.common.torch_private import NAME`."""
    try:
        return current(name)
    except KeyError:
        raise AttributeError(f"{__name__} lists no private name {name!r} of torch") from None
