"""Scripts: options in bash arrays, each with its comment; and the options in any script, of which nothing is run.

An option counts wherever it stands: in a command, in an array, in a variable's text or in a text for another shell. Its
value may name variables:

$TP, ${TP}, ${TP[@]}       what the script assigns, if that is one value and no test or loop decides about it
${TP:-2}, ${TP:=2}         the default, if the script does not assign it
$((NODES * 8))             calculated
$(...), ${TP%...}, $1      open: it stays as it is written

mpkit follows no control flow. If an option stands in an `if`, a `case` or a loop, or has several values or an open one,
its value becomes one that no key takes, so that the format's key rejects the script.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, agree, tables


def command(name: str, body: Callable[[Page], str]) -> Syntax:
    """Return the syntax of a format's scripts; `body` makes the lines after the head of the file."""

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, body(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        values = _options(text, tables()[name].get("flags", ()))
        if not any(option.startswith("--") for option in values):
            raise ValueError("there is no option that begins with --")
        return values

    return Syntax("a command line", dump, load, dump)


def options(page: Page, array: str, names: Sequence[str]) -> str:
    """Return a bash array of those options that are on the page; `Plan.to` has an example."""
    values = {name: page.values[name] for name in names if name in page.values}
    words = {name: name if value is True else f"{name}={value}" for name, value in values.items()}
    lines = (f"  {word:43} # {page.comments[name]}" for name, word in words.items())
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
DEEPEST, LONGEST = 20, 1000  # texts and variables within each other; characters of a value


def _commands(text: str, is_decided: bool = False, depth: int = 0) -> Iterator[tuple[list[str], bool]]:
    r"""Yield a script's commands, in words without quotes, and whether a test or a loop decides about each.

    An array is a command whose first word is "ARGS=(". A text of options within a word is a command of its own.

    >>> list(_commands("if x; then A=(b  c)  # d\nfi\nsh -c 'e --f 1'; for TP in 2; do"))
    [(['x'], True), (['A=(', 'b', 'c'], True), (['sh', '-c', '--'], False), (['e', '--f', '1'], False), (['TP='], True)]
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


_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*+)\)\)"
    rf"|\$\{{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>(?:[^{{}}]|\{{[^{{}}]*\}})*+))?\}}"
    rf"|{_OPEN}|\$(?P<plain>\w+|[@*#?!$-])",
    re.DOTALL,
)
_STARTS = re.compile(r"(.*/)?(torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|python[0-9.]*)")
_SLURM = re.compile(r"(.*/)?(srun|sbatch|salloc)")
_SHORT = {"N": "--nodes", "n": "--ntasks"}  # SLURM's options of one letter
_ALLOCATED = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "--ntasks": ("SLURM_NTASKS",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    **dict.fromkeys(("--gpus-per-node", "--gres"), ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
}  # fmt: skip
"""The variables that SLURM sets, by the option at the head of a batch script."""
PROGRAMS = ("accelerate launch", "megatron sft")  # words that say whose the options after them are


class _Variables:
    """What a script assigns."""

    def __init__(self) -> None:
        # None: a test decides, or it grows.
        self.assigned: defaultdict[str, set[str | None]] = defaultdict(set)
        self._known: dict[str, str] = {}

    def expand(self, text: str, within: tuple[str, ...] = ()) -> str:
        """Return a text with its variables expanded; those that are open stay as they are written."""
        return _VARIABLE.sub(lambda found: self._value(found, within), text)[:LONGEST]

    def _value(self, found: re.Match[str], within: tuple[str, ...]) -> str:
        if found["sum"] is not None:
            named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"${\1}", found["sum"][:200])
            return _calculate(self.expand(named, within)) or found[0]
        name = found["name"] or found["plain"] or ""
        texts = self.assigned.get(name, set())
        if name in within or not texts:  # N=${N:-4}
            default = found["default"]
            return found[0] if default is None else self.expand(_unquote(default), within)
        if len(texts) > 1 or None in texts or len(within) > DEEPEST:
            return found[0]
        if name not in self._known:
            self._known[name] = self.expand(str(*texts), (*within, name))
        return self._known[name]

    def may_hold_options(self, word: str) -> bool:
        """Return whether a word is a variable that may hold options, of which the script does not say which."""
        variable = _VARIABLE.fullmatch(word)
        name = (variable and (variable["name"] or variable["plain"])) or "?"
        is_name, texts = name[0].isalnum() or name[0] == "_", map(str, self.assigned.get(name, ("`",)))
        return is_name and any("$(" in text or "`" in text for text in texts)


def _calculate(text: str) -> str:
    """Return the value of an expression of whole numbers; "" for any other text."""
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
    variables, commands, values = _Variables(), list[tuple[list[str], bool]](), dict[str, Any]()
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
                values[program] = "true"
            if is_slurm and not is_value and (short := re.fullmatch(r"-([Nn])=?(.*)", word)):
                word = f"{_SHORT[short[1]]}{'=' * bool(short[2])}{short[2]}"
            if is_value or not re.match(r"--[a-zA-Z]", word):
                if starts and not is_value and variables.may_hold_options(word):
                    values[word] = ""
                is_value = False
                continue
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name in flags and (value if equals else after).lower() == "false":
                continue  # some programs take Megatron's flags with a value
            is_value = not equals and name not in flags and not after.startswith("--")
            value = variables.expand(after if is_value else value if equals else "true")
            agree(values, name, f"{value}, where a test or a loop decides" if is_decided else value)
            for variable in _ALLOCATED.get(name, ()) if words[0] == "sbatch" else ():
                variables.assigned[variable].add(value.partition("(")[0].rpartition(":")[2])
    return values
