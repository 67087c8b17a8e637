"""The message to show if a notebook's packages are missing."""

from __future__ import annotations

__all__ = ["needs_notebook"]


def needs_notebook(what: str, error: ImportError) -> ImportError:
    """Return an ImportError that says how to install what `what` needs, and what works without it.

    >>> print(needs_notebook("the live timeline", ImportError("No module named 'anywidget'")))
    the live timeline needs packages that only notebooks need (No module named 'anywidget'):
        pip install "mpkit[notebook]"
    Without them print(timeline), timeline.to_svg(path) and timeline.to_html(path) show the same picture.
    """
    return ImportError(
        f"{what} needs packages that only notebooks need ({error}):\n"
        '    pip install "mpkit[notebook]"\n'
        "Without them print(timeline), timeline.to_svg(path) and timeline.to_html(path) show the same picture."
    )
