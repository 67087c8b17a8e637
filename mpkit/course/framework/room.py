"""Ranks for a check: with seeded delays, limits on time and memory, and an explanation of every hang.

On a rank:

    limit     limit the memory
    delay     sleep before each communication, as long as the case's seed says: answers that rely on luck are found out
    watch     record what the answer sends with torch.distributed itself, like what it sends with `ctx.comm`
    count     count the multiplications that it computes, and the bytes that it holds
    play      call the exercise's own function with the answer and the case

The answer arrives as bytes and is unpacked on ranks only, so that its code runs only there. Its results return as plain
data: reading a pickle can call anything that the pickle names, and a rank that ran student code may have written
anything. So a result is bytes that `torch.load(weights_only=True)` reads, inside a pickle that may not name anything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import pickle
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from mpkit.common.launch_folder import part
from mpkit.course.framework.equal import is_tensor
from mpkit.course.framework.exercise import HOME, Case, Seen
from mpkit.course.sandbox.allowance import BEGAN, Limits, run_within
from mpkit.errors import CommMismatch, Deadlock, RankFailed

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.rank_context import Context


Play = Callable[[Any, Any, Case], Any]
"""The function that runs on a rank: takes the rank's context, the answer and the case; returns the result to check."""


@dataclass(frozen=True)
class PackedAnswer:
    """A student's answer, packed by value.

    Attributes:
        packed: the answer as bytes, made by cloudpickle.
        name: the name of the function or class; of any other value, the name of its type.
        print: what the program says, the same for the same program (`fingerprint`); "" if nobody asked.
    """

    packed: bytes
    name: str
    print: str = ""

    @classmethod
    def pack(cls, value: Any) -> PackedAnswer:
        """Pack a value.

        Raises:
            ValueError: The value holds something that cannot be sent to another process.
        """
        name = getattr(value, "__name__", type(value).__name__)
        try:
            return cls(cloudpickle.dumps(value), name, fingerprint(value))
        except Exception as error:
            raise ValueError(
                f"{name} uses something that cannot be sent to ranks ({type(error).__name__}: {error}). Make such "
                "things (files, locks, clusters, running generators) inside of the function that uses them."
            ) from None


def fingerprint(answer: Any) -> str:
    """Return a short text that is the same for a function or class of the same code, whatever its layout and comments.

    Other values are the same if they are equal. What an answer calls in other cells is not looked at.

    >>> fingerprint({"a": 1}) == fingerprint({"a": 1}), fingerprint({"a": 1}) == fingerprint({"a": 2})
    (True, False)
    """
    functions = (
        [f for f in vars(answer).values() if inspect.isfunction(f)] if inspect.isclass(answer) else [answer]
    )
    try:
        sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
        said = "".join(ast.dump(ast.parse(source)) for source in sources).encode()
    except (OSError, TypeError, SyntaxError):  # no function or class, or one without a source
        said = cloudpickle.dumps(answer)
    return hashlib.sha256(said).hexdigest()[:16]


class Room:
    """Ranks to try answers on.

    Args:
        cluster: the cluster whose helper process is used; None: the room starts its own.
        limits: the limits on each case.
    """

    def __init__(self, cluster: Cluster | None = None, limits: Limits | None = None) -> None:
        from mpkit.launch.session.cluster import Cluster

        self._own = cluster is None
        self._cluster = cluster if cluster is not None else Cluster(ranks=1, device="cpu")
        self.limits = limits if limits is not None else Limits()

    def cluster(self, ranks: int) -> Cluster:
        """Return a cluster of the given number of ranks, forked from the one helper process."""
        from mpkit.launch.session.cluster import Cluster

        if self._own and self._cluster.fork_server_pid is None:  # an answer has ended it
            self._cluster.close()
            self._cluster = Cluster(ranks=1, device="cpu")
        return self._cluster.resized(ranks)

    @property
    def pids(self) -> set[int]:
        """The process id of the helper process; empty if there is none now."""
        pid = self._cluster.fork_server_pid
        return {pid} if pid is not None else set()

    def close(self) -> None:
        """End the helper process."""
        self._cluster.close()

    def play(self, play: Play, answer: PackedAnswer, case: Case) -> Seen:
        """Run the answer on the case's ranks.

        Args:
            play: the function that runs on every rank, with the rank's context, the answer and the case.
            answer: the packed answer.
            case: the case, which has the number of ranks.

        Raises:
            TooBusy: the machine did not let the ranks run.
        """
        from mpkit.launch.launch import Launch

        printed: list[str] = []
        _send_exercises_by_value()
        launch = self.cluster(case.ranks).launch(
            on_rank, (play, answer.packed, case, self.limits), sink=printed.append
        )
        assert isinstance(launch, Launch)  # exercises start their own ranks
        run_within(launch, self.limits)
        evidence: dict[str, Any] = {"case": case, "trace": launch.trace, "printed": printed}
        try:
            got, used = zip(*launch.results(unpack_result), strict=True)
            return Seen(got=list(got), used=used, **evidence)
        except Deadlock as error:
            hang = name_cell_lines(re.sub(r"\n\(A step that is only slow.*", "", str(error)))
            return Seen(hang=hang, **evidence)
        except CommMismatch as error:
            mismatch = name_cell_lines(str(error))
            return Seen(error=mismatch, mismatch=mismatch, **evidence)
        except RankFailed as error:
            said = (
                error_and_line(f"rank {error.rank}: ", error.traceback)
                if error.traceback
                else {"error": str(error)}
            )
            return Seen(**{**evidence, **said})
        except (pickle.UnpicklingError, OSError, EOFError, RuntimeError, ValueError, TypeError) as error:
            return Seen(error=f"its result cannot be read: {type(error).__name__}: {error}", **evidence)


