"""Communication between ranks: collectives and messages, which are recorded and compared across ranks.

A `Communicator` is a group of ranks as one of them sees it, as in MPI: `ctx.comm` has all ranks,
`ctx.comm.group(ranks)` some, and `MeshAxes.communicator_of(axis)` those along an axis of the mesh. All communicators of
a rank share one `Wire`: the recorder, counts of messages, staging. Along an axis of one rank the communicator is a
`OneRank`, which sends and records nothing, so strategies need no special case.

Before a call starts, its rank publishes a fingerprint (kind, dtype, shape, reduction, root) in a mapped file and reads
its peers' fingerprints (`call_checks`). If they differ, the last rank to come raises before its backend starts, so no
rank receives garbage. Two collectives with one signature in another order are not seen.
"""
