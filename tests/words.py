"""What is printed, without the breaks of its lines; and sources, each parsed once."""

import ast
from functools import cache

parse = cache(ast.parse)


def unwrapped(shown: object) -> str:
    """The text of a thing with one blank for each run of blanks."""
    return " ".join(str(shown).split())
