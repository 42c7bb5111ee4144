"""A web page about jobs, which changes nothing (ADR 0059).

`model` says what it shows, `rows` prepares it, `server` answers requests. Where jobs come from and who may see them is
given: `cluster` and `reviews` for an operator in a cluster, everstep-local for runs of one machine. Nothing in the
operator imports this package unless the page is on.
"""
