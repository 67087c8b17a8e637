"""The strategies: what runs on a rank, from the bytes of a message to a whole training.

In     a `Plan`, a model, batches, and a rank's `Context`.
Out    trained weights, equal to those of serial training (`proof`), and a trace of how they came about.
Begin  with `reference`, where each strategy is as short as in its paper; `comm` is the one way off a rank; then
       `data_parallel`, `zero`, `tensor`, `context`, `runtime` (the loop and the pipeline), `prepare` (all checks).
May import  `common`, `trace`, `plan`, `devices`, `timeline`.
"""
