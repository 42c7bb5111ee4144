"""The session: a training loop that is restored, saved, reported and stopped in order, and goes on when a peer is lost.

A script uses `session` and `loops`. A loop runs in one of the kinds of worlds in `worlds` and `recovering_world`.
`coordination` has the work of ranks between two steps, `feeding` the reading of data, and `guards` the checks that
refuse a script. Public names are exported lazily by `everstep`.
"""
