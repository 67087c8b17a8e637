"""Predictions: a number is locked in before the cell that shows it runs.

amounts      numbers with units, as people type them: "25 %", "6 MB", "1.5 GiB"
questions    the questions that tutorials ask, and what is true
predict      mk.predict: lock a number in, in a box in a notebook, and compare it with what comes
"""
