"""Hang lab.

Six programs, each of which waits for ever, each for a reason of its own. Run them as they are: after two seconds the
check says who waits where, for which message or collective, and who never came to it. Find the reason in that report
before you change a line, then fix the program. A program that ends is not yet right: its results are compared to
serial training's.
"""

TITLE = "Hang lab"
PLACE = 7
