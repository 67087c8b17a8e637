"""Grading a class: `python -m mpkit grade FOLDER -o grades.csv`.

    reading     a notebook's file, whatever it is
    handed_in   whose notebooks are where, and which exercises they should answer; all are read before one runs
    enclose     a command that sees its own processes and writes to its own folder only, as far as Linux gives that
    guard       a command under limits on time, memory and processes, of which nothing is left afterwards
    collect     in a process of its own: runs a student's notebook, and packs its answers
    judging     in another one: judges answers, on ranks of its own
    same        whether an answer is the kit's own solution
    kept        what was graded already
    grade       notebook after notebook: collect, judge, write down
    report      a table of the class, and a page a student

What a notebook says about itself counts for nothing: its answers are packed, and judged by the kit's own checks. What
is left to one that means harm is in docs/teaching.md.
"""
