"""Beat 1F1B under a memory cap."""

from mpkit.course.author import *

# %% answer
### BEGIN SOLUTION
# instead: mine = """
# instead:     F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
# instead:     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
# instead:     F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
# instead:     F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
# instead: """
mine = """
    F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    F0 F1 F2 I0 W0 I1 W1 F3 I2 W2 F4 I3 F5 W3 I4 W4 I5 W5
    F0 F1 F2 I0 W0 I1 W1 I2 W2 F3 I3 F4 W3 F5 I4 W4 I5 W5
    F0 I0 F1 I1 F2 I2 W0 W1 W2 F3 I3 W3 F4 I4 F5 I5 W4 W5
"""
### END SOLUTION


# %% checks
P, M, CAP = 4, 6, 3


EXERCISE = Schedules(
    cases=(Case(P, 1, {"microbatches": M}),),
    budgets=(Budget("live micro-batches of a rank", live, CAP), Budget("bubble", bubble, 0.2999)),
)
