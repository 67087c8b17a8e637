"""Modes of torch around `cluster.train`: ranks are processes of their own, which such a mode does not reach."""

from __future__ import annotations

import torch

__all__ = ["check_surroundings"]


def check_surroundings() -> None:
    """Check that no mode is on in which plain PyTorch would train in another way, or not at all.

    Raises:
        ValueError: gradients are off, or autocast is on.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise ValueError(
            f"cluster.train inside {mode}: gradients are off there (or since torch.set_grad_enabled(False)), and "
            "nothing can be trained. Call it outside, or in `with torch.inference_mode(False), torch.enable_grad():`"
        )
    for name in ("cpu", "cuda", "xpu"):
        if torch.is_autocast_enabled(name):
            dtype = torch.get_autocast_dtype(name)
            raise ValueError(
                f'cluster.train inside torch.autocast("{name}", {dtype}): ranks are processes of their own, which it '
                'does not reach. Call it outside, with mk.Plan(..., precision="bf16"), or let the model do it: '
                f'model.forward = torch.autocast("{name}", {dtype})(model.forward)'
            )
