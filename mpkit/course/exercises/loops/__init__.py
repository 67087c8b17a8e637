"""The training loop.

The code between a batch and a step decides whether 16 bits are enough for training. Here you write by hand what users
of autocast rely on: master weights and a loss scale.
"""

TITLE = "The training loop"
PLACE = 12
