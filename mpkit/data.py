"""Training data that needs no download, and digests of samples: what `mpkit.strategies.data` offers."""

from mpkit.strategies.data import *  # noqa: F403
from mpkit.strategies.data import __all__ as __all__
