"""A report as HTML: the steps of a topic, and a table of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level
from mpkit.views.checkup.text import verdict
from mpkit.views.theme import ACCENT, STATUS

if TYPE_CHECKING:
    from mpkit.launch.doctor.report import CheckupReport

__all__ = ["report_html"]

COLOURS = {
    Level.COSTS: STATUS["bad"], Level.NOTE: ACCENT, Level.FINE: STATUS["good"], Level.UNCHECKED: STATUS["doubt"],
}  # fmt: skip
ORDER = (Level.COSTS, Level.NOTE, Level.UNCHECKED, Level.FINE)


def report_html(report: CheckupReport) -> str:
    """Return the report as HTML, without scripts."""
    parts = []
    if report.composed:
        parts.append(f"<p><b>Not this machine: {escape(report.composed)}</b></p>")
    if report.topic is not None:
        steps = "".join(
            f"<li>{escape(what)}{'' if what.endswith('?') else ':'} <code>{escape(command)}</code></li>"
            for what, command in report.topic.steps
        )
        parts.append(
            f"<p><b>{escape(report.topic.name)}</b><br>{escape(report.topic.means)}</p><ol>{steps}</ol>"
        )
    rows = "".join(_row(finding) for level in ORDER for finding in report.of(level))
    head = _head("", "about", "what", "evidence", "costs", "fix")
    if rows:
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
    if report.variables:
        body = "".join(
            f"<tr>{_cell(f'<code>{escape(each.name)}</code>')}{_cell(escape(each.values))}{_cell(escape(each.default))}"
            f"{_cell(escape(each.meaning))}{_cell(escape(each.when))}</tr>"
            for each in report.variables
        )
        names = _head("variable", "values", "default", "meaning", "when to set it")
        parts.append(f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>")
    return f"<div>{''.join(parts)}<p><b>{escape(verdict(report))}</b></p></div>"


def _row(finding: CheckupFinding) -> str:
    level = f"<b style='color:{COLOURS[finding.level]}'>{finding.level}</b>"
    fix = f"<code>{escape(finding.fix)}</code>" if finding.fix else ""
    words = (finding.subject, finding.what, finding.evidence, finding.costs)
    return f"<tr>{''.join(map(_cell, (level, *map(escape, words), fix)))}</tr>"


def _head(*words: str) -> str:
    return "".join(f"<th style='text-align:left'>{word}</th>" for word in words)


def _cell(html: str) -> str:
    return f"<td style='text-align:left;vertical-align:top;white-space:normal'>{html}</td>"
