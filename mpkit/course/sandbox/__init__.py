"""Where answers of strangers run: apart from their judge, enclosed and under limits.

enclose      runs a command that sees only its own processes and writes only to its own folder, if Linux allows that
guard        runs a command under limits on time, memory and processes, and ends everything that it leaves behind
ranks_apart  ranks for an answer, enclosed once more
allowance    how long ranks may take for a case
usage        what an answer uses on a rank
"""
