"""Training data: small datasets that need no download, and loaders on ranks.

The functions below create data for examples; training accepts any sequence of (inputs, targets).
"""

from mpkit.strategies.data.datasets import Batch, images, spirals, text, text_batches
from mpkit.strategies.data.digest import data_digest, sample_digests

__all__ = ["Batch", "data_digest", "images", "sample_digests", "spirals", "text", "text_batches"]
