"""Starting ranks, and what happens when one fails.

nursery.py   the warm process: torch imported once, ranks forked from it
rank.py      the rank's half: from the fork to the user's function and back
context.py   what a function on a rank is given
launch.py    the parent's half: one launch, from the payload to its outcome
failure.py   from what failed ranks left behind to an error that teaches
hang.py      do the ranks wait for each other for ever, and who for whom
"""
