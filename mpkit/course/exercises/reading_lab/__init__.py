"""Reading lab.

A timeline says where the time goes, if you can read it: which gaps are waiting, for what, and what would close them.
Here you read timelines, predict what a change would do, and then replay and see.
"""

TITLE = "Reading lab"
PLACE = 9
