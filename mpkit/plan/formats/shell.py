"""The words that a shell script's commands are given, with variables as far as the script itself assigns them.

$TP, ${TP}, ${ARGS[@]}     what the script assigned last; within a loop only what it was before, and within an `if`
                           too, unless the script itself decides it: the other branch is not read
${TP:-2}, ${TP:=2}         the default, if the script does not assign it
$((NODES * 8))             calculated
$(...), ${TP%...}, $1      open: nothing is run

A word that is open is a `Word` with a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from mpkit.plan.formats.shell_text import (
    ASSIGNS,
    Command,
    ShellBlock,
    WordPart,
    commands,
    follow_blocks,
    holds,
)
from mpkit.plan.formats.word import Word

__all__ = ["Shell"]

MOST = 1_000_000
"""Characters that variables may come to: after A=$B$B and B=$C$C they double with each line."""

_BRACED = re.compile(r"(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_BLOCKS = {
    "if", "then", "elif", "else", "fi", "case", "esac", "for", "while", "until", "select", "do", "done", "{", "!",
    "time",
}  # fmt: skip
_SHELL = re.compile(r"(.*/)?(ba|z|da)?sh")
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}

Pieces = list[Word]
"""A text in pieces, each of which is open or not."""


class Shell:
    """A script that is read, not run.

    >>> text = 'TP=2; ARGS="--tp $TP"' + chr(10) + 'python train.py $ARGS --pp=${PP:-4} --cp $CP'
    >>> [words for words, within in Shell().read(text)]
    [['2'], ['--tp', '2'], ['python', 'train.py', '--tp', '2', '--pp=4', '--cp', '$CP']]
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        """Begin with variables that are set outside of the script."""
        given = (values or {}).items()
        self._values: dict[str, list[Pieces]] = {name: [[Word(value)]] for name, value in given}
        self._size = 0

    def read(self, text: str) -> Iterator[tuple[list[Word], bool]]:
        """Yield the words of each command or assignment, and whether an `if` or a loop is around it.

        Raises:
            ValueError: a quote or a bracket is open at the end, or variables come to too much.
        """
        blocks: list[ShellBlock] = []
        runs: bool | None = True  # as far as the command before it decides
        for command in commands(text):
            words = command.words
            while words and (word := _plain(words[0])) in _BLOCKS:
                follow_blocks(word, blocks)
                words = words[1:]
                if word in ("for", "select") and words:
                    self._values[_plain(words[0])] = [[_open(_plain(words[0]), "a loop sets it")]]
            around = [block.runs for block in blocks if block.tests is None]
            skips = runs is False or False in around
            for found in () if skips else self._read(command, words, is_open=None in (runs, *around)):
                joined = [_join_pieces(pieces) for pieces in found]
                yield joined, None in around
                for inner, is_within in () if command.array else self._read_inner(joined):
                    yield inner, is_within or None in around
            runs = self._follow(command, words, blocks, runs)

    def _follow(
        self, command: Command, words: Sequence[list[WordPart]], blocks: list[ShellBlock], runs: bool | None
    ) -> bool | None:
        """Return whether the next command runs, and note what comes out of this one, if an `if` tests it."""
        if not words:
            return True
        is_test = _plain(words[0]) in ("[", "[[", "test", "true", "false") or words[0][0].is_variable
        expanded = (
            [_join_pieces(pieces) for word in words for pieces in self._expand(word, split=False)]
            if is_test
            else []
        )
        result = holds(expanded) if runs else None
        if blocks and blocks[-1].tests is not None:
            blocks[-1].tests.append(result)
        if command.joint == "&&":
            return result if is_test else True if runs else None
        if command.joint == "||":
            return None if result is None else not result
        return True

    def _read_inner(self, words: Sequence[Word]) -> Iterator[tuple[list[Word], bool]]:
        """Yield the commands of a text that another shell is given, as in `srun bash -c "torchrun train.py"`."""
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if _SHELL.fullmatch(shell) and re.fullmatch(r"-[a-z]*c", option):
                try:
                    yield from [*self.read(text)]
                except ValueError:
                    yield [Word(text[:60], reason="its quotes are not closed")], True

    def _read(
        self, command: Command, words: Sequence[list[WordPart]], *, is_open: bool
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
                value = [WordPart(word[0].text[len(target) :]), *word[1:]]
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

    # ---- words

    def _expand(self, word: Sequence[WordPart], *, split: bool = True) -> list[Pieces]:
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
        if name in self._values and not (
            (sign or "").startswith(":") and not any(map(any, self._values[name]))
        ):
            return self._values[name], array is not None
        if sign is None:
            return [[_open(name, "the script does not assign it")]], False
        value = [Word(default)]
        if set(default) & set("$`\"'"):
            inner = next(commands(default if set(default) & set("\"'") else f'"{default}"')).words
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


def _plain(word: Sequence[WordPart]) -> str:
    return word[0].text if len(word) == 1 and not word[0].is_variable and not word[0].is_quoted else ""


def _assigned_name(word: Sequence[WordPart]) -> str:
    """Return what a word assigns to, such as "TP=" or "ARGS+="; "" if it assigns nothing."""
    found = ASSIGNS.match(word[0].text) if not (word[0].is_quoted or word[0].is_variable) else None
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
