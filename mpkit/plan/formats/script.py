"""Scripts: options in bash arrays, each with its comment; and the options in any script, of which nothing is run.

$TP, ${TP}, ${ARGS[@]}     what the script assigned last; after an `if`, a loop or `&&` that assigns it, it is open,
                           since no test is followed
${TP:-2}, ${TP:=2}         the default, if the script does not assign it
$((NODES * 8))             calculated
$(...), ${TP%...}, $1      open

A word that is open is a `Word` with a reason. An option has one value in a text, or the text is refused by its name; so
it is if one branch of an `if` or a `case` has it, and another branch has other options, since only one of them runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, Word, agree

__all__ = ["command", "options"]

MOST = 1_000_000
"""Characters that variables may come to: after A=$B$B and B=$C$C they double with each line."""

# ---- the text in commands and words

_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_VARIABLE = r"\$(?:\(\(|[({A-Za-z_0-9@*#?!$-])|`"
_TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\n)+|(?:(?<=[\s;&|()])|\A)\#[^\n]*)
    |(?P<here><<-?[ \t]*['"]?(?P<end>\w+)['"]?)
    |(?P<stop>\|\||&&|[\n;&|<>()])
    |'(?P<single>[^']*)'|(?P<double>")|(?P<variable>{_VARIABLE})
    |(?P<plain>\\.|[^\s;&|<>()\\'"$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf'(?P<variable>{_VARIABLE})|(?P<plain>\\.|[^"\\$`]+|[^"])', re.DOTALL)
_BRACKET, _NAME = re.compile(r"[(){}]"), re.compile(r"\w*")
_OPENS = {"if", "case", "for", "while", "until", "select"}
_CLOSES = {"fi", "esac", "done"}
_BLOCKS = {"then", "elif", "else", "do", "{", "}", "!", "time", *_OPENS, *_CLOSES}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True)
class _Part:
    """A part of a word: as it stands, or a variable, without its "$"."""

    text: str
    is_variable: bool = False
    is_quoted: bool = False


@dataclass
class _Command:
    """A command: its words, each of parts; or those of the array that it assigns, such as "ARGS+="; and what ends
    it.
    """

    words: list[list[_Part]] = field(default_factory=list)
    array: str = ""
    end: str = ""


def _commands(text: str) -> Iterator[_Command]:
    """Yield the commands of a script.

    >>> [(each.array, len(each.words), each.end) for each in _commands("e 'f g' && A=(b c)  # d")]
    [('', 2, '&&'), ('', 0, '('), ('A=', 2, ')'), ('', 0, '')]

    Raises:
        ValueError: a quote or a bracket is open at the end.
    """
    at, command, ends = 0, _Command(), list[str]()
    word: list[_Part] | None = None
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None
        at, stop = token.end(), token["stop"]
        if token["space"] or token["here"] or stop:
            plain = word is not None and not word[0].is_quoted
            opens = _ASSIGNS.fullmatch(word[0].text) if stop == "(" and word is not None and plain else None
            if opens:
                command.end = "("
                yield command
                command = _Command(array=opens[0])
            elif word is not None:
                command.words.append(word)
            word = None
            if stop and not opens and not (command.array and stop == "\n"):
                command.end = stop
                yield command
                command = _Command()
            ends += [token["end"]] if token["here"] else []
            while stop == "\n" and ends:  # the text of here-documents
                found = re.compile(rf"^[ \t]*{re.escape(ends.pop(0))}[ \t]*$", re.MULTILINE).search(text, at)
                at = found.end() if found else len(text)
            continue
        word = [] if word is None else word
        if token["double"]:
            at = _add_quoted(text, at, word)
        elif token["variable"]:
            at = _add_variable(text, token.start(), token["variable"], word, is_quoted=False)
        elif token["single"] is not None:
            word.append(_Part(token["single"], is_quoted=True))
        else:
            is_escaped = token["plain"].startswith("\\")
            word.append(_Part(token["plain"][is_escaped:], is_quoted=is_escaped))
    if command.array:
        raise ValueError(f"this is no command line: the bracket of {command.array}( is not closed")
    yield _Command([*command.words, *([] if word is None else [word])])


def _add_quoted(text: str, at: int, word: list[_Part]) -> int:
    """Add the parts up to the closing quote, and return the place after it."""
    word.append(_Part("", is_quoted=True))
    while token := _IN_QUOTES.match(text, at):
        at = token.end()
        if token["variable"]:
            at = _add_variable(text, token.start(), token["variable"], word, is_quoted=True)
        else:
            word.append(_Part(token["plain"].removeprefix("\\").removeprefix("\n"), is_quoted=True))
    if at == len(text):
        raise ValueError("this is no command line: a quote is not closed")
    return at + 1


def _add_variable(text: str, start: int, begin: str, word: list[_Part], *, is_quoted: bool) -> int:
    """Add a variable, and return the place after it."""
    at = start + len(begin)
    if begin == "`":
        at = text.find("`", at) + 1
    elif begin[1] in "({":
        depth = len(begin) - 1
        while depth and (bracket := _BRACKET.search(text, at)):
            depth += 1 if bracket[0] in "({" else -1
            at = bracket.end()
        at = 0 if depth else at
    elif begin[1].isalpha() or begin[1] == "_":
        name = _NAME.match(text, at)
        at = name.end() if name else at
    if not at:
        raise ValueError(f"this is no command line: {text[start : start + 20]!r} is not closed")
    word.append(_Part(text[start + (begin != "`") : at], is_variable=True, is_quoted=is_quoted))
    return at


# ---- variables

_BRACED = re.compile(r"(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_SHELL = re.compile(r"(.*/)?(ba|z|da)?sh")
Pieces = list[Word]
"""A text in pieces, each of which is open or not."""
Branch = tuple[tuple[int, int], ...]
"""Where a command stands: the number of each `if`, `case` or loop around it, with the number of the branch in it."""


class _Variables:
    """What the variables of a script hold, as far as its text says.

    >>> text = 'TP=2; ARGS="--tp $TP"' + chr(10) + 'python train.py $ARGS --pp=${PP:-4} --cp $CP'
    >>> [words for words, within in _Variables({}).read(text)]
    [['2'], ['--tp', '2'], ['python', 'train.py', '--tp', '2', '--pp=4', '--cp', '$CP']]
    >>> text = "if a; then b; else c; fi; case $X in d) e;; f) g;; esac"
    >>> [(words[-1], branch) for words, branch in _Variables({}).read(text) if branch][2:]
    [('c', ((1, 1),)), ('d', ((2, 0),)), ('e', ((2, 0),)), ('f', ((2, 1),)), ('g', ((2, 1),))]
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values: dict[str, list[Pieces]] = {name: [[Word(value)]] for name, value in values.items()}
        self._size = self._blocks = 0

    def read(self, text: str) -> Iterator[tuple[list[Word], Branch]]:
        """Yield the words of each command or assignment, and the branches that it is in.

        Raises:
            ValueError: a quote or a bracket is open at the end, or variables come to too much.
        """
        inside: list[tuple[str, int, int]] = []  # blocks: the word, its number, the number of the branch
        before = ""
        for command in _commands(text):
            words = command.words
            while words and (word := _plain(words[0])) in _BLOCKS:
                if word in _OPENS:
                    self._blocks += 1
                    inside.append((word, self._blocks, 0))
                elif word in _CLOSES:
                    inside = inside[:-1]
                elif word in ("elif", "else") and inside:
                    inside[-1] = _next_branch(inside[-1])
                words = words[1:]
                if word in ("for", "select") and words:
                    self._values[_plain(words[0])] = [[_open(_plain(words[0]), "a loop sets it")]]
            branch = tuple((number, arm) for _, number, arm in inside)
            for found in self._read(command, words, is_open=bool(inside) or before in ("&&", "||")):
                joined = [_join_pieces(pieces) for pieces in found]
                yield joined, branch
                for inner, within in () if command.array else self._read_inner(joined):
                    yield inner, branch + within
            if not words and command.end == ";" and inside and inside[-1][0] == "case":  # the end of ;;
                inside[-1] = _next_branch(inside[-1])
            if words or command.end != "(":
                before = command.end

    def _read_inner(self, words: Sequence[Word]) -> Iterator[tuple[list[Word], Branch]]:
        """Yield the commands of a text that another shell is given, as in `srun bash -c "torchrun train.py"`."""
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if _SHELL.fullmatch(shell) and re.fullmatch(r"-[a-z]*c", option):
                try:
                    yield from [*self.read(text)]
                except ValueError:
                    yield [Word(text[:60], reason="its quotes are not closed")], ()

    def _read(
        self, command: _Command, words: Sequence[list[_Part]], *, is_open: bool
    ) -> Iterator[list[Pieces]]:
        """Yield what an assignment holds, in words, or the words of a command."""
        expanded = [pieces for word in words for pieces in self._expand(word)]
        assigns = [] if command.array else [word for word in words if _assigned_name(word)]
        if command.array:
            self._assign(command.array, expanded, is_open)
            yield expanded
        elif words and (len(assigns) == len(words) or _plain(words[0]) in _DECLARES):
            for word in assigns:
                target = _assigned_name(word)
                value = [_Part(word[0].text[len(target) :]), *word[1:]]
                pieces = [piece for found in self._expand(value, split=False) for piece in found]
                self._assign(target, [pieces], is_open)
                yield _split_words(pieces)
        elif words:
            for word in words[1:] if _plain(words[0]) == "read" else ():
                self._values[_plain(word)] = [[_open(_plain(word), "it is read from elsewhere")]]
            yield expanded

    def _assign(self, target: str, value: list[Pieces], is_open: bool) -> None:
        name = target.rstrip("+=")
        before = self._values.get(name)
        if target.endswith("+=") and before is not None:
            value = [*before, *value]
        self._count(value)
        if is_open and before != value:
            value = [[_open(name, "an `if`, a loop or the command before it decides what it is")]]
        self._values[name] = value

    def _expand(self, word: Sequence[_Part], *, split: bool = True) -> list[Pieces]:
        """Return the words that a word becomes: variables outside of quotes, and arrays, may be several."""
        found: list[Pieces] = [[]]
        for part in word:
            if not part.is_variable:
                found[-1].append(Word(part.text))
                continue
            values, is_array = self._value(part.text)
            if split and not part.is_quoted:
                values = [pieces for value in values for pieces in _split_words(value)]
            elif not (split and is_array):
                values = [[piece for value in values for piece in (*value, Word(" "))][:-1]]
            for number, pieces in enumerate(values):
                if number:
                    found.append([])
                found[-1] += pieces
        self._count(found)
        is_empty = all(part.is_variable and not part.is_quoted for part in word)
        return [pieces for pieces in found if pieces or not is_empty]

    def _value(self, text: str) -> tuple[list[Pieces], bool]:
        """Return what a variable holds, and whether it is asked for as an array."""
        if text.startswith("((") and text.endswith("))"):
            return [[self._calculate(text[2:-2])]], False
        braced = _BRACED.fullmatch(text[1:-1] if text.startswith("{") else text)
        if braced is None:
            return [[_open(text, "what a program prints, or a text that is changed, is not known")]], False
        name, array, sign, default = braced.groups()
        is_empty = name in self._values and not any(map(any, self._values[name]))
        if name in self._values and not ((sign or "").startswith(":") and is_empty):
            return self._values[name], array is not None
        if sign is None:
            return [[_open(name, "the script does not assign it")]], False
        value = [Word(default)]
        if set(default) & set("$`\"'"):
            inner = next(_commands(default if set(default) & set("\"'") else f'"{default}"')).words
            value = [piece for each in inner for found in self._expand(each, split=False) for piece in found]
        if "=" in sign:
            self._values[name] = [value]
        return [value], False

    def _calculate(self, text: str) -> Word:
        """Return the value of an expression of whole numbers."""
        terms = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", self._number, text[:200])
        try:
            return Word(str(_result(ast.parse(terms.strip(), mode="eval").body)))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return _open(f"(({text}))", "it cannot be calculated from what the script says")

    def _number(self, name: re.Match[str]) -> str:
        value = self._values.get(name[1], [])
        text = _join_pieces(value[0]) if len(value) == 1 else ""
        return text if re.fullmatch(r"[0-9]{1,18}", text) else "?"

    def _count(self, words: list[Pieces]) -> None:
        self._size += sum(len(piece) + 1 for pieces in words for piece in pieces)
        if self._size > MOST:
            raise ValueError(f"its variables come to more than {MOST:,} characters")


