"""Running a user's model without side effects on random state, warnings or printed output."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from mpkit.common.caught import report
from mpkit.common.process_wide import LOCK, silent
from mpkit.errors import UnwisePlan

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress printing, logging and warnings inside the context, and restore all random states afterwards.

    One thread at a time: others that train wait, and what they print meanwhile is shown.

    What mpkit itself reports there (`UnwisePlan`) is shown afterwards, unless the context ends with an exception.
    """
    with LOCK:
        states = random.getstate(), np.random.get_state()
        logged = logging.root.manager.disable
        logging.disable(
            logging.CRITICAL
        )  # fake tensors log every refusal, with a traceback from inside torch
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught, silent():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UnwisePlan)
            try:
                yield
            finally:
                logging.disable(logged)
                random.setstate(states[0])
                np.random.set_state(states[1])
    for message in dict.fromkeys(str(each.message) for each in caught if each.category is UnwisePlan):
        report(message)
