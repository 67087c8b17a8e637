"""What every other room may use: helpers that know nothing of parallel training.

In     whatever callers hand over: arguments, exceptions, files of strangers, text for a terminal.
Out    errors at the user's own line, files that are whole or absent, text that is safe to print.
Begin  with `tracebacks.py` (errors end at the user's line) and `display.py` (results find their views).
May import  `mpkit.errors`.
"""
