"""The text of a shell script in commands and words, as bash divides it: quotes, comments, arrays, here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpkit.plan.formats.word import Word

__all__ = ["ASSIGNS", "Command", "ShellBlock", "WordPart", "commands", "follow_blocks", "holds"]

ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?=)")

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
_BRACKET, _WORD = re.compile(r"[(){}]"), re.compile(r"\w*")


@dataclass(frozen=True)
class WordPart:
    """A part of a word: as it stands, or a variable, without its "$"."""

    text: str
    is_variable: bool = False
    is_quoted: bool = False


@dataclass
class Command:
    """A command.

    Attributes:
        words: its words, each of parts; those of the array, if it assigns one.
        array: the array's name and its sign, such as "ARGS+=".
        joint: what follows it, such as ";" or "&&".
    """

    words: list[list[WordPart]] = field(default_factory=list)
    array: str = ""
    joint: str = ""


@dataclass
class ShellBlock:
    """An `if`, a loop or a `case` around commands.

    Attributes:
        runs: whether the commands of this branch run; None, if the script does not say.
        before: whether a branch before this one runs.
        tests: what came out of the commands between `if` and `then`; None, if this is no such place.
    """

    runs: bool | None = None
    before: bool | None = False
    tests: list[bool | None] | None = None


def follow_blocks(word: str, blocks: list[ShellBlock]) -> None:
    """Note a word that opens, divides or closes a block."""
    if word == "if":
        blocks.append(ShellBlock(tests=[]))
    elif word in ("case", "for", "while", "until", "select"):
        blocks.append(ShellBlock())
    elif word in ("fi", "esac", "done"):
        del blocks[-1:]
    elif blocks and word in ("elif", "else"):
        block = blocks[-1]
        block.before = (
            True if True in (block.before, block.runs) else None if block.runs is None else block.before
        )
        block.tests, block.runs = ([], None) if word == "elif" else (None, _unless(block.before, True))
    elif blocks and word == "then":
        block = blocks[-1]
        tests, block.tests = block.tests or [], None
        block.runs = _unless(block.before, tests[0] if len(tests) == 1 else None)
    elif word == "!" and blocks and blocks[-1].tests is not None:
        blocks[-1].tests.append(None)


def _unless(before: bool | None, test: bool | None) -> bool | None:
    """Return whether a branch runs, which does if its test holds and no branch before it runs."""
    return False if before or test is False else test if before is False else None


def holds(words: Sequence[Word]) -> bool | None:
    """Return whether a test holds; None, if the script does not say.

    >>> [holds([*map(Word, text.split())]) for text in ("[ on = off ]", "[[ 8 -gt 1 ]]", "true", "[ -f a ]")]
    [False, True, True, None]
    """
    if any(word.reason for word in words):
        return None
    if len(words) == 1 and words[0] in ("true", "false"):
        return words[0] == "true"
    if not words or words[0] not in ("[", "[[", "test"):
        return None
    match words[1:] if words[0] == "test" else words[1:-1]:
        case [sign, text] if sign in ("-z", "-n"):
            return (text == "") == (sign == "-z")
        case [left, sign, right] if sign in ("=", "==", "!=") and not set(right) & set("*?["):
            return (left == right) == (sign != "!=")
        case [left, sign, right] if sign in _COMPARES and (left + right).isdecimal() and left and right:
            return (int(left) > int(right)) - (int(left) < int(right)) in _COMPARES[sign]
    return None


_COMPARES = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a script.

    >>> [(each.array, len(each.words), each.joint) for each in commands("e 'f g' && A=(b c)  # d")]
    [('', 2, '&&'), ('', 0, '('), ('A=', 2, ')'), ('', 0, '')]

    Raises:
        ValueError: a quote or a bracket is open at the end.
    """
    at, command, ends = 0, Command(), list[str]()
    word: list[WordPart] | None = None
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None
        at, stop = token.end(), token["stop"]
        if token["space"] or token["here"] or stop:
            opens = (
                stop == "(" and word is not None and not word[0].is_quoted and ASSIGNS.fullmatch(word[0].text)
            )
            if opens:
                command.joint = "("
                yield command
                command = Command(array=opens[0])
            elif word is not None:
                command.words.append(word)
            word = None
            if stop and not opens and not (command.array and stop == "\n"):
                command.joint = stop
                yield command
                command = Command()
            ends += [token["end"]] if token["here"] else []
            while stop == "\n" and ends:  # the text of here-documents
                found = re.compile(rf"^[ \t]*{re.escape(ends.pop(0))}[ \t]*$", re.MULTILINE).search(text, at)
                at = found.end() if found else len(text)
            continue
        word = [] if word is None else word
        if token["double"]:
            at = _read_quoted(text, at, word)
        elif token["variable"]:
            at = _variable(text, token.start(), token["variable"], word, is_quoted=False)
        elif token["single"] is not None:
            word.append(WordPart(token["single"], is_quoted=True))
        else:
            is_escaped = token["plain"].startswith("\\")
            word.append(WordPart(token["plain"][is_escaped:], is_quoted=is_escaped))
    if command.array:
        raise ValueError(f"this is no command line: the bracket of {command.array}( is not closed")
    yield Command([*command.words, *([] if word is None else [word])])


def _read_quoted(text: str, at: int, word: list[WordPart]) -> int:
    """Add the parts up to the closing quote, and return the place after it."""
    word.append(WordPart("", is_quoted=True))
    while token := _IN_QUOTES.match(text, at):
        at = token.end()
        if token["variable"]:
            at = _variable(text, token.start(), token["variable"], word, is_quoted=True)
        else:
            word.append(WordPart(token["plain"].removeprefix("\\").removeprefix("\n"), is_quoted=True))
    if at == len(text):
        raise ValueError("this is no command line: a quote is not closed")
    return at + 1


def _variable(text: str, start: int, begin: str, word: list[WordPart], *, is_quoted: bool) -> int:
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
        name = _WORD.match(text, at)
        at = name.end() if name else at
    if not at:
        raise ValueError(f"this is no command line: {text[start : start + 20]!r} is not closed")
    word.append(WordPart(text[start + (begin != "`") : at], is_variable=True, is_quoted=is_quoted))
    return at
