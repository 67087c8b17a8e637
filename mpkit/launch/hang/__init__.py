"""Detecting and explaining ranks that wait.

progress         which ranks have made progress since the last look
stragglers       which rank the others wait for: a one-line notice, before any rank is given up
unmatched_calls  calls that no peer will ever answer, proved from the trace
hang             whether the ranks wait for each other forever, and the calls that do not match, in words
hang_watch       looks at the ranks again and again, and asks them for their stacks
"""
