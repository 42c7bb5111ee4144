"""`everstep rehearse`: a script is run calm, and with its ranks killed, and the runs are compared step by step."""
