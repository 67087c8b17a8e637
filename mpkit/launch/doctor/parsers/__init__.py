"""From the text of one command or file to values: pure functions, one format per module.

All of them raise ValueError for text that is something else, and read what both old and new versions of a tool print.
"""
