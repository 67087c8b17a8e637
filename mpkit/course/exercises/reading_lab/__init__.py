"""Reading lab.

A timeline shows where the time goes, if you can read it: in which gaps a rank waits, for what, and what would close
them. Here you read timelines, predict what a change would do, and then replay and see.
"""

TITLE = "Reading lab"
PLACE = 9
