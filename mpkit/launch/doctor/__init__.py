"""The doctor: what this machine has for parallel training, what that costs, and the command that fixes it.

probes      run commands and read files, each with a time limit
parsers     from their text to values: pure functions
            (`facts` gathers them: everything that is known, or why it is not)
findings    rules over the facts: what, evidence, what it costs, the command that fixes it
report      what `mk.doctor()` returns
"""
