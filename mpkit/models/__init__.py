"""Models to train, each a chain of layers, and what cuts a chain into stages."""

from mpkit.models.chain import chain
from mpkit.models.convnet import ConvNet
from mpkit.models.cut import balance, cut
from mpkit.models.gpt import GPT, GPTConfig, next_token_loss
from mpkit.models.mlp import MLP

__all__ = ["GPT", "MLP", "ConvNet", "GPTConfig", "balance", "chain", "cut", "next_token_loss"]
