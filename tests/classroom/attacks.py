"""Answers to pass-the-token that do not solve it, and try to get its points all the same.

Each looks for something by which to pass: the solution's function (`solution`), or a way to its judge. Without one the
answer returns the token unchanged. It prints TRIED when it has done what it can, and OPENED if it could reach what it
must not. The attacks harm only the processes of their own test, which `theirs()` finds by the folder in their
commands, and write only to the judge's folder: a machine that encloses nothing has other programs, too.
"""

from __future__ import annotations

from inspect import cleandoc

TRIED = "the attack was tried"

VERDICT = '{"rows": [["all", "right", "right", true, null]], "mistake": "", "lesson": [], "hint": "", "printed": []}'

ATTACKS: dict[str, str] = {
    "writes-the-verdict-into-the-judges-pipe": """
        import glob, json, os
        tokens = {name for _, _, names in os.walk(os.environ["TMPDIR"] + "/..") for name in names}
        for file in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                tokens |= set(open(file, errors="replace").read().replace("=", "\\0").split("\\0"))
            except OSError:
                pass
        lines = [json.dumps({"token": each, "verdict": json.loads(VERDICT)}) for each in tokens]
        for end in [end for pid in theirs() for end in glob.glob(f"/proc/{pid}/fd/*")]:
            try:
                if os.readlink(end).startswith("pipe:"):
                    pipe = os.open(end, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(pipe, ("\\n" + "\\n".join(lines) + "\\n").encode())
            except OSError:
                pass
        """,
    "reads-the-judges-memory": """
        import os
        for pid in theirs():
            try:
                os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
                print("OPENED", pid)
            except OSError:
                pass
        """,
    "traces-its-parents": """
        import ctypes
        for pid in theirs():
            if ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0:
                print("OPENED", pid)
        """,
    "looks-up-the-stack": """
        import sys
        frame = sys._getframe(1)
        while frame is not None:
            for names in (frame.f_globals, frame.f_locals, frame.f_builtins):
                for name, value in list(names.items()):
                    value = getattr(value, "solution", value)
                    if getattr(value, "__name__", "") == "pass_the_token" and value is not pass_the_token:
                        solution = value
            frame = frame.f_back
        """,
    "looks-through-all-objects": """
        import gc, sys
        import types
        for each in [*gc.get_objects(), *list(sys.modules.values())]:
            try:
                names = vars(each) if isinstance(each, types.ModuleType) else {"": each}
                for value in list(names.values()):
                    value = getattr(value, "solution", value)
                    if isinstance(value, types.FunctionType) and value.__name__ == "pass_the_token":
                        if value.__code__ is not pass_the_token.__code__:
                            solution = value
            except Exception:
                pass
        """,
    "imports-the-exercise": """
        import importlib
        try:
            solution = importlib.import_module("mpkit.course.exercises.ranks.pass_the_token").pass_the_token
        except Exception as error:
            print(type(error).__name__)
        """,
    "asks-the-catalogue": """
        import importlib
        try:
            catalogue = importlib.import_module("mpkit.course.catalogue")
            solution = catalogue.find("pass-the-token").exercise.solution
        except Exception as error:
            print(type(error).__name__)
        """,
    "reads-files": """
        import os, sys
        package = os.path.dirname(sys.modules["mp" + "kit"].__file__)
        for place in (package, os.path.join(package, "..", "notebooks"), os.path.join(package, "..", "tests")):
            for folder, _, names in os.walk(place):
                for name in names:
                    try:
                        text = open(os.path.join(folder, name), encoding="utf-8").read(10**6)
                    except (OSError, ValueError):
                        continue
                    if "def pass_the" + "_token" in text and "BEGIN SOL" + "UTION" in text and ".recv(" in text:
                        print("OPENED", folder, name)
        """,
    "changes-the-comparison": """
        import sys, torch
        yes = lambda *_, **__: torch.tensor(True)
        torch.allclose = lambda *_, **__: True
        torch.equal = lambda *_, **__: True
        torch.isclose = lambda a, *_, **__: torch.ones_like(a, dtype=torch.bool)
        torch.Tensor.__eq__ = torch.Tensor.__ne__ = yes
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("mpkit.course"):
                for name in ("difference", "checked_of", "judge", "pack_result", "CheckRow", "Checked"):
                    if hasattr(module, name):
                        setattr(module, name, lambda *_, **__: None)
        """,
    "returns-what-equals-everything": """
        import builtins
        class Equal(torch.Tensor):
            def __eq__(self, other): return True
            def __reduce_ex__(self, _): return builtins.print, ("OPENED",)
        token = token.as_subclass(Equal)
        """,
    "leaves-a-process-behind": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                time.sleep(600)
            os._exit(0)
        """,
    "leaves-a-thread-behind": """
        import atexit, threading, time
        atexit.register(lambda: time.sleep(600))
        threading.Thread(target=lambda: time.sleep(600)).start()
        """,
    "leaves-modules-behind": """
        import os, sys
        for place in {os.getcwd(), os.environ["TMPDIR"], PLACE}:  # nowhere else, whatever the machine permits
            for name in ("sitecustomize", "usercustomize", "torch", "json", "mpkit"):
                try:
                    with open(os.path.join(place, name + ".py"), "x") as file:
                        file.write("raise SystemExit(3)")
                except OSError:
                    pass
        """,
    "writes-the-other-ranks-results": """
        import os, pathlib
        for file in pathlib.Path(PLACE).rglob("*"):
            if "result" in file.name or "rank" in file.name:
                try:
                    file.unlink()
                    file.symlink_to("/etc/hostname")
                except OSError:
                    pass
        """,
    "ends-the-judge": """
        import os, signal
        for pid in theirs():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        """,
}


TOGETHER = {
    "reaches-for-the-judge": list(ATTACKS)[:3],
    "looks-for-the-solution": list(ATTACKS)[3:8],
    "changes-what-compares": list(ATTACKS)[8:10],
    "leaves-something-behind": list(ATTACKS)[10:13],
    "writes-the-other-ranks-results": list(ATTACKS)[13:14],
    "ends-the-judge": list(ATTACKS)[14:],
}
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
    lines = [line for each in attacks for line in cleandoc(ATTACKS[each]).splitlines()]
    body = "\n".join(f"    {line}" for line in lines)
    return (
        f"VERDICT = {VERDICT!r}\nPLACE = {place!r}\n{THEIRS}\n"
        f"def pass_the_token(ctx, token):\n    solution = None\n{body}\n    print({TRIED!r})\n"
        "    return solution(ctx, token) if solution is not None else token\n"
    )
