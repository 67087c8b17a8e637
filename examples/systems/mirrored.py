"""TensorFlow's MirroredStrategy: one process, a replica on each of two logical CPU devices.

forward and backward    on each replica, with its half of the batch
all-reduce              of the gradients: MirroredStrategy sums what the replicas have found
update                  AdamW on each replica's copy of the weights

mpkit cannot see into TensorFlow. So the program says what it does: `mk.watch.span`, and `mk.watch.step` where a step
ends.

mpkit watch --ranks 1 mirrored.py
"""

import math
import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}

import tensorflow as tf
import torch
from tiny import HEADS, STEPS, TIME, WIDTH, batch, build, report

import mpkit as mk

REPLICAS, BLOCKS = 2, 4
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2

one = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
with strategy.scope():
    weights = {name: tf.Variable(weight.numpy()) for name, weight in build().state_dict().items()}
    means, squares = ([tf.Variable(tf.zeros_like(w)) for w in weights.values()] for _ in range(2))
names, variables = list(weights), list(weights.values())
nbytes = sum(4 * math.prod(w.shape) for w in variables)


def norm(x: tf.Tensor, name: str) -> tf.Tensor:
    """Return LayerNorm(x)."""
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return tf.nn.batch_normalization(
        x, mean, variance, weights[f"{name}.bias"], weights[f"{name}.weight"], 1e-5
    )


def linear(x: tf.Tensor, name: str) -> tf.Tensor:
    """Return x W^T."""
    return tf.linalg.matmul(x, weights[f"{name}.weight"], transpose_b=True)


def attention(x: tf.Tensor, name: str) -> tf.Tensor:
    """Return causal attention over x, [batch, time, width]."""
    q, k, v = (
        tf.transpose(tf.reshape(linear(x, f"{name}.{part}"), (-1, TIME, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))
        for part in "qkv"
    )
    scores = tf.linalg.matmul(q, k, transpose_b=True) / math.sqrt(WIDTH // HEADS)
    past = tf.linalg.band_part(tf.ones((TIME, TIME)), -1, 0)
    y = tf.linalg.matmul(tf.nn.softmax(scores - 1e9 * (1 - past)), v)
    return linear(tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (-1, TIME, WIDTH)), f"{name}.out")


def logits(words: tf.Tensor) -> tf.Tensor:
    """Return what the GPT of tiny.py computes: words [batch, time] to [batch, time, words]."""
    x = tf.gather(weights["0.words.weight"], words) + weights["0.positions.weight"]
    for i in range(1, BLOCKS + 1):
        x += attention(norm(x, f"{i}.norm1"), f"{i}.attention")
        x += linear(tf.nn.gelu(linear(norm(x, f"{i}.norm2"), f"{i}.mlp.up")), f"{i}.mlp.down")
    return linear(norm(x, f"{BLOCKS + 1}.norm"), f"{BLOCKS + 1}.logits")


@tf.function
def forward_and_backward(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return a replica's part of the mean loss over the whole batch, and of its gradients."""
    with tf.GradientTape() as tape:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(x))
        loss = tf.reduce_mean(each) / REPLICAS
    return loss, [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]


def adamw(w: tf.Variable, g: tf.Tensor, m: tf.Variable, v: tf.Variable, t: int) -> None:
    """Update one copy of a weight (Loshchilov and Hutter 2019, algorithm 2, as torch.optim.AdamW has it)."""
    w.assign(w * (1 - RATE * DECAY))
    m.assign(BETA1 * m + (1 - BETA1) * g)
    v.assign(BETA2 * v + (1 - BETA2) * g * g)
    w.assign_sub(RATE * (m / (1 - BETA1**t)) / (tf.sqrt(v / (1 - BETA2**t)) + EPSILON))


losses = []
for step in range(STEPS):
    shares = [batch(step, replica, REPLICAS) for replica in range(REPLICAS)]
    x, y = (
        strategy.experimental_distribute_values_from_function(
            lambda replica, parts=parts: tf.constant(parts[replica.replica_id_in_sync_group].numpy())
        )
        for parts in zip(*shares, strict=True)
    )
    with mk.watch.span("forward and backward"):
        loss, gradients = strategy.run(forward_and_backward, (x, y))
    with mk.watch.span("gradients", kind="all_reduce", nbytes=nbytes):
        summed = [
            strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, gradient, weight)
            for gradient, weight in zip(gradients, variables, strict=True)
        ]
    with mk.watch.span("AdamW", kind="optimizer"):
        for w, g, m, v in zip(variables, summed, means, squares, strict=True):
            strategy.extended.update(w, adamw, (g, m, v, step + 1))
    mk.watch.step()
    losses.append(float(strategy.reduce("SUM", loss, axis=None)))

report(losses, {name: torch.from_numpy(w.numpy()) for name, w in weights.items()})