def _next_branch(block: tuple[str, int, int]) -> tuple[str, int, int]:
    word, number, arm = block
    return word, number, arm + 1


def _result(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _result(node.left), _result(node.right)
        if isinstance(node.op, ast.Add | ast.Sub):
            return left + (right if isinstance(node.op, ast.Add) else -right)
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div | ast.Mod) and left >= 0 and right > 0:
            return left // right if isinstance(node.op, ast.Div) else left % right
    raise ValueError("whole numbers and + - * / % are calculated")


def _open(name: str, reason: str) -> Word:
    """Return a variable whose value is open."""
    return Word(f"${name[:60]}", reason=f"${name[:60]} is open ({reason}); write the number there, such as 2")


def _plain(word: Sequence[_Part]) -> str:
    return word[0].text if len(word) == 1 and not word[0].is_variable and not word[0].is_quoted else ""


def _assigned_name(word: Sequence[_Part]) -> str:
    """Return what a word assigns to, such as "TP=" or "ARGS+="; "" if it assigns nothing."""
    found = _ASSIGNS.match(word[0].text) if not (word[0].is_quoted or word[0].is_variable) else None
    return found[0] if found else ""


def _join_pieces(pieces: Pieces) -> Word:
    return Word("".join(pieces), reason=next((piece.reason for piece in pieces if piece.reason), ""))


