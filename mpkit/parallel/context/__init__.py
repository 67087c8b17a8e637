"""Context parallelism: one sequence shared out over the ranks of the axis "cp".

    sequence    which part of a sequence a rank has: contiguous, or in zigzag order
    block       attention of some queries to some keys, and how two such results become one
    ring        attention to the whole sequence: keys and values go round the ranks
    inside      a model's own calls of scaled_dot_product_attention become that
    positions   a model is told where in the sequence its tokens stand
    checks      what cannot be shared out, said before any rank starts

Gradients of the weights are those of a rank's own tokens, and so are summed over the axis, as those of replicas are.
"""