@functools.cache
def shared_room() -> Room:
    """Return the default room; its helper process stays warm from check to check, until Python ends."""
    return Room()


def _send_exercises_by_value() -> None:
    """Send an exercise's functions to ranks with what they use, and not their module, which has the solution."""
    if HOME in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[HOME])


def on_rank(ctx: Context, play: Play, packed: bytes, case: Case, limits: Limits) -> Any:
    """Run the answer on this rank, under the limits."""
    from mpkit.course.sandbox.usage import Counter
    from mpkit.strategies.program_calls.communication import compare_calls

    # ---- limit
    limit_memory(limits.memory)
    # ---- delay
    if limits.delay:
        ctx.comm.delays(_delays(case, ctx.rank, limits.delay))
    # ---- watch, count
    counter = Counter(part(ctx.record.folder, ctx.rank, BEGAN).touch)
    with compare_calls(ctx.comm), counter.count_calls():
        # ---- play
        result = play(ctx, counter.count(pickle.loads(packed)), case)
    return pack_result((result, counter.usage))


def limit_memory(more: int) -> None:
    """Allow this process to allocate that many more bytes of data, if the system can limit it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[5])  # data and stack, as RLIMIT_DATA counts them
    except (ImportError, OSError):  # not Linux
        return
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _delays(case: Case, rank: int, longest: float) -> Callable[[], None]:
    """Return a function that sleeps, mostly for a short time: each rank is late now and then, at times of its own."""
    import random

    draw = random.Random(f"{case.seed} {case.ranks} {rank}")
    return lambda: time.sleep(longest * draw.random() ** 3)


CELL = r"(?:/\S*ipykernel_\d+/\d+\.py|<[^<>\n]+>)"
"""How Python names a notebook's cell, or code that is run in place of one."""


def name_cell_lines(text: str) -> str:
    """Name lines of a notebook's cells as students do.

    >>> name_cell_lines("a call at /tmp/ipykernel_7/12.py:3")
    'a call at line 3 of the cell'
    >>> name_cell_lines('File "/tmp/ipykernel_7/12.py", line 2 in f')
    'line 2 of the cell, in f'
    >>> name_cell_lines("SyntaxError: expected ':' (<ipython-input-2-00>, line 2)")
    "SyntaxError: expected ':' (line 2 of the cell)"
    """
    text = re.sub(rf'File "{CELL}", line (\d+) in ', r"line \1 of the cell, in ", text)
    text = re.sub(rf"\({CELL}, line (\d+)\)", r"(line \1 of the cell)", text)
    text = re.sub(rf"{CELL}:(\d+)(?= in )", r"line \1 of the cell,", text)
    return re.sub(rf"{CELL}:(\d+)", r"line \1 of the cell", text)


def error_and_line(rank: str, frames: str) -> dict[str, str]:
    """Return the error in one line, after the rank, and the last line of the student's own code that led to it.

    Args:
        rank: which rank it was on, in words.
        frames: the traceback.
    """
    last = [line for line in frames.rstrip().splitlines() if line and not line.startswith((" ", "|"))][-1]
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n(?:    (?! *File)(.*)\n)?', frames)
    own = [
        place for place in places if not re.search(r"[/\\](mpkit|torch|lib[/\\]python[\d.]+)[/\\]", place[0])
    ]
    where = ""
    if own:
        _, line, function, text = own[-1]
        where = f"line {line} of the cell, in {function}" + (f": {text.strip()}" if text else "")
    return {"error": f"{rank}{last}", "where": where}


# ---- results as plain data

_KINDS: tuple[Any, ...] = (bool, int, float, str, bytes)


def pack_result(value: Any) -> bytes:
    """Return a result, made plain, as bytes.

    >>> import torch
    >>> unpack_result(io.BytesIO(pickle.dumps(pack_result({"sum": torch.ones(2), "odd": object}))))
    {'sum': tensor([1., 1.]), 'odd': '<type>'}
    >>> numbers = {np.int64(1): np.float64(0.5), "all": np.arange(2), "r": range(2)}
    >>> unpack_result(io.BytesIO(pickle.dumps(pack_result(numbers))))
    {1: 0.5, 'all': [0, 1], 'r': [0, 1]}
    """
    import torch

    file = io.BytesIO()
    torch.save(plain(value), file)
    return file.getvalue()


def unpack_result(file: IO[bytes]) -> Any:
    """Return the result that `pack_result` packed.

    Raises:
        pickle.UnpicklingError: The file was not made by `pack_result`.
    """
    import torch

    content = _NamesNothing(file).load()
    if not isinstance(content, bytes):
        raise pickle.UnpicklingError("a rank left something else than a sealed result")
    return torch.load(io.BytesIO(content), weights_only=True)


class _NamesNothing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a result that wants {module}.{name}")


def plain(value: Any) -> Any:
    """Return a result as tensors, numbers, strings, lists, tuples and dicts; of anything else the type's name.

    NumPy's numbers and arrays become Python's, as do ranges, so that values from a data frame are accepted.
    """
    if is_tensor(value):
        from torch import Tensor

        return value.detach().cpu().clone().as_subclass(Tensor)
    if isinstance(value, np.generic):
        number = value.item()
        return f"<{type(value).__name__}>" if isinstance(number, np.generic) else plain(number)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        items = [plain(each) for each in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, bool | int | float | str | bytes):
        # An instance of a subclass is reduced to its plain value: the pickle may not name a class.
        return next(kind(value) for kind in _KINDS if isinstance(value, kind))
    if value is None:
        return value
    if value is ...:
        return "..."
    return f"<{type(value).__name__}>"
