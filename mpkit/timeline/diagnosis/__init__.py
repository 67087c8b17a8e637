"""Why a step takes as long as it does: rules over one step, each of which plays the step again without its cause.

evidence               the step, its graph, who waits for whom, its machine and plan
rules                  all rules in order, and `diagnose`
stragglers             a rank that is slower than those that do the same
stages                 stages of unlike size; the bubble of a schedule with few micro-batches
buckets                gradients that are reduced later than they could be
links                  a link that is slower than others; messages that are too small
exposed_communication  communication that nothing hides
host                   a device that waits for its host: launches, synchronizing calls, loading of data, copies
memory                 recomputation that saves nothing; memory near the limit
bubble_words           the bubble beside theory, in a sentence

A rule names and explains its thresholds. What a general rule finds does not count what a special one has explained.
"""
