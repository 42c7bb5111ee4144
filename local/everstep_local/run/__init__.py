"""`everstep run`: the operator, an in-memory cluster and nodes of processes as one program, and what it shows."""
