"""The box in a notebook into which a prediction is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.course.predictions.amounts import EXAMPLES, spell_amount
from mpkit.views.theme import STATUS

if TYPE_CHECKING:
    from mpkit.course.predictions.predict import Prediction

__all__ = ["box"]


def box(prediction: Prediction) -> Any:
    """Return a box with the question, a field and a button; once a number is locked in, neither can be used.

    Raises:
        ImportError: The packages of the notebook are not there; the message says how to install them.
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise needs_notebook("the box for a prediction", error) from error

    asked = prediction.question
    text = ipywidgets.HTML(f'<div style="line-height:1.5;max-width:52em">{escape(asked.text)}</div>')
    field = ipywidgets.Text(
        description="Prediction:", placeholder=EXAMPLES[asked.unit].replace("'", ""), continuous_update=False
    )
    button = ipywidgets.Button(description="Lock in", tooltip="the first number counts, and stays")
    said = ipywidgets.HTML()

    def lock(_: Any) -> None:
        if not field.value.strip():
            said.value = "Type a number first: a guess is better than none."
            return
        try:
            prediction.lock(field.value)
        except ValueError as error:
            said.value = f'<span style="color:{STATUS["bad"]}">{escape(str(error))}</span>'
            return
        kept = escape(spell_amount(prediction.value or 0.0, asked.unit))
        said.value = f"<b>Locked in: {kept}.</b> {escape(prediction.said)} Now run the next cell."
        field.disabled = button.disabled = True

    button.on_click(lock)
    return ipywidgets.VBox([text, ipywidgets.HBox([field, button]), said])
