"""Running a user's model without side effects on random state, warnings or printed output, and on few threads.

A thread of torch that waits for the others spins: it keeps its core busy. If another process needs that core, as the
fork server does while it imports torch, or a rank, the threads wait for each other for several times as long as one
thread would compute.
"""

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from mpkit.common.exceptions import report
from mpkit.common.process_wide import LOCK, silent
from mpkit.errors import UnwisePlan


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress printing, logging and warnings inside the context, and restore all random states afterwards.

    One thread at a time: others that train wait, and their output is shown. What mpkit itself reports (`UnwisePlan`)
    appears afterwards, unless the context ends with an exception.
    """
    with LOCK:
        states = random.getstate(), np.random.get_state()
        logged = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # fake tensors log every refusal, with torch's traceback
        with torch.random.fork_rng(devices=[]), silent(), warnings.catch_warnings(record=True) as caught:
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


@contextlib.contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Let torch compute on this many threads inside the context, but on no more than otherwise, and at least one."""
    with LOCK:
        before = torch.get_num_threads()
        number = max(1, min(number, before))
        if number == before:
            yield
            return
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)
