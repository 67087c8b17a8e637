"""mk.predict: a number that is locked in before the cell that shows it runs.

lock       the first number counts; it is kept in the student's file of progress
against    compare it with theory, beside what was measured; neither is told before a number is locked in
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.common.tracebacks import public
from mpkit.course.predictions.amounts import EXAMPLES, amount, spell_amount
from mpkit.course.predictions.questions import PredictionQuestion, question
from mpkit.course.progress import Progress
from mpkit.views.theme import STATUS


@public
def predict(name: str, value: float | str | None = None) -> Prediction:
    """Lock in a number before you see it; without a number, show a box to type it into.

    >>> import mpkit as mk
    >>> guess = mk.predict("bubble", "25 %")
    >>> print(guess.against(mk.simulate(mk.Plan.gpipe(4, 8)).bubble))
    You predicted 25.0 %, and theory says 27.3 %: 2.3 percentage points too low.
    Each GPU is idle for p-1 micro-batches' time out of m+p-1: the bubble is (p-1)/(m+p-1), here 3/11.

    Args:
        name: the name of the question, such as "bubble".
        value: a number, or text with a unit: 0.25, "25 %", "6 MB", "12 ms". The first one counts.

    Raises:
        ValueError: There is no such question, or the value is no such number; the message has one that is.
    """
    asked = question(name)
    prediction = Prediction(asked)
    if value is not None:
        prediction.lock(value)
    return prediction


@dataclass(eq=False, repr=False)
class Prediction:
    """A prediction: printed as text, and shown as a box in a notebook until a number is locked in.

    Attributes:
        question: what is predicted.
        said: what became of the last number, if it was not locked in.
    """

    question: PredictionQuestion
    said: str = field(default="", init=False)

    @property
    def value(self) -> float | None:
        """The number that is locked in; None if there is none yet."""
        return Progress.read().predictions.get(self.question.name)

    def lock(self, value: float | str) -> None:
        """Lock in a number; if there is one already, that stays, and `said` says so.

        Raises:
            ValueError: It is no such number.
        """
        number, first = amount(value, self.question.unit), self.value
        self.said = ""
        if first is None:
            Progress.read().add_prediction(self.question.name, number).write()
        elif first != number:
            self.said = f"{self._spell(first)} was locked in first, and stays."

    def against(self, shown: float | None = None) -> PredictionOutcome:
        """Compare the prediction with theory; before a number is locked in, only ask for one.

        Args:
            shown: the number that a run measured, such as `run.timeline().bubble`. It is told beside theory's, by
                which the prediction is judged. None: only theory's is told.
        """
        theory = self.question.truth()
        shown = theory if shown is None else amount(shown, self.question.unit)
        return PredictionOutcome(self.question, self.value, theory, shown)

    def __str__(self) -> str:
        if self.value is None:
            how = f"mk.predict({self.question.name!r}, ...), such as {EXAMPLES[self.question.unit]}"
            return f"{self.question.text}\nNot predicted yet: {how}"
        return " ".join(
            filter(None, [f"{self.question.text}\nLocked in: {self._spell(self.value)}.", self.said])
        )

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        lines = "<br>".join(escape(line) for line in str(self).splitlines())
        bundle = {
            "text/plain": str(self),
            "text/html": f'<div style="max-width:52em;line-height:1.5">{lines}</div>',
        }
        if self.value is None:
            return {**box(self)._repr_mimebundle_(), **bundle}
        return bundle

    def _spell(self, value: float) -> str:
        return spell_amount(value, self.question.unit)


@dataclass(frozen=True, repr=False)
class PredictionOutcome:
    """A prediction beside what theory says, by which it is judged, and what was measured.

    Attributes:
        question: what was predicted.
        value: the prediction; None if there was none.
        theory: what theory says.
        shown: what was measured; the same as `theory` if nothing was.
    """

    question: PredictionQuestion
    value: float | None
    theory: float
    shown: float

    def __str__(self) -> str:
        theory, shown = (spell_amount(each, self.question.unit) for each in (self.theory, self.shown))
        if self.value is None:
            call = f"mk.predict({self.question.name!r}, ...), such as {EXAMPLES[self.question.unit]}"
            return f"Predict it first: in the box, or with {call}. Then run this again.\n{self.question.text}"
        said = f"You predicted {spell_amount(self.value, self.question.unit)}, and theory says {theory}"
        measured = f" Measured here: {shown}." if shown != theory else ""
        return f"{said}: {self.question.gap(self.value, self.theory)}.{measured}\n{self.question.why}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        head, *rest = str(self).splitlines()
        near = self.value is not None and self.question.close(self.value)
        colour = STATUS["good" if near else "doubt"]
        html = (
            f'<div style="border-left:4px solid {colour};padding:6px 12px;max-width:52em;line-height:1.5">'
            f"<b>{escape(head)}</b><br>{escape(' '.join(rest))}</div>"
        )
        return {"text/plain": str(self), "text/html": html}


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
