"""Damage to files, drawn from a seed: to bytes, to words of a text, and to values of a JSON."""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]

WORDS = [
    "", "0", "-1", "1e9", "1e999", "NaN", "-Infinity", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "true", "null", "~",
    "[" * 2000, "{" * 2000, "(" * 2000, "-" * 2000, "[]," * 3000, "{}", "[]", '""', "'", '"', "`", "$(", "${", "$X",
    "${X:-2}", "$((1/0))", "&a", "*a", "<<: *a", "!!int x", "!!python/name:os.system", "---", "%", ": ", "- ", "\t",
    "\0", "\ufeff", "\u2028", "\r\n", "#", "//", "/*", "*/", "\\", "--", "--x=", "x" * 5000, "1" * 18, "a." * 500,
    "é", "٣",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e18, 1e300, -1e300, 0.5, float("nan"),
    float("inf"), float("-inf"), "", "x", "-1", "12", "9" * 30, "9" * 5000, "nan", "inf", "ProfilerStep#99999999999",
    "PP:2F1e18", "PP:99999F99999999999", "ncclDevKernel_AllReduce_Sum_f32", "nccl:recv 9<-9", "Optimizer.step#x",
    "x" * 5000, "\ud800", [], {}, [[]], [None], [1, 2, 3], ["x"], [[[[[[]]]]]], {"a": {}}, {"": ""}, [0] * 1000, [-1],
    [10**12], list(range(300)),
]  # fmt: skip


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with a few of them flipped, cut out, repeated, zeroed or put in."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        size = draw.choice((1, 2, 8, 64, 512))
        kind = draw.randrange(6)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size]
        elif kind == 3:
            found[at : at + size] = bytes(len(found[at : at + size]))
        elif kind == 4:
            found[at:at] = draw.choice(WORDS).encode()
        else:
            found[at : at + size] = draw.randbytes(size)
    return bytes(found)


def damaged_text(data: bytes, draw: random.Random) -> bytes:
    """Return a text with words or lines of it exchanged, repeated, or replaced."""
    if draw.random() < 0.2:
        return damaged_bytes(data, draw)
    words = re.split(r"(\W)", data.decode("utf-8", "replace"))
    for _ in range(draw.choice((1, 1, 2, 4))):
        words = words or [""]
        at, other = draw.randrange(len(words)), draw.randrange(len(words))
        kind = draw.randrange(5)
        if kind == 0:
            words[at] = draw.choice(WORDS)
        elif kind == 1:
            words.insert(at, draw.choice(WORDS))
        elif kind == 2:
            words[at], words[other] = words[other], words[at]
        elif kind == 3:
            words[at:at] = words[at : at + 9] * draw.choice((1, 3, 300))
        else:
            del words[at : at + draw.choice((1, 9))]
    return "".join(words).encode("utf-8", "surrogatepass")


def damaged_json(data: bytes, draw: random.Random) -> bytes:
    """Return a JSON with values of it replaced, removed, repeated or moved."""
    if draw.random() < 0.2:
        return damaged_text(data, draw)
    tree = [json.loads(data)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not (places := list(_places(tree))):
            break
        change = draw.choice([_replace, _replace, _replace, _remove, _repeat, _move])
        change(*draw.choice(places), draw, places)
    return json.dumps(tree[0] if tree else None).encode()


def _places(tree: Any) -> Any:
    keys: Any = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _replace(inside: Any, key: Any, draw: random.Random, places: Any) -> None:
    inside[key] = copy.deepcopy(draw.choice(VALUES))


def _remove(inside: Any, key: Any, draw: random.Random, places: Any) -> None:
    del inside[key]


def _repeat(inside: Any, key: Any, draw: random.Random, places: Any) -> None:
    if isinstance(inside, list):
        inside[key:key] = [copy.deepcopy(inside[key]) for _ in range(draw.choice((1, 50)))]


def _move(inside: Any, key: Any, draw: random.Random, places: Any) -> None:
    other, its = draw.choice(places)
    inside[key] = copy.deepcopy(other[its])
