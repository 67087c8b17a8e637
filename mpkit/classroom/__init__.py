"""The classroom: exercises that check themselves on real ranks.

exercise     Exercise, Case, Mistake, Budget: what an author writes, one file an exercise
source       the parts of such a file: text, given code, answer with its solution, wrong answers
catalogue    finds exercises by name
seen         Seen: what an answer did in one case, which budgets measure and mistakes are told by
on_ranks     exercises whose answer runs on ranks
room         ranks for a check: seeded delays, limits, no hang that is not explained
lesson       what failed there, as a lesson
judge        from an answer to a verdict: rows, and the hint
check        mk.check and mk.progress
"""
