"""The strategies: what runs on a rank, from the bytes of a message to a whole training.

In     a `Plan`, a model, batches, and a rank's `Context`.
Out    trained weights, equal to those of serial training (`proof`), and a trace of how they came about.
Begin  with `reference`, where each strategy is as short as in its paper; `comm` is the one way off a rank.
May import  `common`, `trace`, `plan`, `devices`, `timeline`.

Where each strategy is read: in `reference`, then in the module that trains:

    naive, GPipe, 1F1B, ...     reference/gpipe, one_f_one_b     runtime/pipeline (one runtime for every schedule)
    split backward (I and W)    -                                stage/split_backward
    recomputation               -                                stage/recompute
    nn.DataParallel             reference/dp                     nn_dataparallel/dp
    DDP                         reference/bucketed_ddp           replicas/ddp, reducer
    ZeRO 1, 2, 3                reference/zero1, zero2, zero3    replicas/zero; replicas/reducer, gather
    hybrid shards               reference/hybrid_shards          replicas/part
    tensor, sequence parallel   reference/tensor/                tensor/operators, region
    divided vocabulary          reference/tensor/                tensor/vocabulary
    ring attention              reference/ring_attention         context/ring
    Ulysses                     reference/ulysses                context/ulysses
    experts                     reference/experts/               experts/divide
    balanced routing            reference/experts/balance        models/experts, runtime/experts
    tied weights                -                                replicas/tied
    BatchNorm over replicas     -                                replicas/batchnorm
    mixed precision             reference/serial                 update/update
    checkpoints                 -                                checkpoint/, runtime/checkpoints

A step, from the loop to a layer: runtime/train -> runtime/pipeline -> compute/stage_work -> compute/stage_forward.
Before it: prepare/prepare (all checks), partition (what is no chain of layers). After it: proof/prover.
"""
