"""Grading a class: `python -m mpkit grade FOLDER -o grades.csv`.

    reading        reads a notebook's file safely, whatever is in it
    handed_in      finds each student's notebooks and the exercises to answer; reads them all before one runs
    collect        runs a student's notebook in a process of its own, and packs its answers
    judge_process  judges answers in another process, on ranks of its own
    same           tests whether an answer is the kit's own solution
    grade_file     keeps what was graded already
    grade          goes through the notebooks: collect, judge, write down
    report         writes a table of the class, and one page per student

Nothing that a notebook says about itself counts: its answers are packed, and judged by the kit's own checks. They run
in `mpkit.course.sandbox`; what a malicious notebook can still do is in docs/security.md.
"""
