"""Recovery in process: a training process that loses a peer keeps its memory, joins the next round and goes on.

`group` is what collectives run on, `forming` makes it for a round, `rounds` says which round there is, `rejoin` brings
all members to the same state.
"""
