"""The classroom: exercises that check themselves on real ranks.

In     an answer, from a notebook cell or a student's notebook.
Out    a verdict with the rows that were checked and one hint; the grades of a class (`grading`).
Begin  with `framework/kinds.py`, then any exercise: `ranks/pass_the_token.md` and `.py`.
May import  all rooms.

exercise       Exercise, Case, Mistake, Budget: what an author writes, a file of code and one of text per exercise
source         the parts of the code: what is given, the answer with its solution
exercise_text  the parts of the text: the task, hints, wrong answers as diffs of the solution
catalogue      finds exercises by name
observation    Seen: what an answer did in one case; budgets measure it, and mistakes are recognized in it
on_ranks       exercises whose answer runs on ranks
room           ranks for a check, with seeded delays, limits, and an explanation of every hang
judge          from an answer to a verdict: the rows, the mistake that shows, and the hint
verdict        the verdict as text, HTML and JSON
check          mk.check and mk.progress
"""
