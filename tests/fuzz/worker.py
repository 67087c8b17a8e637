"""Reads damaged files, one after the other, with limits of memory and CPU time, and prints what came of them.

python -m tests.fuzz.worker READER FIRST LAST SECONDS
"""

import faulthandler
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.fuzz.readers import READERS

ROOM = 1 << 30
"""Bytes that a reader may take beside what this process has when it begins."""

LONGEST = 4_000
"""Characters of a message."""


class TooLong(BaseException):
    """A file took more than its share of CPU time."""


def main(name: str, first: int, last: int, seconds: float) -> None:
    reader = READERS[name]
    warnings.simplefilter("ignore")
    seeds = reader.seeds()
    sound = Path(tempfile.mkdtemp())
    for number, seed in enumerate(seeds):  # and whatever it imports
        path = sound / f"seed{number}{reader.ending}"
        path.write_bytes(seed)
        reader.read(path)
    shutil.rmtree(sound)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _too_long)
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)  # also where Python cannot interrupt
    counts: Counter[str] = Counter()
    faults: dict[str, str] = {}
    for case in range(first, last):
        draw = random.Random(f"{name} {case}")
        data = reader.damage(draw.choice(seeds), draw)
        folder = Path(tempfile.mkdtemp())
        path = folder / f"case{case}{reader.ending}"
        path.write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            with redirect_stdout(None):
                reader.read(path)
            counts["read"] += 1
        except reader.error as error:
            counts["refused"] += 1
            text = str(error)
            if not text or len(text) > LONGEST or (reader.names and path.name not in text):
                faults.setdefault(
                    "message", f"case {case}, a message of {len(text)} characters: {text[:400]!r}"
                )
        except BaseException as error:
            where = "".join(traceback.format_exception(error))
            frame = traceback.extract_tb(error.__traceback__)[-1]
            faults.setdefault(
                f"{type(error)} {frame.filename} {frame.lineno}", f"case {case}: {where[-2500:]}"
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(folder)
    print(json.dumps(counts))
    print("\n\n".join(faults.values()), file=sys.stderr)
    raise SystemExit(bool(faults))


def _too_long(*_: Any) -> None:
    raise TooLong


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
