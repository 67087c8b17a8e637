"""Models to train, most of them chains of layers, and functions that cut a chain into stages."""

from mpkit.plan.balance import balance
from mpkit.strategies.models.chain import chain, cut, repeated_blocks
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.models.gpt import GPT, GPTConfig, next_token_loss
from mpkit.strategies.models.networks import MLP, ConvNet, UNet

__all__ = [
    "GPT", "MLP", "ConvNet", "GPTConfig", "MixtureOfExperts", "UNet", "balance", "chain", "cut", "next_token_loss",
    "repeated_blocks",
]  # fmt: skip
