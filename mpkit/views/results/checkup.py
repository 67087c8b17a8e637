"""The doctor's report: as text, and in a terminal with colours and as wide as it is."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpkit.common.safe_text import visible
from mpkit.launch.doctor.report import CheckupFinding, plural

if TYPE_CHECKING:
    from mpkit.launch.doctor.report import CheckupReport


MARKS = {
    "costs": ("!", "bold red"),
    "note": ("i", "cyan"),
    "not checked": ("?", "yellow"),
    "fine": ("✓", "green"),
}
"""The mark and colour of each level, in the order of the report."""


def report_text(report: CheckupReport, width: int = 110) -> str:
    """Return the report as plain text."""
    page = StringIO()
    # In a notebook a Console shows what it prints there, whatever its file is.
    console = Console(file=page, width=width, color_system=None, highlight=False, force_jupyter=False)
    print_report(report, console)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())


def print_report(report: CheckupReport, console: Console) -> None:
    """Print the report: first what costs, then the rest by subject."""
    if report.topic is not None:
        console.print(Text.assemble((report.topic.name, "bold"), f": {report.topic.means}"))
        for number, (what, command) in enumerate(report.topic.steps, 1):
            asked = "" if what.endswith("?") else ":"
            console.print(Text.assemble(f"  {number}. {what}{asked} ", (command, "bold")))
        console.print()
    table = Table.grid(padding=(0, 1))
    for level in MARKS:
        for finding in report.of(level):
            mark, style = MARKS[level]
            table.add_row(Text(mark, style), Text(finding.subject, "bold"), _words(finding))
    for variable in report.variables:
        values = {"*": "text", "#": "number"}.get(variable.values, variable.values)
        head = Text.assemble((variable.name, "bold"), f" = {values}; default: {variable.default}\n")
        table.add_row("", "", head.append(f"    {variable.meaning} When: {variable.when}"))
    console.print(table)
    console.print(Text(verdict(report), style="bold"))


def verdict(report: CheckupReport) -> str:
    """Return the last line: how many findings cost."""
    many, unchecked = len(report.of("costs")), len(report.of("not checked"))
    said = (
        f"{plural(many, 'finding')} that cost{'s' * (many == 1)}" if many else "Nothing was found that costs"
    )
    rest = f", {unchecked} not checked" if unchecked else ""
    took = f" ({report.seconds:.1f} s)" if report.seconds else ""
    return f"{said}{rest}{took}."


def _words(finding: CheckupFinding) -> Text:
    """Return a finding in lines; one that is fine in a single one."""
    if finding.level == "fine":
        more = f"  {visible(finding.fix)}" if finding.fix else ""
        return Text.assemble(visible(finding.what), (f"  [{visible(finding.evidence)}]", "dim"), more)
    if finding.level == "not checked":
        return Text.assemble(
            "not checked: ", visible(finding.what), (f"  [{visible(finding.evidence)}]", "dim")
        )
    text = Text(visible(finding.what))
    for word, line in (("evidence", finding.evidence), ("costs", finding.costs), ("fix", finding.fix)):
        if line:
            text.append(f"\n{word:>8}  ", "dim").append(visible(line))
    return text
