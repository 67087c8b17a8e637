"""Losses that are no plain mean over the samples of a batch.

quotient      a loss that returns (total, count): the loss of a batch is the sum of totals / the sum of counts
mean          `mean_loss`: such a loss from one of torch's, with ignored targets and class weights
whole_batch   `whole_batch_loss`: a loss that has to see all samples at once
"""
