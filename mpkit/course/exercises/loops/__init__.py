"""The training loop.

The code between a batch and a step decides how fast training is, and whether 16 bits are enough for it. Here you write
by hand what autocast's users rely on, master weights and a loss scale; you find out what makes a loop slow; and you
bring autocast and a loss scale to several ranks.
"""

TITLE = "The training loop"
PLACE = 13
