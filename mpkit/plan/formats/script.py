"""Scripts: options in bash arrays, each with its comment; and the options in any script, of which nothing is run.

An option counts wherever it stands: in a command, an array, a text that a variable holds or another shell is given. Its
value may name variables:

$TP, ${TP}, ${TP[@]}       what the script assigns, if that is one value and no test or loop decides about it
${TP:-2}, ${TP:=2}         the default, if the script does not assign it
$((NODES * 8))             calculated
$(...), ${TP%...}, $1      open: it stays as it is written

Nothing is followed: in place of an option's value in an `if`, a `case` or a loop, of several values, or of one that is
open, is what no key takes. So the text is rejected by that key, if it is one of the format.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, agree, tables


def command(name: str, body: Callable[[Page], str]) -> Syntax:
    """Return the syntax of a script of the format with this name; `body` makes the lines after the head of the file."""

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, body(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        found = _options(text, tables()[name].get("flags", ()))
        if not any(option.startswith("--") for option in found):
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
_OPTIONS, _SEVERAL = re.compile(r"(\s|\A)--[a-zA-Z]"), re.compile(r"\A--[a-zA-Z]\S*\s|\s--[a-zA-Z]")
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_KEYWORDS = {"then", "elif", "else", "do", "{", "}", "!", "time", "in", *_OPENS, *_CLOSES}
_DECLARES = {"export", "local", "declare", "readonly", "typeset", "env"}
DEEPEST, LONGEST = 20, 1000
"""Texts and variables within each other, and characters of a value."""


def _commands(text: str, is_decided: bool = False, depth: int = 0) -> Iterator[tuple[list[str], bool]]:
    r"""Yield a script's commands, in words without quotes, and whether a test or a loop decides about each.

    An array is a command whose first word is "ARGS=(". A text of options within a word is a command of its own.

    >>> list(_commands("if x; then A=(b  c)  # d\nfi\nsh -c 'e --f 1'; for TP in 2; do"))
    [(['x'], True), (['A=(', 'b', 'c'], True), (['sh', '-c', '--'], False), (['e', '--f', '1'], False), (['TP='], True)]

    Raises:
        ValueError: a quote or a bracket is open at the end.
    """
    at, words, inside, after_test = 0, list[str](), 0, False
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
            words.append(token["array"] or _unquote(token["word"]))
        elif stop and not (stop == "\n" and words and words[0].endswith("=(")):
            while words and words[0] in _KEYWORDS:
                inside = max(0, inside + (words[0] in _OPENS) - (words[0] in _CLOSES))
                words = [f"{words[1]}="] if words[0] in ("for", "select") and words[1:] else words[1:]
            if words:
                here = is_decided or inside > 0 or (after_test and _ASSIGNS.match(words[0]) is not None)
                texts = []
                for number, word in enumerate(words):
                    if assigns := _ASSIGNS.fullmatch(word):
                        texts += [assigns[3]] * bool(_OPTIONS.search(assigns[3]))
                    elif _SEVERAL.search(word) and not re.match(r"--[\w-]+=", word):
                        texts.append(word)
                        words[number] = "--"
                yield words, here
                for each in texts if depth < DEEPEST else ():
                    yield from _commands(each, here, depth + 1)
            words, after_test = [], stop in ("&&", "||")
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
_SHORT = {"N": "--nodes", "n": "--ntasks"}
"""SLURM's options of one letter."""
_ALLOCATED = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "--ntasks": ("SLURM_NTASKS",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    **dict.fromkeys(("--gpus-per-node", "--gres"), ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
}  # fmt: skip
"""By what a batch script asks for at its head, the variables that SLURM sets."""
PROGRAMS = ("accelerate launch", "megatron sft")
"""Words that say whose the options after them are."""


class _Variables:
    """What a script assigns: by name, its texts, of which None is one that a test decides or that grows."""

    def __init__(self) -> None:
        self.assigned: defaultdict[str, set[str | None]] = defaultdict(set)
        self._known: dict[str, str] = {}

    def hold(self, text: str, within: tuple[str, ...] = ()) -> str:
        """Return a text with what its variables hold; those that are open stay as they are written."""
        return _VARIABLE.sub(lambda found: self._held(found, within), text)[:LONGEST]

    def _held(self, found: re.Match[str], within: tuple[str, ...]) -> str:
        if found["sum"] is not None:
            named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"${\1}", found["sum"][:200])
            return _calculate(self.hold(named, within)) or found[0]
        name = found["name"] or found["plain"] or ""
        texts = self.assigned.get(name, set())
        if name in within or not texts:  # N=${N:-4}
            default = found["default"]
            return found[0] if default is None else self.hold(_unquote(default), within)
        if len(texts) > 1 or None in texts or len(within) > DEEPEST:
            return found[0]
        if name not in self._known:
            self._known[name] = self.hold(str(*texts), (*within, name))
        return self._known[name]

    def may_hold_more(self, word: str) -> bool:
        """Return whether a word is a variable of which the script does not say the options that it holds."""
        variable = _VARIABLE.fullmatch(word)
        name = (variable and (variable["name"] or variable["plain"])) or "?"
        if not name[0].isalnum() and name[0] != "_":
            return False
        return name not in self.assigned or any(
            "$(" in str(one) or "`" in str(one) for one in self.assigned[name]
        )


