"""Pipelines.

A pipeline is a schedule, and stages that send activations one way and gradients the other. First you write schedules
and watch their bubbles, then the parts that run them.
"""

TITLE = "Pipelines"
PLACE = 4
