"""`everstep bench`: how a job scales on this machine."""
