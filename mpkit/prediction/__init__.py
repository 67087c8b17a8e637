"""Predictions: time and memory of a training, from sizes, dry runs, profiles and earlier runs.

In     a model or its sizes, a `Plan`, hardware; or a run, whose step is played again after changes.
Out    seconds with an error band, bytes by category, plans in order, and the reasons.
Begin  with `cost_model/step.py` (a step from sizes), then `advice/search.py` (all plans that fit).

cost_model/  estimate, fits, calibrate     dry_run/   a rank of each kind, on tensors without content
advice/      which plan                    experiments/   several runs side by side
what_if.py   a run's step after changes    expert_balance.py   where experts should be

May import  all rooms but `views` and `course`.
"""
