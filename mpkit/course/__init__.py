"""The classroom: exercises that check themselves on real ranks.

In     an answer, from a notebook cell or a student's notebook.
Out    a verdict with the rows that were checked and one hint; the grades of a class (`grading`).
Begin  with `framework/kinds.py`, then any exercise: `ranks/pass_the_token.md` and `.py`.
May import  all rooms.

framework      what an exercise is, its kinds, ranks for a check, what an answer did
author         what checks are written with, and how to write an exercise
exercise_text  the text file: the task, hints, wrong answers as diffs of the solution
catalogue      finds exercises by name, and puts their code and text together
signatures     what each wrong answer does, as recorded; relations has words for mistakes that no list foresees
judge          from an answer to a verdict: the rows, the mistake that shows, and the hint
verdict        the verdict as text, HTML and JSON
check          mk.check and mk.progress
sandbox        where answers of strangers run; grading runs those of a class
"""
