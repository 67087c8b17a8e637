"""Links and collectives.

A link has a latency and a bandwidth, and an algorithm decides how many times a collective pays the latency and how many
bytes it sends. Two numbers that you measure predict which algorithm is faster, and at which batch size a link does not
matter any more. Then you send less over the slow link: by a hierarchy, and by compression.
"""

TITLE = "Links and collectives"
PLACE = 10
