"""The proof: steps on ranks are computed again in plain PyTorch, and compared.

    rounding         how far two correct results may be apart
    noise            the same of a computation that can be repeated: by repeating it with other roundings
    draws            the random numbers that the ranks drew, for the plain computation to use

Of a run, while its ranks train, in a thread of the caller's process:

    whole_step       what all ranks have of a step, put together
    attempt          one step of serial training that can be repeated
    compare, causes  what differs, and why: more comparisons, until one explains it
    suspects         what is said where none does
    prover           a step after another; `proof_thread` runs it

Of a loop of one's own, in the ranks (`mk.prove`, and `prove=` of the wrappers):

    plain_module     the plain module beside the wrapped one: each forward and backward again
    held_tensors     what a rank holds of the parameters, and the whole tensors
    ranks            what the ranks tell each other
    step_gradients   the gradients of a step, compared; `shares` says of whose they are made
    loop             what is heard of a loop, in order

The serial step is `mpkit.strategies.reference.serial`, which shares nothing with the strategies.
"""
