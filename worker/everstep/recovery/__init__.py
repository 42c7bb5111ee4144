"""Recovery in process: a training process that loses a peer keeps its memory, joins the next round and goes on.

`engine` keeps the process in the newest round, and has one object for each part of the work. `announcements` receives
rounds from the agent. `forming` makes a round's groups. `group` runs the collectives. `rollback` undoes a failed step.
`transfer` brings all members to one state. `state`, `ddp` and `sharding` know which of torch's objects make up that
state.
"""

from everstep.torch_private import names

# Before the modules of this package are imported: they would raise an ImportError that names no version that works.
names.check()
