"""Starting ranks, and what happens when one fails.

boot.py      what helper processes import, and from where
nursery.py   the warm process: torch imported once, ranks forked from it
rank.py      the rank's half: from the fork to the user's function and back
store.py     where ranks find each other: a file that is theirs alone
stacks.py    where a rank is, asked without disturbing it
waiting.py   for whom ranks wait: one line, before anything is given up
vitals.py    what the system says of a process
context.py   what a function on a rank is given
launch.py    the parent's half: one launch, from the payload to its outcome
failure.py   from what failed ranks left behind to an error that teaches
hang.py      do the ranks wait for each other for ever, and who for whom
"""
