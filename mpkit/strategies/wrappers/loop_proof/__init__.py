"""The proof in a loop of one's own: the first steps of a wrapped module are compared with plain PyTorch (`prove=`).

    arguments       what may be given
    proof           what a wrapper calls before and after a forward, a backward and a step
    plain_copy      the plain module beside the wrapped one: each forward and backward again
    attributes      what modules keep besides parameters and buffers, and where tensors are in what they return
    random_states   the states of random number generators
    gradients       the gradients of a step, heard on their way
    comparison      the gradients of a step, compared
    weights         the copy's weights, from what the ranks' optimizers update
    agreement       ranks tell each other what they found, so all raise the same

It uses torch.distributed alone, and nothing of the strategies.
"""
