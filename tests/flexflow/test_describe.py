"""Layers described from modules: their sizes, and what they may be split by."""

from __future__ import annotations

import torch
from torch import nn

from examples.flexflow.describe import describe_chain
from examples.flexflow.layer import Layer
from mpkit.models import GPT


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 10), nn.Softmax(-1),
    )  # fmt: skip


def test_a_convolutional_network() -> None:
    convolution, norm, relu, pool, flatten, linear, softmax = describe_chain(images(), sample=(3, 8, 8))
    assert convolution == Layer(
        "0", 3 * 64, 8 * 64, flops=2 * 64 * 8 * 3 * 9, parameters=8 * 3 * 9 + 8, attribute=8, parameter=8,
        exchanged=2 * 3 * 8,
    )  # fmt: skip
    assert (norm.sample, norm.parameter, norm.channels) == (False, 8, "kept")
    assert (relu.attribute, relu.parameter, relu.parameters) == (8, 8, 0)
    assert (pool.inputs, pool.outputs, pool.attribute) == (8 * 64, 8 * 16, 4)
    assert (flatten.attribute, flatten.parameter, flatten.channels) == (1, 8, "kept")
    assert (linear.parameter, linear.attribute, linear.channels) == (10, 1, "gathered")
    assert (softmax.sample, softmax.attribute, softmax.parameter) == (
        True,
        1,
        1,
    )  # of a kind that is not known


def test_a_gpt() -> None:
    model = GPT(layers=3, width=32, heads=4, length=16, vocab=64)
    embedding, *blocks, head = describe_chain(model)
    assert [block.name for block in blocks] == ["block0", "block1", "block2"]
    assert len({block.sizes for block in blocks}) == 1
    block = blocks[0]
    assert block.flops == 16 * (24 * 32**2 + 4 * 17 / 2 * 32)  # a token sees 17/2 others, on average
    assert (block.attribute, block.parameter, block.sums, block.exchanged) == (16, 4, 2, 2 * 16 * 32)
    assert (embedding.inputs, embedding.parameter, head.outputs, head.parameter) == (16, 32, 16 * 64, 64)
    assert sum(each.parameters for each in describe_chain(model)) == sum(
        p.numel() for p in model.parameters()
    )
    with torch.device("meta"):
        large = GPT(layers=3, width=32, heads=4, length=16, vocab=64)
    assert describe_chain(large) == describe_chain(model)
