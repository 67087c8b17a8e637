"""Predictions: time and memory of a training, from sizes, dry runs, profiles and earlier runs.

In     a model or its sizes, a `Plan`, hardware; or a run, whose step is played again after changes.
Out    seconds with an error band, bytes by category, plans in order, and the reasons.
Begin  with `cost_model/step.py` (a step from sizes), then `advice/search.py` (all plans that fit).

May import  all rooms but `views` and `course`.
"""
