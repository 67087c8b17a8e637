"""Small models to train: what `mpkit.strategies.models` offers."""

from mpkit.strategies.models import *  # noqa: F403
from mpkit.strategies.models import __all__ as __all__
