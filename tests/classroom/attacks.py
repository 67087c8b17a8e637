"""Answers to pass-the-token (attacks.toml) that do not solve it, and try to get its points all the same.

Each looks for something by which to pass: the solution's function (`solution`), or a way to its judge. Without one the
answer returns the token unchanged. It prints TRIED when it has done what it can, and OPENED if it could reach what it
must not. The attacks harm only the processes of their own test, which `theirs()` finds by the folder in their
commands, and write only to the judge's folder: a machine that encloses nothing has other programs, too.
"""

import tomllib
from pathlib import Path

TRIED = "the attack was tried"

VERDICT = '{"rows": [["all", "right", "right", true, null]], "mistake": "", "lesson": [], "hint": "", "printed": []}'

ATTACKS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


TOGETHER = {
    "reaches-for-the-judge": list(ATTACKS)[:3], "looks-for-the-solution": list(ATTACKS)[3:8],
    "changes-what-compares": list(ATTACKS)[8:10], "leaves-something-behind": list(ATTACKS)[10:13],
    "writes-the-other-ranks-results": list(ATTACKS)[13:14], "ends-the-judge": list(ATTACKS)[14:],
}  # fmt: skip
"""The attacks, several to an answer."""


THEIRS = """
def theirs():
    import os
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            command = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        if PLACE in command or pid == os.getppid():
            found.append(pid)
    return found
"""
"""The processes of this judge that can be seen."""


def answer(place: str, *attacks: str) -> str:
    """Return the source of an answer that tries these attacks, one after the other.

    Args:
        place: the judge's folder.
        attacks: names of `ATTACKS`.
    """
    lines = [line for each in attacks for line in ATTACKS[each].splitlines()]
    body = "\n".join(f"    {line}" for line in lines)
    return (
        f"VERDICT = {VERDICT!r}\nPLACE = {place!r}\n{THEIRS}\n"
        f"def pass_the_token(ctx, token):\n    solution = None\n{body}\n    print({TRIED!r})\n"
        "    return solution(ctx, token) if solution is not None else token\n"
    )
