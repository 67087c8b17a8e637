"""Links and collectives.

A link has a latency and a bandwidth, and an algorithm decides how often a collective pays the one and how much of the
other. Two numbers that you measure predict which algorithm is faster, and from which batch size on a link does not
matter any more. Then you send less over the slow link: by a hierarchy, and by compression.
"""

TITLE = "Links and collectives"
PLACE = 10
