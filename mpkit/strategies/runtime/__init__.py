"""A training on a rank: the loop, the pipeline, messages between stages, checkpoints.

`Training.step` (`train.py`) is a whole step. Each part answers one question:

    Feed            which samples of the batch, in which micro-batches? (`strategies.job.feed`)
    Pipeline        in which order forwards, backwards, sends and receives? Any valid schedule; one stage is serial
    StageWork       what is a stage's forward, and its backward, whole or in two halves (I, W)? (`strategies.compute`)
    GradientSync    who holds what of the model, and how do replicas stay equal? One replica, `DDP`, `Zero1` to `Zero3`
    TiedWeights     how do copies of one weight in several stages stay equal?
    Update          from complete gradients to new weights: rate, unscale, clip, step (`strategies.update`)
    Checkpoints     what is saved, so that ranks that are divided in another way can go on from it?

A `GradientSync` has the `pieces` of parameters that this rank updates: name, first and last element. Optimizers,
clipping, loss scaling, checkpoints and resharding know pieces only, and nothing of strategies.

A micro-batch of k samples out of a batch of K counts k/K on every rank. So gradients are summed over micro-batches and
replicas, and uneven shares come out right. A loss that counts something other than samples returns (total, count):
totals are backpropagated, and the update divides the complete gradients by the whole count (`strategies.loss`).

After a step comes `AfterStep`: an evaluation if one is due, and the user's `on_step`.
"""
