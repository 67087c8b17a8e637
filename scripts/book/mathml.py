"""A Sphinx extension: formulas as MathML, which browsers draw and screen readers read without a script."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

__all__ = ["mathml", "setup"]


def mathml(formula: str, block: bool) -> str:
    r"""Return a formula as MathML.

    Raises:
        docutils.utils.math.MathError: the formula has a command that docutils does not know.

    >>> mathml(r"p-1", block=False).count("<mi>p</mi>")
    1
    """
    return latex2mathml.tex2mathml(formula.replace(r"\dots", r"\ldots"), as_block=block)


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def displayed(writer: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    writer.body.append(f"<div class='math' tabindex='0'>{mathml(node.astext(), block=True)}</div>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Add the renderer `mathml`."""
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