def _split_words(pieces: Pieces) -> list[Pieces]:
    """Return the words of a text, as bash divides a variable outside of quotes."""
    found: list[Pieces] = [[]]
    for piece in pieces:
        for number, text in enumerate([piece] if piece.reason else re.split(r"\s+", piece)):
            if number:
                found.append([])
            if text:
                found[-1].append(Word(text, reason=piece.reason))
    return [pieces for pieces in found if pieces]


# ---- options

_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(?=-)", re.MULTILINE)
_SHORT = re.compile(r"-([NnG])[ =]?(.*)", re.DOTALL)
_LONG = {"N": "--nodes", "n": "--ntasks", "G": "--gpus"}
"""SLURM's options of one letter."""
_SLURM = re.compile(r"(.*/)?(srun|sbatch|salloc)")
_STARTS = re.compile(r"(.*/)?(torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|python[0-9.]*)")


def command(
    template: Callable[[Page], str], flags: Sequence[str] = (), several: Sequence[str] = ()
) -> Syntax:
    """Return the syntax of a script that this template makes.

    Args:
        template: makes the lines after the head of the file.
        flags: options without a value.
        several: options with several values, as one word after another.
    """

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, template(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        blocks: dict[int, dict[int, set[str]]] = {}  # by `if` and branch, the options there
        always: set[str] = set()
        for words, branch in _Variables(_read_allocation(text)).read(_DIRECTIVE.sub("srun ", text)):
            for name, value in _options(words, flags, several):
                note = f"{name} is within an `if` or a loop: read as if it came to that" if branch else ""
                agree(found, name, Word(value, reason=value.reason, note=note))
                for block, arm in branch:
                    blocks.setdefault(block, {}).setdefault(arm, set()).add(name)
                if not branch:
                    always.add(name)
        for name in _only_in_one_branch(blocks) - always:
            reason = (
                f"one branch of an `if` or a `case` has {name}, another branch has other options, and only one of them "
                "runs; leave the branch that is meant"
            )
            found[name] = Word(f"{found[name]} in one branch", reason=found[name].reason or reason)
        if not any(name.startswith("--") for name in found):
            raise ValueError("there is no option that begins with --")
        return found

    return Syntax("a command line", dump, load, dump)


def _only_in_one_branch(blocks: Mapping[int, Mapping[int, set[str]]]) -> set[str]:
    """Return the options that some branches of a block have and others, which have options too, have not.

    >>> sorted(_only_in_one_branch({1: {0: {"--tp", "--bf16"}, 1: {"--tp", "--fp16"}}, 2: {0: {"--cp"}}}))
    ['--bf16', '--fp16']
    """
    found: set[str] = set()
    for branches in blocks.values():
        each = [*branches.values()]
        found |= each[0].union(*each) - each[0].intersection(*each)
    return found


def _read_allocation(text: str) -> dict[str, str]:
    """Return the variables that SLURM sets by what a batch script asks for at its head."""
    said: dict[str, str] = {}
    for short, name, value in re.findall(
        r"^[ \t]*#SBATCH[ \t]+(?:-([NnG])|--([a-z-]+))[ =]*(\S+)", text, re.MULTILINE
    ):
        said.setdefault(_LONG.get(short, f"--{name}"), value)
    each = said.get("--gpus-per-node", said.get("--gres", "")).partition("(")[0].rpartition(":")[2]
    given = {
        "SLURM_NNODES": said.get("--nodes"), "SLURM_JOB_NUM_NODES": said.get("--nodes"), "SLURM_GPUS_ON_NODE": each,
        "SLURM_GPUS_PER_NODE": each, "SLURM_NTASKS_PER_NODE": said.get("--ntasks-per-node"),
        "SLURM_NTASKS": said.get("--ntasks"),
    }  # fmt: skip
    return {name: value for name, value in given.items() if value and value.isdecimal()}


def _expand_short(words: Sequence[Word]) -> Iterator[Word]:
    """Yield the words with SLURM's options of one letter by their long names."""
    for word in words:
        short = _SHORT.fullmatch(word) if not word.reason else None
        yield from (Word(_LONG[short[1]]), *([Word(short[2])] if short[2] else [])) if short else (word,)


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
            word = name if value is True else f"{name}{' ' if ' ' in str(value) else '='}{value}"
            lines.append(f"  {word:43} # {page.comments[name]}")
    return "\n".join([f"{array}=(", *lines, ")"])


def _options(
    words: Sequence[Word], flags: Sequence[str], several: Sequence[str]
) -> Iterator[tuple[str, Word]]:
    """Yield the options, `--name=value`, `--name value`, `--flag`, and variables that may hold more of them."""
    if words[:2] == ["ray", "start"]:
        return  # its --num-gpus are a machine's
    if words and _SLURM.fullmatch(words[0]):
        words = [*_expand_short(words)]
    if any(word.endswith("accelerate") and after == "launch" for word, after in pairwise(words)):
        yield "accelerate launch", Word("true")
    if any(
        word == "megatron" and after in ("sft", "pt", "rlhf", "export") for word, after in pairwise(words)
    ):
        yield "megatron sft", Word("true")
        for name in ("NPROC_PER_NODE", "NNODES"):
            yield from ((f"--{name.lower().replace('_', '-')}", Word(word.partition("=")[2], reason=word.reason))
                        for word in words if word.startswith(f"{name}="))  # fmt: skip
    starts, is_value = any(map(_STARTS.fullmatch, words)), False
    for number, (word, after) in enumerate(zip(words, [*words[1:], Word("--")], strict=False)):
        if is_value or not re.match(r"--[a-zA-Z]", word):
            if word.reason and starts and not is_value and word not in ("$@", "$*"):
                yield word, word
            is_value = False
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in flags and (value if equals else after).lower() == "false":
            continue  # as programs say it that take Megatron's arguments in their own way
        is_value = not equals and name not in flags and not after.startswith("--")
        text = after if is_value else value if equals else "true"
        if is_value and name in several:
            text = " ".join(takewhile(lambda each: not each.startswith("--"), words[number + 1 :]))
        yield name, Word(text, reason=after.reason if is_value else word.reason)
