"""Scripts: options in bash arrays, each with its comment; and the options in any script, of which nothing is run.

An option counts wherever it stands: in a command, an array, a text that a variable holds or another shell is given. Its
value may name variables:

$TP, ${TP}, ${TP[@]}       what the script assigns, if that is one value and neither an `if` nor a loop decides about it
${TP:-2}, ${TP:=2}         the default, if the script does not assign it
$((NODES * 8))             calculated
$(...), ${TP%...}, $1      open

A value that is open is a `Word` with a reason. An option has one value in a text, or the text is rejected by its name;
so it is in a branch of an `if` or a `case`, since no test is followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, Word, agree

__all__ = ["command", "options"]


def command(template: Callable[[Page], str], flags: Sequence[str] = ()) -> Syntax:
    """Return the syntax of a script that this template makes.

    Args:
        template: makes the lines after the head of the file.
        flags: options without a value.
    """

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, template(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        found = _Script(frozenset(flags)).load(text)
        if not any(name.startswith("--") for name in found):
            raise ValueError("there is no option that begins with --")
        return found

    return Syntax("a command line", dump, load, dump)


def options(page: Page, array: str, names: Sequence[str]) -> str:
    """Return a bash array of those options that are on the page.

    >>> from mpkit.plan.formats.request import ExportRequest
    >>> from mpkit.plan.plan import Plan
    >>> page = Page(ExportRequest.from_plan(Plan(), "torchrun", {}), {"--nnodes": 1}, {"--nnodes": "machines"}, [])
    >>> print(options(page, "LAUNCH", ["--nnodes", "--rdzv-id"]))
    LAUNCH=(
      --nnodes=1                                  # machines
    )
    """
    lines = []
    for name in names:
        if name in page.values:
            value = page.values[name]
            word = name if value is True else f"{name}={value}"
            lines.append(f"  {word:43} # {page.comments[name]}")
    return "\n".join([f"{array}=(", *lines, ")"])


# ---- the text in commands and words

_OPEN = r"\$\((?:[^()]|\([^()]*\))*+\)|`[^`]*+`|\$\{(?:[^{}]|\{[^{}]*\})*+\}"
_TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\n)++|(?<![^\s;&|()])\#[^\n]*)
    |<<-?[ \t]*['"]?(?P<end>\w+)[^\n]*
    |(?P<array>[A-Za-z_]\w*\+?=\()
    |(?P<stop>&&|\|\||;;|[\n;&|<>()])
    |(?P<word>(?:'[^']*+'|"(?:\\.|[^"\\])*+"|\$\(\((?:[^()]|\([^()]*\))*+\)\)|{_OPEN}|\\.|[^\s;&|<>()'"`\\])++)
    |(?P<bad>.)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_KEYWORDS = {"then", "elif", "else", "do", "{", "}", "!", "time", "in", *_OPENS, *_CLOSES}
_DECLARES = {"export", "local", "declare", "readonly", "typeset", "env"}


@dataclass(eq=False)
class _Block:
    """An `if`, a `case` or a loop, and whether it has several branches."""

    several: bool


def _commands(text: str) -> Iterator[tuple[list[str], tuple[_Block, ...], bool]]:
    """Yield a script's commands: the words as written, the blocks around, and whether `&&` or `||` decides about it.

    An array is a command whose first word is "ARGS=(".

    >>> [(words, is_decided) for words, _, is_decided in _commands("e 'f g' && A=(b  c)  # d")]
    [(['e', "'f g'"], False), (['A=(', 'b', 'c'], True)]

    Raises:
        ValueError: a quote or a bracket is open at the end.
    """
    at, words, inside, is_decided = 0, list[str](), list[_Block](), False
    text += "\n"
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None
        at, stop = token.end(), token["stop"]
        if token["bad"]:
            raise ValueError(f"this is no command line: {text[at - 1 : at + 19]!r} is not closed")
        if token["end"]:  # a here-document
            found = re.compile(rf"^[ \t]*{token['end']}[ \t]*$", re.MULTILINE).search(text, at)
            at = found.end() if found else len(text)
        elif token["word"] or token["array"]:
            words.append(token["word"] or token["array"])
        elif stop and not (stop == "\n" and words and words[0].endswith("=(")):
            while words and words[0] in _KEYWORDS:
                word = words[0]
                if word in _OPENS:
                    inside.append(_Block(several=word == "case"))
                elif word in _CLOSES:
                    inside = inside[:-1]
                elif word in ("elif", "else") and inside:
                    inside[-1].several = True
                if word in ("for", "select"):
                    break
                words = words[1:]
            if words:
                yield words, tuple(inside), is_decided
            words, is_decided = [], stop in ("&&", "||")
    if words:
        raise ValueError(f"this is no command line: the bracket of {words[0]} is not closed")


def _unquote(word: str) -> str:
    return _QUOTES.sub(lambda found: found[1] or found[3] or re.sub(r"\\(.)", r"\1", found[2] or ""), word)


# ---- options and variables

_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*+)\)\)"
    rf"|\$\{{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>(?:[^{{}}]|\{{[^{{}}]*\}})*+))?\}}"
    rf"|{_OPEN}|\$(?P<plain>\w+|[@*#?!$-])",
    re.DOTALL,
)
_STARTS = re.compile(r"(.*/)?(torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|python[0-9.]*)")
_SLURM = re.compile(r"(.*/)?(srun|sbatch|salloc)")
_SHORT = {"N": "--nodes", "n": "--ntasks", "G": "--gpus"}
"""SLURM's options of one letter."""
_ALLOCATED = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "--ntasks": ("SLURM_NTASKS",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    **dict.fromkeys(("--gpus-per-node", "--gres"), ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
}  # fmt: skip
"""By what a batch script asks for at its head, the variables that SLURM sets."""
PROGRAMS = ("accelerate launch", "megatron sft")
"""Words that say whose the options after them are."""
DEEPEST, LONGEST = 20, 1000
"""Variables and texts within each other, and characters of a value."""


class _Script:
    """What a script says: its options, and what it assigns."""

    def __init__(self, flags: frozenset[str]) -> None:
        self._flags = flags
        self._found: list[tuple[str, str, tuple[_Block, ...]]] = []
        self._assigned: dict[str, set[str]] = {}
        self._undecided: set[str] = set()
        self._evaluating: list[str] = []
        self._known: dict[str, Word] = {}

    def load(self, text: str) -> dict[str, Any]:
        """Return the options, by name.

        >>> text = 'TP=2; ARGS="--tp $TP"' + chr(10) + 'python train.py $ARGS --pp=${PP:-4} --cp $CP --ep $((2 * TP))'
        >>> _Script(frozenset()).load(text)
        {'--tp': '2', '--pp': '4', '--cp': '$CP', '--ep': '4'}
        """
        self._read(re.sub(r"^[ \t]*#SBATCH[ \t]+(?=-)", "sbatch ", text, flags=re.MULTILINE))
        found: dict[str, Any] = {}
        for name, raw, blocks in self._found:
            value, note = self._value(raw), ""
            if any(block.several for block in blocks):
                reason = "only one branch of an `if` or a `case` runs: leave the one that is meant"
                value = Word(value, reason=reason)
            elif blocks:
                note = f"{name} is within an `if` or a loop: read as if it came to that"
            agree(found, name, Word(value, reason=value.reason, note=note))
        return found

    # ---- what is written

    def _read(self, text: str, around: tuple[_Block, ...] = (), depth: int = 0) -> None:
        for words, inside, is_decided in _commands(text):
            blocks = (*around, *inside)
            if words[0] in ("for", "select", "read"):
                self._undecided.update(words[1:2] if words[0] == "for" else words[1:])
            first = words[0] if words[0].endswith("=(") else ""
            while words and (words[0] in _DECLARES or (not first and _ASSIGNS.fullmatch(words[0]))):
                if assigns := _ASSIGNS.fullmatch(words[0]):
                    name, added, value = assigns.groups()
                    self._assigned.setdefault(name, set()).add(_unquote(value))
                    if added or blocks or is_decided:
                        self._undecided.add(name)
                    self._add_options(self._plain([value], blocks, depth), blocks)
                words = words[1:]
            if first:
                self._assigned.setdefault(first.rstrip("+=("), set()).add("")
            if words[:2] != ["ray", "start"]:  # its --num-gpus are a machine's
                self._add_options(self._plain(words, blocks, depth), blocks)

    def _plain(self, words: Sequence[str], blocks: tuple[_Block, ...], depth: int) -> list[str]:
        """Return the words without their quotes; a text of options is read by itself, and "--" stands for it."""
        found = []
        for word in words:
            plain = _unquote(word)
            if not re.match(r"--[\w-]+=", word) and re.search(r"(\s|\A)--[a-zA-Z]\S*\s|\s--[a-zA-Z]", plain):
                if depth < DEEPEST:
                    self._read(plain, blocks, depth + 1)
                plain = "--"
            found.append(plain)
        return found

    def _add_options(self, words: Sequence[str], blocks: tuple[_Block, ...]) -> None:
        """Add the options, `--name=value`, `--name value`, `--flag`, and variables that may hold more of them."""
        is_slurm, starts = bool(words and _SLURM.fullmatch(words[0])), any(map(_STARTS.fullmatch, words))
        for word, after in pairwise(words):
            if (program := f"{word.rpartition('/')[2]} {after}") in PROGRAMS:
                self._found.append((program, "true", ()))
        is_value = False
        for word, after in zip(words, [*words[1:], "--"], strict=False):
            if is_slurm and not is_value and (short := re.fullmatch(r"-([NnG])=?(.*)", word)):
                word = f"{_SHORT[short[1]]}{'=' * bool(short[2])}{short[2]}"
            if is_value or not re.match(r"--[a-zA-Z]", word):
                if starts and not is_value and self._may_hold_more(word):
                    self._found.append((word, "", ()))
                is_value = False
                continue
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name in self._flags and (value if equals else after).lower() == "false":
                continue  # as programs say it that take Megatron's arguments in their own way
            is_value = not equals and name not in self._flags and not after.startswith("--")
            value = after if is_value else value if equals else "true"
            self._found.append((name, value, blocks))
            for variable in _ALLOCATED.get(name, ()) if words[0] == "sbatch" else ():
                self._assigned.setdefault(variable, set()).add(value.partition("(")[0].rpartition(":")[2])

    def _may_hold_more(self, word: str) -> bool:
        """Return whether a word is a variable of which the script does not say the options that it holds."""
        variable = _VARIABLE.fullmatch(word)
        name = variable and (variable["name"] or variable["plain"])
        if not name or (not name[0].isalnum() and name[0] != "_"):
            return False
        return name not in self._assigned or any(
            "$(" in value or "`" in value for value in self._assigned[name]
        )

    # ---- what variables hold

    def _value(self, text: str) -> Word:
        """Return a text with what its variables hold, as far as the script says it."""
        reasons: list[str] = []

        def hold(found: re.Match[str]) -> str:
            word = self._calculate(found["sum"]) if found["sum"] is not None else self._variable(found)
            reasons.extend([word.reason] if word.reason else [])
            return str(word)

        value = _VARIABLE.sub(hold, text)
        if len(value) > LONGEST:
            value, reasons = value[:LONGEST], [*reasons, f"it has more than {LONGEST:,} characters"]
        return Word(value, reason=reasons[0] if reasons else "")

    def _variable(self, found: re.Match[str]) -> Word:
        name = found["name"] or found["plain"]
        if name is None:
            return _open(found[0][1:], "what a program prints, or a text that is changed, is not known")
        if name in self._known:
            return self._known[name]
        values = self._assigned.get(name, set())
        if not values or name in self._evaluating:  # N=${N:-4}
            if found["default"] is not None:
                return self._value(_unquote(found["default"]))
            return _open(name, "the script does not assign it")
        if name in self._undecided or len(values) > 1 or len(self._evaluating) > DEEPEST:
            return _open(name, "an `if`, a loop or another line decides what it is")
        self._evaluating.append(name)
        self._known[name] = value = self._value(next(iter(values)))
        self._evaluating.pop()
        return value

    def _calculate(self, text: str) -> Word:
        """Return the value of an expression of whole numbers."""
        terms = self._value(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"${\1}", text[:200])).replace("/", "//")
        try:
            if "**" in terms or not re.fullmatch(r"[0-9\s+*/%()-]{1,100}", terms):
                raise ValueError
            return Word(str(eval(terms.strip(), {"__builtins__": {}})))
        except (ValueError, SyntaxError, TypeError, ArithmeticError):
            return _open(f"(({text}))", "it cannot be calculated from what the script says")


def _open(name: str, reason: str) -> Word:
    """Return a variable whose value is open."""
    return Word(f"${name[:60]}", reason=f"${name[:60]} is open ({reason}); write the number there, such as 2")
