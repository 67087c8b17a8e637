"""The proof of a run: while the ranks train, some of their steps are computed again in plain PyTorch, and compared.

    steps        which steps are verified
    whole_step   what all ranks have of a step, put together
    draws        the random numbers that the ranks drew, for the serial step to use
    rounding     how far two correct results may be apart
    causes       why a step is not equal: more comparisons, until one explains it
    prover       a step after another, in a thread of the caller's process
    proof        the outcome, in words and as a badge

The serial step is `mpkit.strategies.reference.serial`, which shares nothing with the strategies.
"""
