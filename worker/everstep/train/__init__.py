"""The session: a training loop that is restored, saved, reported and stopped in order, and goes on when a peer is lost.

`session` and `loops` are what a script uses; `worlds` and `recovering_world` are the kinds of worlds that a loop runs
in. `coordination` is what ranks do between two steps, `feeding` what they read, `guards` what they refuse. Public names
are exported lazily by `everstep`.
"""