def _calculate(text: str) -> str:
    """Return the value of an expression of whole numbers; "" if it is none."""
    terms = text.replace("/", "//")
    if "**" in terms or not re.fullmatch(r"[0-9\s+*/%()-]{1,100}", terms):
        return ""
    try:
        return str(eval(terms.strip(), {"__builtins__": {}}))
    except (SyntaxError, TypeError, ArithmeticError):
        return ""


def _options(text: str, flags: Collection[str]) -> dict[str, Any]:
    """Return the options of a script, by name; `flags` have no value.

    >>> text = 'TP=2; ARGS="--tp $TP"' + chr(10) + 'python train.py $ARGS --pp=${PP:-4} --cp $CP --ep $((2 * TP))'
    >>> _options(text, ())
    {'--tp': '2', '--pp': '4', '--cp': '$CP', '--ep': '4'}
    """
    variables, commands, found = _Variables(), list[tuple[list[str], bool]](), dict[str, Any]()
    text = re.sub(r"^[ \t]*#SBATCH[ \t]+(?=-)", "sbatch ", text, flags=re.MULTILINE)
    for words, is_decided in _commands(text):
        while words and (words[0] in _DECLARES or _ASSIGNS.fullmatch(words[0])):
            if assigns := _ASSIGNS.fullmatch(words[0]):
                name, grows, value = assigns.groups()
                variables.assigned[name].add(None if grows or is_decided else value)
            words = words[1:]
        commands.append((words, is_decided))
    for words, is_decided in commands:
        is_slurm, starts = bool(words and _SLURM.fullmatch(words[0])), any(map(_STARTS.fullmatch, words))
        is_value = False
        for word, after in zip(words, [*words[1:], "--"], strict=False):
            if (program := f"{word.rpartition('/')[2]} {after}") in PROGRAMS:
                found[program] = "true"
            if is_slurm and not is_value and (short := re.fullmatch(r"-([Nn])=?(.*)", word)):
                word = f"{_SHORT[short[1]]}{'=' * bool(short[2])}{short[2]}"
            if is_value or not re.match(r"--[a-zA-Z]", word):
                if starts and not is_value and variables.may_hold_more(word):
                    found[word] = ""
                is_value = False
                continue
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name in flags and (value if equals else after).lower() == "false":
                continue  # as programs say it that take Megatron's arguments in their own way
            is_value = not equals and name not in flags and not after.startswith("--")
            value = variables.hold(after if is_value else value if equals else "true")
            agree(found, name, f"{value}, where a test or a loop decides" if is_decided else value)
            for variable in _ALLOCATED.get(name, ()) if words[0] == "sbatch" else ():
                variables.assigned[variable].add(value.partition("(")[0].rpartition(":")[2])
    return found
