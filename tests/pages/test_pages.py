"""What pages say holds: links lead somewhere, rows of the guides work, code runs, pictures are what calls draw."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest
import torch

import mpkit as mk
from mpkit.cli import main
from mpkit.cli.demo import strategies
from mpkit.launch.doctor.report import topics
from scripts.site import GALLERY, PICTURES, RUNS, Shown, write
from tests.limits import PROGRAM

# ---- Links from the tutorials and the documentation lead somewhere: to a file that exists and to a heading in it.

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return a page's text, or that of a notebook's Markdown cells."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    book = nbformat.read(path, as_version=4)
    return "\n\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")


def without_code(text: str) -> str:
    """Return Markdown without its fenced blocks and code spans, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings(text)}


def broken(path: Path) -> list[str]:
    """Return the links of a page or notebook to a file, or to a heading of a page, that does not exist."""
    found = []
    for link in LINK.findall(without_code(prose(path))):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        if not target.exists() or (
            target.suffix == ".md" and parts.fragment and parts.fragment not in anchors(prose(target))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize(
    "path",
    [*TUTORIALS, *PAGES, ROOT / "README.md", ROOT / "notebooks" / "README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_each_tutorial_links_its_words_to_the_glossary(path: Path) -> None:
    assert "../docs/glossary.md#" in prose(path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_has_a_section_twice(path: Path) -> None:
    heads = headings(prose(path))
    assert sorted(heads) == sorted({*heads})


# ---- docs/guides.md: the headings that it quotes are there, its plans can be made, and its calls exist.

PAGE = ROOT / "docs" / "guides.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE = sorted(set(re.findall(r"`([^`]+)`", TEXT)))


def test_quoted_headings_are_there() -> None:
    quotes = re.findall(r"\]\(([^)#]+\.ipynb)\), \"([^\"]+)\"", TEXT)
    assert len(quotes) > 25
    for path, words in quotes:
        heads = re.findall(r"^#+ (.+)$", prose(PAGE.parent / path), flags=re.MULTILINE)
        assert any(words in head for head in heads), f"{path}: {words}"


def test_plans_can_be_made() -> None:
    plans = [code for code in CODE if re.match(r"(mk\.)?Plan[.(]", code) and ".read" not in code]
    plans = [code.removesuffix(".placement()") for code in plans]
    assert len(plans) > 15
    for code in plans:
        assert isinstance(eval(code, {"mk": mk, "Plan": mk.Plan}), mk.Plan), code


def test_calls_exist() -> None:
    for name in re.findall(r"`mk\.([\w.]*\w)", TEXT):
        attrgetter(name)(mk)
    for name in re.findall(r"mk\.source\(\"([^\"]+)\"\)", TEXT):
        mk.source(name)


ROWS = [
    line.strip("| \n").split(" | ", 1)
    for line in TEXT.splitlines()
    if line.startswith("| ") and line != "| topic | here |"
]


def test_every_row_leads_somewhere() -> None:
    """184 topics: each has a link (which is followed above), a call, a command or a file."""
    assert len(ROWS) >= 184 and len({topic for topic, _ in ROWS}) == len(ROWS)
    assert [topic for topic, here in ROWS if not re.search(r"\]\(|`", here)] == []
    runs = [topic for topic, here in ROWS if "(text)" not in here]
    assert len(runs) >= 180


def test_whole_calls_work() -> None:
    """What can be evaluated as it stands: predictions, placements, schedules and sources."""
    kinds = "Plan|simulate|fits|hardware|source"
    whole = [code for code in CODE if re.fullmatch(rf"mk\.({kinds})\b.*\)", code) and "..." not in code]
    assert len(whole) > 30
    for code in whole:
        eval(code, {"mk": mk})


def test_commands_and_files_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    named = capsys.readouterr().out.split()
    rows = tomllib.loads((ROOT / "mpkit/cli/commands.toml").read_text())
    assert all(callable(resolve_name(row["run"])) for row in rows.values())
    for words in re.findall(r"`mpkit (\w+)", TEXT):
        assert words in named, words
    for topic in re.findall(r"`mpkit doctor ([a-z0-9 -]+)`", TEXT):
        assert topic in {*topics(), "variables"}, topic
    for path in re.findall(r"`((?:examples|environment|pyproject)[\w./]*)`", TEXT):
        assert (ROOT / path).exists(), path


# ---- The code of the README runs as it stands there.

README = Path(__file__).parents[2] / "README.md"


def test_every_file_that_it_names_is_there() -> None:
    text = README.read_text()
    for name in re.findall(r"\]\((?!http)([^)#]+)\)|`((?:docs|notebooks|benchmarks|mpkit)/[\w./-]*)`", text):
        path = next(part for part in name if part)
        if path != "benchmarks/results.json":  # made by make bench
            assert (README.parent / path).exists(), path


# ---- The code of the README and of pages of docs/ runs as it stands there.

PRINTED = {
    "README.md": {"bubble": 1},
    "docs/which-call.md": {"answer": 15},
    "docs/wrappers.md": {
        "bubble": 2, "mk.prove(DistributedDataParallel): equal": 1, "mk.prove(FSDPSequential): equal": 1,
    },
}  # fmt: skip
"""By page, how often its program prints a word at least."""


def program_of(page: str) -> str:
    """Return the code of a page; of the README the first block, of which-call.md also the call of each row."""
    text = (ROOT / page).read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    calls = re.findall(r"^\| [^|]+\? \| `([^`]+)` \|", text, re.MULTILINE)
    rows = [f"print('answer', {number}, repr({call}))" for number, call in enumerate(calls)]
    return "\n".join([first, *rows, *([] if page == "README.md" else others)])


@pytest.mark.soak
@pytest.mark.parametrize("page", PRINTED)
def test_the_code_runs(tmp_path: Path, page: str) -> None:
    (tmp_path / "page.py").write_text(program_of(page), encoding="utf-8")
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert {word: done.stdout.count(word) >= least for word, least in PRINTED[page].items()} == dict.fromkeys(
        PRINTED[page], True
    )


# ---- The site: pages that open from a file. Its runs are recorded where it is built; here stand-ins take their place.


def played(plan: mk.Plan) -> mk.Trace:
    """A trace without ranks: a small GPT on tensors without content."""
    tokens = torch.empty(8, 16, dtype=torch.long, device="meta")
    return mk.trace_fake(
        lambda: mk.models.GPT(layers=4, width=16), plan, batch=(tokens, tokens), loss=mk.models.next_token_loss,
        optimizer=torch.optim.AdamW, steps=2, hardware="8x-a100-nvlink",
    )  # fmt: skip


@cache
def stand_in(ranks: int) -> Any:
    """A run on one rank, or on four."""
    trace = played(mk.Plan.gpipe(4, 4) if ranks > 1 else mk.Plan.serial())
    return SimpleNamespace(trace=trace, timeline=lambda hardware=None: mk.Timeline.of(trace, hardware))


@pytest.mark.parametrize("shown", GALLERY, ids=lambda shown: shown.name)
def test_the_readme_shows_each_result_as_its_call_draws_it(shown: Shown) -> None:
    stored = (PICTURES / f"{shown.name}.svg").read_text(encoding="utf-8")
    assert stored == shown.draw() + "\n", "draw them anew: python -m scripts.site --pictures"
    text = README.read_text(encoding="utf-8")
    assert (
        f"{shown.sentence}\n\n```python\n{shown.call}\n```\n\n![{shown.title}](docs/pictures/{shown.name}.svg)"
        in text
    )


@pytest.mark.soak
def test_every_page_of_the_site_is_reached_from_its_index(tmp_path: Path) -> None:
    write(tmp_path, {name: (name, stand_in(min(ranks, 2))) for name, ranks in RUNS.items()})
    assert len(RUNS) == 12 and set(RUNS) <= set(strategies())
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = {tmp_path / href for href in re.findall(r'href="([^"#:]+)"', index)}
    assert {*linked, tmp_path / "index.html"} == {*tmp_path.rglob("*.html")}
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'(src|href)="(https?:)?//', text), f"{page.name} asks another server"
