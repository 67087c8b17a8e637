"""Models to train, most of them chains of layers, and functions that cut a chain into stages."""

from mpkit.models.blocks import repeated_blocks
from mpkit.models.chain import chain
from mpkit.models.convnet import ConvNet
from mpkit.models.cut import balance, cut
from mpkit.models.gpt import GPT, GPTConfig, next_token_loss
from mpkit.models.mlp import MLP
from mpkit.models.resnet import ResNet
from mpkit.models.unet import UNet

__all__ = [
    "GPT",
    "MLP",
    "ConvNet",
    "GPTConfig",
    "ResNet",
    "UNet",
    "balance",
    "chain",
    "cut",
    "next_token_loss",
    "repeated_blocks",
]
