"""The proof: steps on ranks are computed again in plain PyTorch, and compared.

    rounding         how far two correct results may be apart
    compare          whether two tensors are the same; if in doubt by repeating their computation with other roundings
    causes.toml      the sentences that say why a step differs, and what works
    draws            the random numbers that the ranks drew, for the plain computation to use

Of a run, while its ranks train, in a thread of the caller's process:

    whole_step       what all ranks have of a step, put together
    attempt          one step of serial training that can be repeated
    prover           a step after another; `proof_thread` runs it
    causes           why a step differs: more comparisons, until one explains it; `parts` of the batch among them

Of a loop of one's own, in the ranks (`mk.prove`, and `prove=` of `mk.pipeline`):

    plain_module     the plain module beside the wrapped one: its forwards and backwards again
    ranks            what the ranks hold, and tell each other
    backwards        when a backward begins and ends
    step_gradients   the gradients of a step, compared, and of whose they are made
    loop             what is heard of a loop, in order

The serial step is `mpkit.strategies.reference.serial`, which shares nothing with the strategies.
"""
