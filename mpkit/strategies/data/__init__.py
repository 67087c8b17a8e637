"""Training data: small datasets that need no download, loaders on ranks, and streams.

The functions below create data for examples; training accepts any sequence of (inputs, targets).
"""

from __future__ import annotations

from mpkit.strategies.data.datasets import Batch, images, spirals, text, text_batches

__all__ = ["Batch", "images", "spirals", "text", "text_batches"]
