"""What each operation of a step had to wait for: a graph of the step, which can be played again.

graph          what each rank did, joined by messages and collectives; when each piece ends if all of them take so long
critical_path  CriticalPath: the chain of operations that decides how long the step takes; who waits for whom
"""
