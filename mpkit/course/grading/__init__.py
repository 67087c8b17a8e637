"""Grading a class: `python -m mpkit grade FOLDER -o grades.csv`.

    submissions    finds each student's notebooks and the exercises to answer; reads them all before one runs
    collect        runs a student's notebook in a process of its own, and packs its answers
    judge_process  judges answers in another process, on ranks of its own
    grader         grades one notebook after the other: collect, judge
    grade          goes through a class, and keeps what was graded already
    report         writes a table of the class and one page per student; says what the class found hard

Nothing that a notebook says about itself counts: its answers are packed, and judged by the kit's own checks. They run
in `mpkit.course.sandbox`; what a malicious notebook can still do is in docs/security.md.
"""
