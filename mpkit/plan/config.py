"""Config: the text of a configuration, with a comment per key and what the format cannot say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpkit.common.disk import write_whole


class Config(str):
    """What `Plan.to` returns: the text of the file, as a str.

    In a notebook, and as `config.annotated`, it shows comments also where the format (JSON) has none.

    >>> from mpkit import Plan
    >>> config = Plan.zero(2, 4, precision="bf16").to("deepspeed", micro_batch=8)
    >>> config.startswith("{"), config.cannot_say
    (True, {})
    >>> config.comments["train_micro_batch_size_per_gpu"]
    'samples per GPU and micro-batch'

    Attributes:
        kind: the name of the format.
        comments: what each key means, by its name; nested keys are joined by dots.
        cannot_say: why the format cannot say this, by field of the Plan: each field that differs in the Plan that is
            read from this text.
    """

    kind: str
    comments: Mapping[str, str]
    cannot_say: Mapping[str, str]
    annotated: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the text to a file, whole or not at all, and return its path.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(Path(path), self.encode())
        return Path(path)

    def __repr__(self) -> str:
        return self.annotated
