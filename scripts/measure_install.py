"""What a student's first install costs: bytes and seconds of each way to install, each in a clean home folder.

    python scripts/measure_install.py           # uv and pip, and conda where it is installed
    python scripts/measure_install.py pip
    UV_FIND_LINKS=/wheels python scripts/measure_install.py uv --torch ""    torch from a folder, not from its own index

Each way gets a new home folder, so no cache of packages and no settings but those of the system and of UV_*, PIP_* and
SSL_* (certificates, an index), and an environment in it. The bytes received are what the machine's network interfaces
counted meanwhile, so nothing else may download; wheels that these settings take from a disk are not among them. No test
and no gate runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

UV = "pip install --torch-backend={torch} -c constraints.txt -e .[notebook]"

WAYS = {
    "uv": ("{python} -m venv {env}", f"uv {UV} --python {{env}}/bin/python"),
    "pip": ("{python} -m venv {env}", "{env}/bin/python -m pip install -q -c constraints.txt -e .[notebook]"),
    "conda": (
        "conda env create -q -f environment.yml -p {env}",
        f"{{env}}/bin/uv {UV} --python {{env}}/bin/python",
    ),
}
"""The commands of each way, in README's order; {env} is the environment in the clean home folder."""

SETTINGS = re.compile(r"PATH|LANG|(UV|PIP|SSL)_(?!.*CACHE).*")
"""The environment variables that an installation sees."""

FIRST = "{env}/bin/python -c 'import mpkit as mk; print(mk.simulate(mk.Plan.gpipe(4, 8)).bubble)'"
"""The first line that a student runs: it imports mpkit and draws nothing."""


def received() -> int:
    """Return the bytes that this machine's interfaces have received, the loopback interface left out; 0: not Linux."""
    try:
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    except OSError:
        return 0
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def measure(way: str, torch: str) -> str:
    """Install one way in a clean home folder, and return the line of the table that says what it took."""
    needs = {"uv": "uv", "conda": "conda"}.get(way)
    if needs and shutil.which(needs) is None:
        return f"{way:8}not measured: {needs} is not on PATH"
    with tempfile.TemporaryDirectory(prefix="mpkit-install-") as place:
        home = Path(place)
        kept = {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}
        settings = {"LANG": "C.UTF-8", **kept, "HOME": place}
        before, began = received(), time.monotonic()
        for command in (*WAYS[way], FIRST):
            line = command.format(python=sys.executable, torch=torch, env=f"{place}/env")
            line = line.replace("--torch-backend= ", "--no-config ")
            done = subprocess.run(line, shell=True, cwd=ROOT, env=settings, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["?"]
                told = [line.strip() for line in lines if re.search("error|cause|ERROR", line)] or lines
                return f"{way:8}failed: {told[-1][:100]}"
        seconds, megabytes = time.monotonic() - began, (received() - before) / 1e6
        return f"{way:8}{megabytes:9.0f} MB{size(home / 'env') / 1e6:14.0f} MB{seconds:11.0f} s"


def main() -> int:
    """Measure the ways that were asked for, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help="uv, pip, conda")
    parser.add_argument(
        "--torch", default="cpu", help="uv's --torch-backend; empty: torch from where all else is from"
    )
    asked = parser.parse_args()
    print(f"{'way':8}{'received':>12}{'environment':>17}{'with import':>13}")
    for way in asked.ways or WAYS:
        print(measure(way, asked.torch), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
