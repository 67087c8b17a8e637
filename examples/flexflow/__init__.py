"""A strategy for each layer of a chain, as FlexFlow searches them, found exactly.

layer          a layer by its sizes, and the ways to split it: samples, operators, attribute, parameters
describe       the layers of an nn.Module
resharding     what is sent where a layer wants its input divided in another way than it is
price          time and memory of a layer under a split, with mpkit's roofline and its collectives
chain_search   dynamic programming over the chain, under a memory limit; brute force
metropolis     FlexFlow's own search, a Markov chain
strategies     `layer_strategies`
result         what it returns
executable     what real ranks can execute of it
execute        the strategy found, on real ranks
layout_exchange  resharding on real ranks
"""

from examples.flexflow.layer import Layer, Split
from examples.flexflow.strategies import layer_strategies

__all__ = ["Layer", "Split", "layer_strategies"]
