"""A strategy for each layer of a chain, as FlexFlow searches them, found exactly.

layer          a layer by its sizes, and the ways to split it: samples, operators, attribute, parameters
describe       the layers of an nn.Module
resharding     what is sent where a layer wants its input divided in another way than it is
price          time and memory of a layer under a split, with mpkit's roofline and its collectives
chain_search   dynamic programming over the chain, under a memory limit; brute force
strategies     `layer_strategies`
result         what it returns
soap_...       one layer split by sample, operator, attribute and parameter, on two real ranks: `soap`
operators_at_once  a layer norm's mean and standard deviation on two ranks at the same time
"""

from examples.flexflow.layer import Layer, Split
from examples.flexflow.operators_at_once import mean_and_std_at_once
from examples.flexflow.soap_splits import soap
from examples.flexflow.strategies import layer_strategies

__all__ = ["Layer", "Split", "layer_strategies", "mean_and_std_at_once", "soap"]
