"""Grading a class: `python -m mpkit grade FOLDER -o grades.csv`.

    handed_in   whose notebooks are where, and which exercises they should answer
    guard       a command under limits on time, memory and processes, of which nothing is left afterwards
    collect     in a process of its own: runs a student's notebook, and packs its answers
    grade       notebook after notebook: collect, judge, write down
    report      a table of the class, and a page a student

What a notebook says about itself counts for nothing: its answers are packed, and judged by the kit's own checks on
ranks of their own. That keeps out mistakes and mischief; it is no prison: a notebook runs with your rights. Grade
strangers' notebooks in a container.
"""
