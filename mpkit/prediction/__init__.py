"""Predictions: time and memory of a training, from sizes, dry runs, profiles and earlier runs.

In     a model or its sizes, a `Plan`, hardware; or a run, whose step is played again after changes.
Out    seconds with an error band, bytes by category, plans in order, and the reasons.
Begin  with `cost_model/step.py` (a step from sizes), then `advice/search.py` (all plans that fit).

cost_model/         estimate, fits, calibrate      dry_run.py            a rank of each kind, without its tensors
advice/             which plan                     experiments/          runs side by side, and after changes
expert_balance.py   where experts should be        schedule_search.py    a shorter order of a pipeline's actions

May import  all rooms but `views` and `course`.
"""
