"""The rendezvous: agents agree on who trains together, in rounds that no single death can break.

`machine` computes the document after one change. `proposals` computes what one agent would write next. `driver` carries
that out over a `RoundStore`. The stores are in `backends`, the connections between agents in `peers`. Only `torchrun`,
which torch loads, imports torch.
"""
