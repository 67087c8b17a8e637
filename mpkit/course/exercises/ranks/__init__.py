"""Ranks and messages.

Every strategy of the tutorials is made of a few things: ranks that know who they are, messages between two of them,
and collectives that all of them take part in. Here you write these yourself, on real processes.
"""

TITLE = "Ranks and messages"
PLACE = 1
