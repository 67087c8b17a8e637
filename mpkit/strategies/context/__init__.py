"""Context parallelism: one sequence divided over the ranks of the axis "cp".

    sequence           which part of a sequence a rank has: contiguous, or in zigzag order; the positions of its tokens
    ring               attention to the whole sequence: keys and values are passed around a ring of ranks
    ulysses            the same, with heads divided over ranks during attention
    divided_attention  replaces a model's own calls of scaled_dot_product_attention by one of these

The gradients of the weights on a rank come from its own tokens, and so are summed over the axis like those of replicas.
"""
