"""Recovery in process: a training process that loses a peer keeps its memory, joins the next round and goes on.

`engine` keeps the process in the newest round, and has one object for each part of the work: `announcements` says which
round there is, `forming` makes its groups, `group` is what collectives run on, `rollback` puts a failed step back, and
`transfer` brings all members to one state. `state`, `ddp` and `sharding` know what of torch makes up that state.
"""
