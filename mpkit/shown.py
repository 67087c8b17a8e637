"""How a result shows itself: printed in a terminal, as a picture where no kernel runs, as a chart in a notebook.

A result says how it is drawn (`_svg`), and what is drawn of it with plotly (`figure`); the rest is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.disk import write_whole

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Charted", "Drawn", "data_frame"]


class Drawn:
    """What prints, and shows itself as a picture in a notebook."""

    def _svg(self) -> str:
        """The picture: a standalone SVG document."""
        raise NotImplementedError

    def _words(self) -> str:
        """The picture, for who cannot see it."""
        return str(self)

    def to_svg(self, path: str | Path | None = None) -> str:
        """The picture as SVG; written to `path` as well if that is given."""
        text = self._svg()
        if path is not None:
            write_whole(Path(path), text.encode())
        return text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from mpkit.views.fallback import image

        return {"text/html": image(self.to_svg(), self._words()), "text/plain": str(self)}


class Charted(Drawn):
    """What has a chart, too: shown instead of the picture wherever plotly is and a page can draw it."""

    def figure(self) -> Any:
        """The chart, a plotly Figure.

        Raises:
            ImportError: plotly is not installed.
        """
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        found = super()._repr_mimebundle_(include, exclude)
        with suppress(ImportError):  # then the picture has to do
            found |= self.figure()._repr_mimebundle_(include, exclude)
        return {**found, "text/plain": str(self)}


def data_frame(rows: Mapping[str, Any] | Iterable[Any], columns: list[str] | None = None) -> pd.DataFrame:
    """A pandas DataFrame.

    >>> data_frame([("dp", 8), ("tp", 2)], columns=["axis", "ranks"])
      axis  ranks
    0   dp      8
    1   tp      2

    Args:
        rows: sequences in the order of `columns`, or dicts by column; or columns by name.
        columns: their names.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        from mpkit.views.needs import needs_notebook

        raise needs_notebook("a data frame", error) from error

    # Columns by name come as arrays, and stay so.
    return pd.DataFrame(rows if isinstance(rows, Mapping) else list(rows), columns=columns)
