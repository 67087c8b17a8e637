"""The training loop.

What happens between a batch and a step decides how fast a training is, and whether 16 bits are enough for it. Here you
write what autocast's users rely on, master weights and a loss scale, by hand; you find out what makes a loop slow; and
you write what carries a training from one number of ranks to another.
"""

TITLE = "The training loop"
PLACE = 13
