"""Hang lab.

Here are four programs. Each of them waits forever, each for a different reason. Run them as they are: after two seconds
the check says who waits where, for which message or collective, and who never came to it. Find the reason in that
report before you change a line, then fix the program. A program that ends is not yet right: its results are compared
with serial training's.
"""

TITLE = "Hang lab"
PLACE = 7
