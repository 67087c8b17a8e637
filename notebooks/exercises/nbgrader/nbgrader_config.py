"""nbgrader's configuration for the notebooks in source/, written by `mpkit exercises`."""

c = get_config()

c.CourseDirectory.course_id = "mpkit"
# What a student finds in place of a solution: mk.check knows by it that nothing is written yet.
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("your turn")'}
# Seconds for one cell. A check tries several cases on ranks, and each may hang; nbgrader's own 30 s are too few.
c.ExecutePreprocessor.timeout = 600
