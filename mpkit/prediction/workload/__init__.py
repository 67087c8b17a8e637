"""What a training is given besides sizes: the documents of its sequences, and how busy its experts are.

Each is checked, priced as numbers that the cost model takes, and described for what an estimate prints.
"""
