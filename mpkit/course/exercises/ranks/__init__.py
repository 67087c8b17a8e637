"""Ranks and messages.

Every strategy in the tutorials is built from a few things: ranks that know who they are, messages between two ranks,
and collectives that all ranks take part in. Here you write these yourself, on real processes.
"""

TITLE = "Ranks and messages"
PLACE = 1
