"""Losses other than a plain mean over the samples of a batch.

counted       losses that return (total, count): the loss of a batch is the sum of totals / the sum of counts;
              `mean_loss` turns a mean of torch's, with ignored targets and class weights, into such a loss
whole_batch   `whole_batch_loss`: a loss that needs all samples at once
"""
