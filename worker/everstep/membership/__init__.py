"""Who trains together: rounds that no single death can break.

`machine` says what one change makes of the document, `proposals` says what one agent would write next, and `driver`
does it over a `RoundStore`. The stores are in `backends`, the connections between agents in `peers`. Only `torchrun`,
which torch loads, imports torch.
"""
