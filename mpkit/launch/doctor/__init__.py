"""The doctor: what this machine has for parallel training, what that costs, and the command that fixes it.

probe        facts of this machine as plain data: what NVML, the system and torch say
doctor       what `mk.doctor()` does, and short measurements on ranks
rules        whether something holds, and with which numbers; findings.toml has the words
report       what `mk.doctor()` returns; the common issues of a guide (topics.toml), nccl's variables (variables.csv)
"""
